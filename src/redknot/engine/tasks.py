"""Work besides requests: building segment state, and running prompts once more in the shadow."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field

import torch

from redknot.engine.counters import Counters
from redknot.engine.faults import FAULTS, told
from redknot.execution.executor import Executor
from redknot.execution.session import Known, Session
from redknot.execution.turns import Turns
from redknot.heads import HeadMap
from redknot.recovery import Policy
from redknot.segments import SegmentState
from redknot.segpaged import OutOfPages

log = logging.getLogger(__name__)


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
        """One unit; False once it has ended, well or not. `OutOfPages` leaves it as it was."""
        try:
            next(self.work)
            return True
        except StopIteration as end:
            value = end.value
        except OutOfPages:
            raise
        except FAULTS as error:
            self.failed(told(error))
            return False
        self.done(value)
        return False


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
    _wanted: tuple[torch.Tensor, str] | None = None
    "What is being built."
    _started: bytes = b""

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
            self._started, self._wanted = self._waiting.popitem()
            self._running = building(self.session, self.counters, *self._wanted)
        try:
            next(self._running)
        except StopIteration:
            self.stop()
        except FAULTS as error:  # no room, mostly; another request will want it again
            log.warning("a segment is not built: %s", told(error))
            self.counters.add("builds_dropped")
            self.stop()
        return True

    def give_way(self) -> None:
        """Others need the pages of what is half built: it begins again later."""
        key, wanted = self._started, self._wanted
        if wanted is not None:
            self.stop()
            self._waiting[key] = wanted

    def stop(self) -> None:
        """Drop what is half built."""
        if self._running is not None:
            self._running.close()
        self._running, self._wanted, self._started = None, None, b""


def building(
    session: Session, counters: Counters, token_ids: torch.Tensor, salt: str
) -> Turns[SegmentState]:
    """State of a segment, out of the store or built, and then counted; in turns."""
    found = session.stored(token_ids, salt) is not None
    work, spent = session.building(token_ids, salt), 0.0
    with closing(work):
        while True:
            start = time.perf_counter()
            try:
                rows = next(work)
            except StopIteration as end:
                state: SegmentState = end.value
                break
            finally:
                spent += time.perf_counter() - start
            yield rows
    if not found:
        counters.add("builds")
        counters.add("build_tokens", len(state))
        counters.add("build_seconds", spent)
    return state


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
        prefilled.cache.release()
    return float((chosen[0] == chosen[1]).float().mean())
