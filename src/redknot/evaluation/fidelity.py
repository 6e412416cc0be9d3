"""How far a policy's output is from dense's, on one prompt."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from redknot.execution import Executor, Prefilled


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What dense says to one prompt."""

    answer: Int[Tensor, "token"]
    "Dense's own greedy answer, its end token included."
    gold: Int[Tensor, "token"]
    along: Float[Tensor, "token vocab"]
    "Log-probabilities before each token of `answer`."
    gold_nll: float


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Distances of one prompt."""

    kl: float
    "Mean KL(dense || policy) along dense's greedy answer, in nats."
    agreement: float
    "Share of dense's greedy answer that the policy's top-1 agrees with, teacher-forced."
    gold_nll_change: float
    "Mean NLL of the gold answer minus dense's, in nats a token."
    top1: float
    "Whether the first token is dense's."
    top10: float
    "Share of dense's ten best first tokens among the policy's ten best."
    answer: tuple[int, ...]
    "The policy's own greedy answer; empty where none was asked for."


def reference(
    executor: Executor,
    dense: Prefilled,
    gold: Int[Tensor, "token"],
    end_token_ids: frozenset[int],
    max_tokens: int,
) -> Reference:
    """Dense's greedy answer and what it thinks of the gold one."""
    answer = torch.tensor(greedy(executor, dense, end_token_ids, max_tokens))
    along = _along(executor, dense, answer)
    return Reference(answer, gold, along, _nll(_along(executor, dense, gold), gold))


def fidelity(
    executor: Executor,
    prefilled: Prefilled,
    ref: Reference,
    end_token_ids: frozenset[int],
    max_tokens: int,
) -> Fidelity:
    """Compare one policy with dense; leaves ``prefilled`` as it was.

    With ``max_tokens`` 0 the policy writes no answer of its own.
    """
    along = _along(executor, prefilled, ref.answer)
    chosen = along.argmax(-1).cpu()
    agrees = chosen == ref.answer
    # The policy's own answer equals dense's up to the first disagreement: decode only from there.
    same = len(ref.answer) if bool(agrees.all()) else int(agrees.long().argmin())
    answer = ref.answer[: min(same, max_tokens)].tolist()
    if same < len(ref.answer):
        answer = greedy(executor, prefilled, end_token_ids, max_tokens, prefix=answer)
    first = along[0].topk(10).indices
    return Fidelity(
        kl=float((ref.along.exp() * (ref.along - along)).sum(-1).mean()),
        agreement=float(agrees.float().mean()),
        gold_nll_change=_nll(_along(executor, prefilled, ref.gold), ref.gold) - ref.gold_nll,
        top1=float(agrees[0]),
        top10=float(torch.isin(first, ref.along[0].topk(10).indices).float().mean()),
        answer=tuple(answer),
    )


def greedy(
    executor: Executor,
    prefilled: Prefilled,
    end_token_ids: frozenset[int],
    max_tokens: int,
    prefix: list[int] | None = None,
) -> list[int]:
    """Greedy continuation behind ``prefix``, which it includes; leaves ``prefilled`` as it was."""
    length = prefilled.cache.length
    tokens, logits = list(prefix or []), prefilled.logits
    if len(tokens) >= max_tokens:
        return tokens
    if tokens:
        logits = executor.extend(prefilled, torch.tensor(tokens))[-1]
    while len(tokens) < max_tokens:
        tokens.append(int(logits.argmax()))
        if tokens[-1] in end_token_ids or len(tokens) == max_tokens:
            break
        logits = executor.extend(prefilled, torch.tensor(tokens[-1:]))[-1]
    prefilled.cache.truncate(length)
    return tokens


def _along(
    executor: Executor, prefilled: Prefilled, tokens: Int[Tensor, "token"]
) -> Float[Tensor, "token vocab"]:
    """Log-probabilities before each of ``tokens``, teacher-forced."""
    length = prefilled.cache.length
    logits = prefilled.logits[None]
    if len(tokens) > 1:
        logits = torch.cat([logits, executor.extend(prefilled, tokens[:-1])])
    prefilled.cache.truncate(length)
    return logits.log_softmax(-1)


def _nll(along: Float[Tensor, "token vocab"], tokens: Int[Tensor, "token"]) -> float:
    return -float(along.gather(1, tokens[:, None].to(along.device)).mean())
