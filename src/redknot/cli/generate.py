"""`redknot generate`: answer one question over files."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from redknot.cli.console import check_writable, console, write_json
from redknot.cli.options import Flat, MapOption, Paths, open_map, open_session, read_documents
from redknot.llm import LLM, Generation
from redknot.models.loading import LoadOptions
from redknot.recovery.policies import parse_policy


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """How the answer is made."""

    policy: str = "question_drop"
    "NAME or NAME:OPTION=VALUE:..."
    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    system: str | None = None
    "System message."
    planned: bool = True
    "Let the planner run dense where the policy is predicted to lose."
    build: bool = True
    "Build the state of all documents before asking (as an earlier request would have)."


def generate(
    model: str = "embedded",
    *,
    question: str,
    documents: Paths = [],  # noqa: B006 - cyclopts copies defaults
    options: Annotated[GenerateOptions, Flat] = GenerateOptions(),
    head_map: Annotated[MapOption, Flat] = MapOption(),
    load: Annotated[LoadOptions, Flat] = LoadOptions(),
    json: Path | None = None,
    save_plan: Path | None = None,
) -> None:
    """Answer a question over documents and say what was reused.

    Parameters
    ----------
    model
        `embedded`, a folder, a GGUF file or a hub name.
    question
        What to ask.
    documents
        Files, or folders of files.
    json
        Write the answer and all figures here.
    save_plan
        Write the executed plan here, for `inspect plan`.
    """
    check_writable(json, save_plan)
    policy = parse_policy(options.policy)
    texts = read_documents(documents)
    session = open_session(model, load)
    llm = LLM(
        session.model, head_map=open_map(head_map, session), policy=policy, planned=options.planned
    )
    if options.build:
        for text in texts:
            llm.segment(text)
    stream = llm.stream(
        texts,
        question,
        max_tokens=options.max_tokens,
        system=options.system,
        stop=options.stop,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        store=False,
    )
    for piece in stream:
        console.print(piece, end="", markup=False)
    console.print()
    if stream.result is not None:
        console.print(summary(stream.result), style="dim", markup=False)
        result = stream.result
        record = {field.name: getattr(result, field.name) for field in fields(result)}
        write_json(json, {name: value for name, value in record.items() if name != "plan"})
        if save_plan is not None:
            result.plan.save(save_plan)


def summary(result: Generation) -> str:
    """What one answer cost, in two lines."""
    reuse = result.reuse
    states = ", ".join(
        f"{outcome.span.title or 'span'}: {outcome.status}"
        + (f" ({outcome.reason})" if outcome.reason else "")
        for outcome in reuse.segments
    )
    return (
        f"{result.policy} ({result.decision}): {reuse.prompt_tokens} prompt tokens,"
        f" {reuse.reused_tokens} reused, {reuse.cached_tokens} saved,"
        f" FLOPs {result.flops_share:.2f} of dense, first token after {result.ttft:.2f} s\n{states}"
    )
