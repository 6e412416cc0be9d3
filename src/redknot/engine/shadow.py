"""Which requests run through dense as well, and what follows from how far the two agree."""

import math
import statistics
from collections import deque

from redknot.engine.config import ShadowConfig
from redknot.errors import InputError

MARGIN = 0.02
"The mean must be so far above the threshold before the policy answers again."
GOLDEN = (math.sqrt(5) - 1) / 2


class ShadowMonitor:
    """Picks requests, keeps the agreements of the last runs, and decides who answers.

    While verified the policy answers and dense runs in its shadow. Once ``least`` runs are there
    and the mean of the last ``window`` is below the threshold, the engine falls back: dense
    answers and the policy runs in the shadow. It recovers when, of runs since then,
    max(``least``, half of ``window``) or more have a mean of threshold + `MARGIN` (at most 1).
    Every transition starts from an empty window, so two are ``least`` runs apart or more. Without
    runs nothing changes: an engine in fallback whose requests are all exempt stays there.
    """

    def __init__(self, config: ShadowConfig) -> None:
        if not 0 <= config.share <= 1 or not 0 <= config.threshold <= 1:
            raise InputError("share and threshold of shadow runs lie between 0 and 1")
        if not 1 <= config.least <= config.window:
            raise InputError("least runs of the shadow lie between 1 and its window")
        self._config = config
        self._runs: deque[float] = deque(maxlen=config.window)
        self._messages: deque[str] = deque()
        self._seen = self._taken = 0
        self.fallback = ""
        "Why dense answers; empty while the policy does."
        self.fallbacks = 0
        self.recoveries = 0

    def wants(self, *, without_loss: bool) -> bool:
        """Whether this request is to be run twice; ask once for each request.

        Those that are ``without_loss``, whose result is dense's anyway, do not count. Of n
        others n * share are picked, within one at every n: one in each interval of 1 / share, at
        a place that moves by the golden ratio, so that no regular traffic hides from it.
        """
        if without_loss:
            return False
        self._seen += 1
        place = self._taken + (self._taken + 1) * GOLDEN % 1
        if self._seen * self._config.share < place:
            return False
        self._taken += 1
        return True

    def add(self, agreement: float) -> None:
        """A shadow run has ended: the share of dense's tokens that the policy agrees with."""
        if not 0 <= agreement <= 1:
            raise ValueError(f"an agreement of {agreement}")
        self._runs.append(agreement)
        mean, count = statistics.mean(self._runs), len(self._runs)  # exact, unlike fmean
        if self.fallback:
            self._maybe_recover(mean, count)
        else:
            self._maybe_fall_back(mean, count)

    @property
    def agreement(self) -> float | None:
        """Mean of the last runs since the last transition; None without any."""
        return statistics.mean(self._runs) if self._runs else None

    def transition(self) -> str | None:
        """The oldest transition that was not told yet, in one line with figures."""
        return self._messages.popleft() if self._messages else None

    def _maybe_fall_back(self, mean: float, count: int) -> None:
        threshold = self._config.threshold
        if count < self._config.least or mean >= threshold:
            return
        self.fallbacks += 1
        self.fallback = f"agreement {mean:.3g} < {threshold:g} over {count} shadow runs"
        self._turn(f"{self.fallback}: dense answers from now on")

    def _maybe_recover(self, mean: float, count: int) -> None:
        needed = max(self._config.least, math.ceil(self._config.window / 2))
        limit = min(1.0, self._config.threshold + MARGIN)
        if count < needed or mean < limit:
            return
        self.recoveries += 1
        self.fallback = ""
        self._turn(
            f"agreement {mean:.3g} >= {limit:g} over {count} shadow runs: the policy answers again"
        )

    def _turn(self, message: str) -> None:
        self._runs.clear()
        self._messages.append(message)
