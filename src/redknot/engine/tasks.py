"""Work besides requests: building segment state, and running prompts once more in the shadow."""

import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch

from redknot.engine.counters import Counters
from redknot.execution.executor import Executor
from redknot.execution.session import Known, Session
from redknot.execution.turns import Turns
from redknot.heads import HeadMap
from redknot.recovery import Policy
from redknot.segments import SegmentState
from redknot.segpaged import OutOfPages


@dataclass(eq=False)
class Task:
    """Something that takes turns with requests and ends with a value nobody streams."""

    task_id: str
    start: Callable[[], Turns[object]]
    done: Callable[[object], None]
    failed: Callable[[str], None]
    work: Turns[object] = field(init=False)

    def __post_init__(self) -> None:
        self.work = self.start()

    def restart(self) -> None:
        """Let go of everything and begin again."""
        self.work.close()
        self.work = self.start()

    def advance(self) -> bool:
        """One unit; False once it has ended, well or not."""
        try:
            next(self.work)
        except StopIteration as end:
            self.done(end.value)
            return False
        except (OutOfPages, RuntimeError, ValueError) as error:
            self.failed(f"{type(error).__name__}: {error}".splitlines()[0])
            return False
        return True


@dataclass(eq=False)
class IdleBuilder:
    """Canonical state of segments that were new, built while nobody wants anything.

    Bounded: of more than ``most`` segments that wait the oldest is forgotten. Left behind any layer
    when a request comes, and taken up again later.
    """

    session: Session
    counters: Counters
    most: int
    _waiting: OrderedDict[bytes, tuple[torch.Tensor, str]] = field(default_factory=OrderedDict)
    _running: Turns[SegmentState] | None = None
    _started: bytes = b""
    _spent: float = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def want(self, token_ids: torch.Tensor, salt: str) -> None:
        """Build the state of ``token_ids`` some time; the one wanted last is built first."""
        key = self.session.key(token_ids, salt)
        if key == self._started:
            return
        self._waiting[key] = token_ids, salt
        self._waiting.move_to_end(key)
        if len(self._waiting) > self.most:
            self._waiting.popitem(last=False)
            self.counters.add("builds_dropped")

    def forget(self, key: bytes) -> None:
        """Build it no more."""
        self._waiting.pop(key, None)
        if key == self._started:
            self.stop()

    def work(self) -> bool:
        """One layer of one segment; False if there is nothing to build."""
        if self._running is None:
            if not self._waiting:
                return False
            self._started, (token_ids, salt) = self._waiting.popitem()
            self._running, self._spent = self.session.building(token_ids, salt), 0.0
        start = time.perf_counter()
        try:
            next(self._running)
            self._spent += time.perf_counter() - start
        except StopIteration as end:
            built(self.counters, end.value, self._spent + time.perf_counter() - start)
            self.stop()
        except OutOfPages:  # larger than what requests leave; another request will want it again
            self.counters.add("builds_dropped")
            self.stop()
        return True

    def stop(self) -> None:
        """Drop what is half built."""
        if self._running is not None:
            self._running.close()
        self._running, self._started = None, b""


def built(counters: Counters, state: SegmentState, seconds: float) -> None:
    """Count a segment whose state was built."""
    counters.add("builds")
    counters.add("build_tokens", len(state))
    counters.add("build_seconds", seconds)


@dataclass(frozen=True, slots=True)
class ShadowSide:
    """One way to run a prompt."""

    policy: Policy
    known: Known
    head_map: HeadMap | None


def shadow(
    executor: Executor,
    token_ids: torch.Tensor,
    answer: torch.Tensor,
    sides: tuple[ShadowSide, ...],
) -> Generator[int, None, float]:
    """Share of tokens that two ways agree on along ``answer``, in turns.

    With one side the answer itself is what the other would say: it was greedy.
    """
    chosen = [] if len(sides) > 1 else [answer]
    for side in sides:
        prefilled = yield from executor.prefilling(
            token_ids, side.known, side.policy, side.head_map
        )
        best = [prefilled.logits.argmax()[None]]
        if len(answer) > 1:
            best.append(executor.extend(prefilled, answer[:-1]).argmax(-1))
        chosen.append(torch.cat(best).cpu())
    return float((chosen[0] == chosen[1]).float().mean())
