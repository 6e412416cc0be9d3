"""Head maps that ship with the package."""

from importlib.resources import files

import msgspec

from redknot.heads.head_map import HeadMap


def shipped_map(weights: str) -> HeadMap | None:
    """The map that was measured on these ``weights`` (their rounded fingerprint), if one ships."""
    for entry in files("redknot.heads").joinpath("maps").iterdir():
        if entry.name.endswith(".json"):
            head_map = msgspec.json.decode(entry.read_bytes(), type=HeadMap)
            if head_map.weights == weights:
                return head_map
    return None
