"""The library's front door: what is stored, reused, planned and refused."""

import pytest
import torch
from tests.printable import printable_model
from torch import Tensor

import redknot
from redknot import LLM, Document, InputError, Policy, PromptTemplate, Stage
from redknot.llm import Generation
from redknot.recovery.policies import Dense
from redknot.segments import MemoryStore

A = Document("The bridge was built in 1904 of red stone by the town of Lom. " * 3, "bridge")
B = Document("The tower was never finished, since the money ran out early. " * 3, "tower")
C = Document("A ferry crosses the lake twice a day, except on Sundays. " * 3, "ferry")
QUESTION = "When was the bridge built?"


def open_llm(**options: object) -> LLM:
    return LLM(printable_model(), **{"head_map": None, "planned": False, **options})


def statuses(result: Generation) -> dict[str, str]:
    return {one.span.title: one.status for one in result.reuse.segments}


def test_generate_gives_text_tokens_times_and_what_was_reused() -> None:
    llm = open_llm()
    result = llm.generate([A, B], QUESTION, max_tokens=9)
    assert len(result.token_ids) == 9
    assert result.text == llm.session.tokeniser.decode(result.token_ids)
    assert result.finish_reason == "length"
    assert {"lookup", "relocate", "recover", "decode", "build"} <= set(result.seconds)
    assert all(spent >= 0 for spent in result.seconds.values())
    before = ("plan", "lookup", "relocate", "probe", "recover")
    assert sum(result.seconds.get(stage, 0) for stage in before) <= result.ttft
    assert result.reuse.prompt_tokens == len(llm.prompt([A, B], QUESTION)) == result.plan.num_tokens


def test_a_cold_request_runs_dense_and_says_why() -> None:
    result = open_llm(planned=True).generate([A, B], QUESTION, max_tokens=1)
    assert result.policy == "dense"
    assert result.decision == "no segment of the prompt is stored"
    assert result.reuse.reused_tokens == result.reuse.cached_tokens == 0
    assert statuses(result) == {"bridge": "new", "tower": "new"}
    assert {one.reason for one in result.reuse.segments} == {"not stored"}


@pytest.mark.parametrize("policy", ["reuse", "question_drop", "epic:k=8"])
def test_the_same_request_again_reuses_every_document(policy: str) -> None:
    """Also RU-01: the identical prompt is the fastest case, and answers stay the same."""
    llm = open_llm(policy=policy)
    first, second, third = (llm.generate([A, B], QUESTION, max_tokens=12) for _ in range(3))
    assert set(statuses(first).values()) == {"new"}
    assert set(statuses(second).values()) == {"stored"}
    assert second.token_ids == third.token_ids
    assert second.flops_share < first.flops_share
    spans = llm.prompt([A, B], QUESTION).spans
    if policy == "reuse":
        outside = len(llm.prompt([A, B], QUESTION)) - sum(map(len, spans)) - spans[0].start
        assert [len(layer.active) for layer in second.plan.layers] == [outside] * 4
        assert second.reuse.reused_tokens == second.reuse.prompt_tokens - outside
    assert 0 < second.reuse.cached_tokens <= second.reuse.reused_tokens


def test_a_new_document_beside_a_stored_one_is_stored_too() -> None:
    """RU-03: [A, B], then [A, C], then [C, A] with all of it reused."""
    llm = open_llm(policy="reuse")
    requests = ([A, B], [A, C], [C, A])
    found = [statuses(llm.generate(some, QUESTION, max_tokens=1)) for some in requests]
    assert found == [
        {"bridge": "new", "tower": "new"},
        {"bridge": "stored", "ferry": "new"},
        {"ferry": "stored", "bridge": "stored"},
    ]


def test_without_store_nothing_is_kept() -> None:
    llm = open_llm()
    result = llm.generate([A], QUESTION, max_tokens=1, store=False)
    assert "build" not in result.seconds
    assert statuses(llm.generate([A], QUESTION, max_tokens=1)) == {"bridge": "new"}


def test_a_segment_built_beforehand_is_found_by_the_first_request() -> None:
    llm = open_llm()
    built = llm.segment(A)
    assert built.num_tokens == len(llm.prompt([A], QUESTION).spans[0])
    assert built.num_bytes > 0
    assert llm.segment(A.text, A.title).key == built.key
    assert llm.segment(B).key != built.key
    assert statuses(llm.generate([C, A], QUESTION, max_tokens=1)) == {
        "ferry": "new",
        "bridge": "stored",
    }


