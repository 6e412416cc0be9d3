"""What a step of the engine costs besides the model: `python -m benchmarks.engine_overhead`.

The forward of the model is left out, and CPU time of this thread is counted, so that other work on
the machine does not show. Pages, sampling, encoding, sending and the loop around are all in it.
"""

import statistics
import time

import msgspec
import torch
import zmq
from tests.tiny import random_ids, tiny_model

from redknot.engine.config import EngineConfig
from redknot.engine.engine import Engine
from redknot.engine.messages import SamplingSpec, Submit
from redknot.engine.process import Loop
from redknot.engine.setup import build_engine
from redknot.execution import ExecutionSettings
from redknot.execution.batch import DecodeBatch
from redknot.execution.session import Session
from redknot.recovery.policies import Prefix

REQUESTS, PROMPT, ANSWER, WARM = 32, 40, 220, 20


def loaded_engine() -> Engine:
    """With all requests on their way."""
    session = Session(
        tiny_model(layers=2), settings=ExecutionSettings(num_pages=8000, chunk_tokens=2048)
    )
    config = EngineConfig(max_requests=REQUESTS, planned=False, build_idle=False)
    engine = build_engine(config, session, Prefix(), None)
    for number in range(REQUESTS):
        submit = Submit(
            request_id=f"{number:032x}",
            token_ids=random_ids(PROMPT, number).tolist(),
            probe=(PROMPT - 1, PROMPT),
            sampling=SamplingSpec(max_tokens=ANSWER, ignore_eos=True),
            arrived=time.time(),
        )
        if engine.submit(submit) is not None:
            raise RuntimeError("a request was refused")
    return engine


def main() -> None:
    """Milliseconds per turn in which all requests decode."""
    torch.set_num_threads(1)
    engine, context = loaded_engine(), zmq.Context.instance()
    far, near = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    far.bind("inproc://overhead")
    near.connect("inproc://overhead")
    loop, spent = Loop(engine, near), []
    logits = torch.randn(REQUESTS, engine.session.model.hf.config.vocab_size)
    DecodeBatch._run = lambda batch, size: logits[:size]  # type: ignore[method-assign]
    decoder = msgspec.msgpack.Decoder(type=object)
    while engine.scheduler.jobs:
        all_decode = len(engine.company) == REQUESTS
        start = time.thread_time()
        loop.once()
        if all_decode and len(engine.company) == REQUESTS:
            spent.append(1e3 * (time.thread_time() - start))
        while far.poll(0):
            decoder.decode(far.recv())
    spent = spent[WARM:]
    quantiles = statistics.quantiles(spent, n=20)
    print(
        f"{len(spent)} steps of {REQUESTS} requests: mean {statistics.mean(spent):.3f} ms,"
        f" median {statistics.median(spent):.3f}, 5 % {quantiles[0]:.3f}, 95 % {quantiles[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
