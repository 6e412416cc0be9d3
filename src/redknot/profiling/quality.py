"""What a head map costs in fidelity, at several global shares and windows."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from redknot.evaluation.data import Row
from redknot.evaluation.fidelity import Fidelity, Reference, fidelity, reference
from redknot.evaluation.metrics import Interval, bootstrap
from redknot.execution import Prefilled, Visibility
from redknot.execution.session import Session
from redknot.heads import HeadMap, retained_share
from redknot.recovery import Windows
from redknot.recovery.policies import Dense, Duo
from redknot.segments import Prompt

ANSWER_TOKENS = 16


class MapQuality(msgspec.Struct, frozen=True, kw_only=True):
    """One map, with its windows on one kind of rows."""

    windows: str
    "context, or decode: the question's rows and what is generated."
    global_share: float
    window: int
    head_share: float
    "Share of local groups."
    kv_share: float
    "Share of the prompt's K/V that decoding keeps."
    flops_share: float
    kl: Interval
    agreement: Interval
    gold_nll_change: Interval


def measure_maps(
    session: Session,
    prompts: Sequence[tuple[Row, Prompt]],
    scores: Float[Tensor, "layer group"],
    shares: Sequence[float],
    windows: Sequence[int],
    sink: int,
) -> list[MapQuality]:
    """Dense with windows on context rows, and with windows on later rows, for every map."""
    if not prompts:
        return []
    maps = {
        (share, window): HeadMap.from_scores(scores, global_share=share, window=window, sink=sink)
        for share in shares
        for window in windows
    }
    found: dict[tuple[str, float, int], list[tuple[Fidelity, float, float]]] = {}
    for row, prompt in tqdm(prompts, desc="judge maps", unit="prompt"):
        dense = session.prefill(prompt, Dense(), room=2 * ANSWER_TOKENS)
        ref = _reference(session, row, dense)
        for key, head_map in maps.items():
            for name, prefilled in (
                ("context", _context_windows(session, prompt, head_map)),
                ("decode", _decode_windows(session, dense, head_map)),
            ):
                score = _fidelity(session, prefilled, ref)
                kept = retained_share(len(prompt), list(prefilled.sight.decode))
                found.setdefault((name, *key), []).append((score, kept, prefilled.flops_share))
    return [_summary(key, values) for key, values in found.items()]


def _context_windows(session: Session, prompt: Prompt, head_map: HeadMap) -> Prefilled:
    policy = Duo(windows=Windows.CONTEXT)
    return session.prefill(prompt, policy, head_map, room=2 * ANSWER_TOKENS)


def _decode_windows(session: Session, dense: Prefilled, head_map: HeadMap) -> Prefilled:
    """Dense's context with the question's rows run again under windows."""
    executor, layout = session.executor, dense.layout
    sight = Visibility.of(executor.shapes, layout.context_end, head_map, Windows.DECODE)
    windowed = replace(dense, sight=sight)
    dense.cache.truncate(layout.context_end)
    logits = executor.extend(windowed, dense.token_ids[layout.context_end :])[-1]
    return replace(windowed, logits=logits)


def _reference(session: Session, row: Row, dense: Prefilled) -> Reference:
    gold = session.model.tokenizer(" " + row.answers[0].strip(), add_special_tokens=False)
    answer = torch.tensor(gold.input_ids[:ANSWER_TOKENS])
    ends = session.model.end_token_ids
    return reference(session.executor, dense, answer, ends, ANSWER_TOKENS)


def _fidelity(session: Session, prefilled: Prefilled, ref: Reference) -> Fidelity:
    ends = session.model.end_token_ids
    return fidelity(session.executor, prefilled, ref, ends, ANSWER_TOKENS)


def _summary(
    key: tuple[str, float, int], values: list[tuple[Fidelity, float, float]]
) -> MapQuality:
    scores = [score for score, _, _ in values]
    return MapQuality(
        windows=key[0],
        global_share=key[1],
        window=key[2],
        head_share=1 - key[1],
        kv_share=sum(kept for _, kept, _ in values) / len(values),
        flops_share=sum(share for _, _, share in values) / len(values),
        kl=bootstrap([score.kl for score in scores]),
        agreement=bootstrap([score.agreement for score in scores]),
        gold_nll_change=bootstrap([score.gold_nll_change for score in scores]),
    )
