"""The executor gives the same whatever backend attends, and only `auto` may choose one."""

import pytest
import torch
from tests.execution.eager import assert_near, lively_hf, rounding, spanned
from tests.execution.test_masks import random_map
from tests.tiny import random_ids

from redknot.execution import ExecutionSettings
from redknot.execution.session import Session
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model
from redknot.recovery.policies import parse_policy


def run(attention: str, policy: str, page_size: int, seed: int) -> list[torch.Tensor]:
    """Logits of a prompt of stored and new segments, and of three steps behind it."""
    hf = lively_hf("llama-9/3")
    settings = ExecutionSettings(attention=attention, page_size=page_size)
    session = Session(wrap_model(hf, byte_tokenizer(add_bos=True)), settings=settings)
    session.build_missing(spanned(40, 33))
    head_map = random_map(hf, seed)
    prefilled = session.prefill(spanned(40, 33, 21), parse_policy(policy), head_map).retain()
    new = random_ids(3, seed=3)
    steps = [session.executor.extend(prefilled, token[None])[-1] for token in new]
    return [prefilled.logits, *steps]


@pytest.mark.parametrize("attention", ["reference", "triton", "flex"])
@pytest.mark.parametrize("policy", ["question_drop:windows=all", "duo", "cacheblend"])
def test_every_backend_answers_alike(policy: str, attention: str) -> None:
    bound = rounding(lively_hf("llama-9/3"), 130)
    for seed, page_size in enumerate((16, 64)):
        wanted = run("torch", policy, page_size, seed)
        for got, right in zip(run(attention, policy, page_size, seed), wanted, strict=True):
            assert_near(got, right, bound)


def test_a_backend_that_cannot_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="flash runs float16 and bfloat16"):
        run("flash", "dense", 16, 0)
