"""Decoding a prefilled prompt: token by token, until an end token or the limit."""

from collections.abc import Iterator

from redknot.execution.batch import DecodeBatch
from redknot.execution.executor import Executor, Prefilled
from redknot.execution.sampling import Chooser, Sampling


def decode(
    executor: Executor, prefilled: Prefilled, end_token_ids: frozenset[int], sampling: Sampling
) -> Iterator[int]:
    """Yield new tokens, the end token last if one came. The K/V kept is what rows still see."""
    chooser = Chooser(sampling, executor.adapter.device)
    logits = prefilled.logits
    batch = DecodeBatch(executor, 1, prefilled.cache.length + sampling.max_tokens)
    batch.add(prefilled)
    for count in range(1, sampling.max_tokens + 1):
        token = chooser(logits)
        yield token
        if token in end_token_ids or count == sampling.max_tokens:
            return
        logits = batch.step([token])[0]
