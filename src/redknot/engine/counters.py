"""What the engine counts since its start, under names that are known."""

import math

STAGE = "stage_seconds."
"A stage's name follows; stages are whatever the clock of a request marks."

MEANINGS = {
    "prompt_tokens": "Tokens of prompts that were answered.",
    "generation_tokens": "New tokens of all choices, end tokens included.",
    "cached_tokens": "Prompt tokens that were not computed, by the share of layers.",
    "hit_tokens.exact": "Tokens of segments within an exact beginning that was taken over.",
    "hit_tokens.derived": "Tokens of segments within what an earlier turn of the chat left.",
    "hit_tokens.device": "Tokens of segments found in the memory of the model's device.",
    "hit_tokens.host": "Tokens of segments found in host memory.",
    "hit_tokens.disk": "Tokens of segments found on disk.",
    "missed_tokens": "Tokens of segments that were not found.",
    "prefix_queries": "Prompt tokens whose exact beginning was looked for.",
    "prefix_hits": "Prompt tokens of exact beginnings that were found.",
    "requests.stop": "Choices that an end token or a stop string ended.",
    "requests.length": "Choices that their limit ended.",
    "requests.cancelled": "Choices that their client ended.",
    "requests.error": "Choices that went wrong.",
    "refused": "Requests that were not taken.",
    "preemptions": "Requests that gave their pages to others and began again.",
    "steps": "Steps of the engine.",
    "step_seconds": "In steps.",
    "model_seconds": "Of these, in the model.",
    "sampling_seconds": "Of these, in choosing tokens.",
    "builds": "Segments whose state was built.",
    "build_seconds": "In building them.",
    "build_tokens": "Tokens of them.",
    "builds_dropped": "Segments that waited to be built and were forgotten.",
    "saved_seconds": "Predicted for dense minus spent, over prompts with reused segments.",
    "shadow_runs": "Shadow runs that ended.",
    "shadow_dropped": "Shadow runs that were begun or wanted and gave nothing.",
    "shadow_agreement": "Sum of the agreements of all shadow runs.",
    "fallbacks": "Times that the engine went over to dense.",
}
"Every name with its meaning; besides there is one for each stage, behind `STAGE`."


class Counters:
    """Sums by name. A name that is not known raises KeyError, so that a typo shows."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(MEANINGS, 0.0)

    def add(self, name: str, value: float = 1) -> None:
        """Count ``value`` more; a stage is there from its first time on."""
        if name.startswith(STAGE) and name != STAGE:
            self._values.setdefault(name, 0.0)
        self._values[name] += value

    def snapshot(self) -> dict[str, float]:
        """All sums as they are now, those that are zero too."""
        return dict(self._values)


def break_even_uses(
    builds: float, build_seconds: float, hits: float, saved_seconds: float
) -> float:
    """After how many uses a built segment has paid: seconds of a build over those saved by a hit.

    0 where nothing was built; -1 where no number of uses is known to pay: no hit yet, or hits that
    saved nothing.
    """
    if not builds or not build_seconds:
        return 0.0
    if not hits or saved_seconds <= 0:
        return -1.0
    uses = (build_seconds / builds) * (hits / saved_seconds)
    return uses if math.isfinite(uses) else -1.0
