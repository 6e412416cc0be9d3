"""`redknot demo`: three questions over shuffled documents, dense beside a policy."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec
from rich.table import Table
from tqdm.auto import tqdm

from redknot.cli.console import check_writable, console, write_json
from redknot.cli.options import Flat, MapOption, open_map, open_session
from redknot.evaluation.compare import Comparison
from redknot.llm import LLM
from redknot.models.loading import LoadOptions
from redknot.recovery.policies import parse_policy
from redknot.segments import Document


class DemoQuestion(msgspec.Struct, frozen=True):
    """A question of the demo."""

    question: str
    expected: str
    order: tuple[int, ...]
    "Of the documents, by name."


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """What dense and the policy made of one question."""

    question: str
    expected: str
    prompt_tokens: int
    reused_tokens: int
    "Of stored segments: at least one layer kept their state."
    dense: Comparison
    policy: Comparison
    ttft_ratio: float
    "Dense's time over the policy's."


def demo(
    model: str = "embedded",
    *,
    policy: str = "question_drop",
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    head_map: Annotated[MapOption, Flat] = MapOption(),
    json: Path | None = None,
) -> None:
    """Ask three questions over six documents, shuffled between questions.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file or a hub name.
    policy
        What to show beside dense.
    json
        Write answers and figures here.
    """
    check_writable(json)
    chosen = parse_policy(policy)
    texts, questions = _documents(), _questions()
    session = open_session(model, load)
    llm = LLM(session.model, head_map=open_map(head_map, session), policy=chosen)
    for text in tqdm(texts, desc="store documents", unit="document"):
        llm.segment(text)
    answers = [
        _ask(llm, policy, [texts[index] for index in one.order], one)
        for one in tqdm(questions, desc="ask", unit="question")
    ]
    for answer in answers:
        console.print(_table(answer))
    speed = sum(a.dense.ttft for a in answers) / sum(a.policy.ttft for a in answers)
    console.print(f"first token {speed:.1f} times sooner than dense over {len(answers)} questions")
    write_json(json, answers)


def _ask(llm: LLM, policy: str, texts: list[Document], one: DemoQuestion) -> DemoAnswer:
    dense, other = llm.compare(texts, one.question, [policy])
    total, throughout = dense.rows_per_layer[0], other.rows_per_layer[-1]
    return DemoAnswer(
        question=one.question,
        expected=one.expected,
        prompt_tokens=total,
        reused_tokens=total - throughout,
        dense=dense,
        policy=other,
        ttft_ratio=dense.ttft / other.ttft,
    )


def _table(answer: DemoAnswer) -> Table:
    table = Table(
        title=f"{answer.question} (expected: {answer.expected})", title_justify="left", width=100
    )
    table.add_column("")
    table.add_column("dense", overflow="fold")
    table.add_column(answer.policy.policy, overflow="fold")
    pair = (answer.dense, answer.policy)
    first, last = (answer.policy.rows_per_layer[index] for index in (0, -1))
    total = answer.prompt_tokens
    table.add_row("answer", *(one.text.partition("\n")[0] for one in pair))
    table.add_row("reused", "0", f"{answer.reused_tokens} of {total} tokens")
    table.add_row("recomputed", f"{total} tokens", f"{first}, in deep layers {last} tokens")
    table.add_row("FLOPs", *(f"{one.flops_share:.2f}" for one in pair))
    table.add_row("first token", *(f"{one.ttft:.2f} s" for one in pair))
    table.add_row("agreement", *(f"{one.agreement:.2f}" for one in pair))
    return table


def _documents() -> list[Document]:
    folder = files("redknot.demo").joinpath("documents")
    texts = sorted((entry.name, entry.read_text("utf-8")) for entry in folder.iterdir())
    return [
        Document(body.strip(), title)
        for title, _, body in (text.partition("\n") for _, text in texts)
    ]


def _questions() -> list[DemoQuestion]:
    content = files("redknot.demo").joinpath("questions.json").read_bytes()
    return msgspec.json.decode(content, type=list[DemoQuestion])
