"""A request on a GPU is the request on a CPU: plans, logits, tokens; and nothing compiles twice."""

import gc
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.execution.eager import assert_near, lively_hf, rounding, spanned
from tests.execution.test_masks import random_map
from tests.tiny import random_ids
from torch._dynamo.utils import counters

from redknot.execution import ExecutionSettings, Prefilled
from redknot.execution.batch import DecodeBatch
from redknot.execution.generate import Sampling, decode
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model
from redknot.recovery import Plan
from redknot.recovery.policies import POLICIES, Duo, RedKnot
from redknot.segments import Prompt

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"
    ),
]

MODELS = ["llama", "qwen3"]
WINDOWS = ["none", "context", "all"]
OPTIONS: dict[str, dict[str, Any]] = {
    "epic": {"k": 8},
    "redknot": {"dense_until": 1, "recent": 8},
    "cacheblend": {"share": 0.3},
    "question": {"share": 0.3},
}
STEPS = 20
LENGTHS = (61, 64, 17)


@pytest.fixture(autouse=True)
def _loud() -> Iterator[None]:
    """What is compiled too often fails, where PyTorch would run it as it is."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@cache
def session(name: str, device: torch.device, compiled: bool = False) -> Session:
    """One for all tests: models and what is compiled for them are made once."""
    model = wrap_model(lively_hf(name).to(device), byte_tokenizer(add_bos=True), name)
    return Session(model, settings=ExecutionSettings(compiled=compiled))


def run(opened: Session, prompt: Prompt, policy: str, windows: str, head_map: HeadMap) -> Prefilled:
    """Built, and from nothing known: the exact beginning is forgotten."""
    opened.forget(segments=False)
    opened.build_missing(prompt)
    chosen = POLICIES[policy](windows=windows, **OPTIONS.get(policy, {}))
    return opened.prefill(prompt, chosen, head_map)


def differing(one: Plan, other: Plan) -> int:
    """Rows and FFN rows that only one of two plans has."""
    count = 0
    for left, right in zip(one.layers, other.layers, strict=True):
        count += len(set(left.active.tolist()) ^ set(right.active.tolist()))
        fed = [set((x.active if x.ffn is None else x.ffn).tolist()) for x in (left, right)]
        count += len(fed[0] ^ fed[1])
    return count


POLICY_NAMES = sorted(set(POLICIES) - {"replay"})


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_a_request_is_the_same_on_both_devices(
    name: str, policy: str, windows: str, compiled: bool
) -> None:
    """Three prompts. Where a choice hangs on rounding a few rows may differ, and then logits do by
    more; all prompts but one must agree."""
    host, device = session(name, torch.device("cpu")), session(name, DEVICE, compiled)
    head_map = random_map(host.model.hf, 1)
    agreeing = 0
    for seed in range(3):
        prompt = spanned(*LENGTHS, seed=seed)
        wanted = run(host, prompt, policy, windows, head_map)
        got = run(device, prompt, policy, windows, head_map)
        assert got.logits.device.type == DEVICE.type
        for layer in got.plan.layers:
            assert layer.active.device.type == "cpu"
        if differing(wanted.plan, got.plan):
            continue
        agreeing += 1
        for left, right in zip(wanted.plan.layers, got.plan.layers, strict=True):
            assert torch.equal(left.active, right.active)
            assert (left.publish is None) == (right.publish is None)
            if left.publish is not None and right.publish is not None:
                assert torch.equal(left.publish, right.publish)
        assert got.flops == wanted.flops
        assert got.cache.num_bytes > 0
        assert_near(got.logits.cpu(), wanted.logits, 2 * rounding(host.model.hf, len(prompt)))
    adaptive = POLICIES[policy].adaptive or POLICIES[policy].uses_probe or policy == "redknot"
    assert agreeing >= (2 if adaptive else 3)


def sure(logits: torch.Tensor, bound: float) -> bool:
    """Whether the likeliest token is that under any error of ``bound``."""
    first, second = logits.topk(2).values.tolist()
    return first - second > 2 * bound * float(logits.abs().max())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_decodes_on_both_devices_alike(name: str, compiled: bool) -> None:
    """Three requests that see differently, one of which goes and comes again, and another prompt
    that makes the storage grow: steps before, in and after capture. The host's tokens go to both,
    and where they are sure the GPU picks them too."""
    host, device = session(name, torch.device("cpu")), session(name, DEVICE, compiled)
    hf, checked, others = host.model.hf, 0, []
    prompts = [spanned(61, seed=1), spanned(9, question=4, seed=2), spanned(100, 30, seed=3)]
    batches = [DecodeBatch(opened.executor, 4, 400) for opened in (host, device)]

    def add(index: int) -> torch.Tensor:
        logits = []
        for opened, batch in zip((host, device), batches, strict=True):
            head_map = random_map(hf, index)
            prefilled = opened.prefill(prompts[index], Duo(windows="all"), head_map)
            batch.add(prefilled)
            logits.append(prefilled.logits)
        return logits[0]

    following = torch.stack([add(index) for index in range(3)])
    for step in range(3 * STEPS):
        if step == STEPS:
            assert all(batch.remove(0) is not None for batch in batches)
            following = following[[2, 1]]
        if step == 2 * STEPS:
            following = torch.cat([following, add(0)[None]])
        if step == STEPS // 2:
            others.append(device.prefill(spanned(1500), Duo(windows="none"), random_map(hf, 0)))
        tokens = following.argmax(-1).tolist()
        following, got = (batch.step(tokens).cpu() for batch in batches)
        for wanted, found, length in zip(following, got, batches[0].lengths, strict=True):
            bound = 2 * rounding(hf, length)
            assert_near(found, wanted, bound)
            if sure(wanted, bound):
                checked += 1
                assert int(found.argmax()) == int(wanted.argmax())
    assert checked > STEPS


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_yields_the_tokens_of_the_host(name: str, compiled: bool) -> None:
    """Up to the first token that hangs on rounding."""
    host, device = session(name, torch.device("cpu")), session(name, DEVICE, compiled)
    hf, compared = host.model.hf, 0
    for seed in range(4):
        prompt, head_map = spanned(61, 20, seed=seed), random_map(hf, seed)
        alone = host.prefill(prompt, Duo(windows="all"), head_map)
        wanted, logits = [], alone.logits
        bound = 2 * rounding(hf, len(prompt) + STEPS)
        while len(wanted) < STEPS and sure(logits, bound):
            wanted.append(int(logits.argmax()))
            logits = host.executor.extend(alone, torch.tensor(wanted[-1:]))[-1]
        compared += len(wanted)
        prefilled = device.prefill(prompt, Duo(windows="all"), head_map)
        tokens = decode(device.executor, prefilled, frozenset(), Sampling(max_tokens=STEPS))
        assert list(tokens)[: len(wanted)] == wanted
    assert compared >= STEPS


def compiled_kernels() -> int:
    """Triton kernels that this process holds, inductor's among them, in whatever way this Triton
    keeps them: functions have a cache for each device, of kernels alone or with other things."""
    from triton.runtime.jit import JITFunction

    total = 0
    for found in gc.get_objects():
        if issubclass(type(found), JITFunction):  # not isinstance: some objects dislike questions
            caches = getattr(found, "device_caches", None)
            caches = found.cache if caches is None else caches
            for kept in list(caches.values()):
                total += len(kept[0] if isinstance(kept, tuple) else kept)
    return total


def work(opened: Session, lengths: Sequence[int], seed: int) -> None:
    """Prefill and decode prompts of ``lengths`` under policies that share few kernels."""
    head_map = random_map(opened.model.hf, 1)
    policies = (
        Duo(windows="all"),
        RedKnot(dense_until=1, recent=8),
        RedKnot(dense_until=1, signal="question", mass=0, windows="all"),
        POLICIES["question_drop"](),
        POLICIES["cacheblend"](share=0.3),
    )
    for index, length in enumerate(lengths):
        prompt = spanned(length, 40, question=11 + index, seed=seed + index)
        opened.build_missing(prompt)
        for policy in policies:
            opened.forget(segments=False)
            prefilled = opened.prefill(prompt, policy, head_map)
            opened.executor.extend(prefilled, random_ids(3))
        batch = DecodeBatch(opened.executor, 1, len(prompt) + 10)
        batch.add(prefilled)
        for token in range(5):
            batch.step([token])


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_other_lengths_compile_nothing(name: str) -> None:
    """The shortest and the longest come first: kernels are tuned for ranges of sizes."""
    torch.compiler.reset()
    opened = session(name, DEVICE, True)
    counters.clear()
    work(opened, (50, 51, 64, 500), seed=0)
    if DEVICE.type != "cuda":
        return
    torch.cuda.synchronize()
    graphs, kernels = dict(counters["stats"]), compiled_kernels()
    assert graphs["unique_graphs"] > 0
    assert kernels > 0
    work(opened, range(60, 60 + 12 * 35, 35), seed=10)
    assert dict(counters["stats"]) == graphs
    assert compiled_kernels() == kernels