def test_a_store_serves_every_llm_of_the_same_model_and_tenant() -> None:
    store = MemoryStore()
    open_llm(store=store).segment(A)
    again = open_llm(store=store).generate([A], QUESTION, max_tokens=1)
    assert statuses(again) == {"bridge": "stored"}
    other = open_llm(store=store, salt="tenant").generate([A], QUESTION, max_tokens=1)
    assert statuses(other) == {"bridge": "new"}


def test_plain_text_is_reused_by_content() -> None:
    generator = torch.Generator().manual_seed(0)
    text = "".join(chr(int(x)) for x in torch.randint(97, 123, (2500,), generator=generator))
    llm = open_llm(policy="reuse")
    first = llm.generate(text=text, max_tokens=1)
    second = llm.generate(text="Something else first. " + text, max_tokens=1)
    assert {one.status for one in first.reuse.segments} == {"new"}
    stored = [one.status for one in second.reuse.segments].count("stored")
    assert stored >= len(first.reuse.segments) - 2 >= 2  # the first borders may move
    assert second.reuse.reused_tokens > 1000


@pytest.mark.parametrize("policy", ["reuse", "question_drop", "layer_drop", "cacheblend"])
def test_the_question_may_stand_before_the_documents(policy: str) -> None:
    llm = open_llm(policy=policy, template=PromptTemplate(question_first=True))
    prompt = llm.prompt([A, B], QUESTION)
    assert prompt.probe[1] <= prompt.spans[0].start
    asked = llm.session.tokeniser.decode(prompt.token_ids[slice(*prompt.probe)].tolist())
    assert QUESTION in asked
    first, second = (llm.generate([A, B], QUESTION, max_tokens=3) for _ in range(2))
    assert set(statuses(second).values()) == {"stored"}
    assert second.reuse.reused_tokens > first.reuse.reused_tokens == 0


class EveryOther(Policy):
    """A policy of a user: every second stored token, in all layers."""

    name = "every_other"

    def keep(self, stage: Stage) -> Tensor:
        return stage.active if stage.layer else stage.active[::2]


def test_a_users_policy_runs_like_any_other() -> None:
    llm = open_llm(policy=EveryOther())
    llm.segment(A)
    result = llm.generate([A], QUESTION, max_tokens=2)
    (span,) = llm.prompt([A], QUESTION).spans
    assert result.policy == "every_other"
    for layer in result.plan.layers:
        inside = layer.active[(layer.active >= span.start) & (layer.active < span.stop)]
        assert inside.tolist() == list(range(span.start, span.stop, 2))


def test_compare_puts_dense_first_and_at_no_distance() -> None:
    found = open_llm().compare([A, B], QUESTION, ["reuse", Dense(), EveryOther()], max_tokens=6)
    assert [one.policy for one in found] == ["dense", "reuse", "every_other"]
    assert (found[0].agreement, found[0].kl) == (1, 0)
    assert found[1].flops_share < found[2].flops_share < found[0].flops_share
    assert found[1].rows_per_layer[0] < found[0].rows_per_layer[0]
    assert all(one.ttft > 0 and one.text for one in found)


@pytest.mark.parametrize("request_", [{}, {"documents": [A], "text": "x"}, {"text": " "}])
def test_a_request_has_either_documents_or_text(request_: dict[str, object]) -> None:
    with pytest.raises(InputError):
        open_llm().generate(**request_)


def test_what_cannot_run_is_refused_before_anything_is_computed() -> None:
    llm = open_llm()
    with pytest.raises(InputError, match=r"has 9\d\d\d tokens and 7 may follow.*8192"):
        llm.stream(text="x" * 9000, max_tokens=7)
    with pytest.raises(InputError, match="duo needs a head map"):
        llm.stream([A], QUESTION, policy="duo")
    with pytest.raises(InputError, match="magic"):
        llm.stream([A], QUESTION, policy="magic")
    with pytest.raises(InputError, match="temperature"):
        llm.stream([A], QUESTION, temperature=-1)
    assert not llm.session.store.keys()


def test_the_package_names_what_it_offers() -> None:
    assert all(hasattr(redknot, name) for name in redknot.__all__)
