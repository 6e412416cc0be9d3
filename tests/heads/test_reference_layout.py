"""Head maps in the public reference's layout: what is read, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from redknot.errors import InputError
from redknot.heads import HeadClass, HeadMap, HeadRule, Phase

GLOBAL, DENSE = HeadRule(), HeadRule(head_class=HeadClass.DENSE)
LAYOUT: dict[str, Any] = {
    "model": "some model",
    "num_layers": 3,
    "num_kv_heads": 3,
    "kv_head_classification": [
        ["global", "local", "local_full"],
        ["retrieval", "dense", "limited"],
        ["streaming", "sink_dominant", "global"],
    ],
    "kv_head_max_distance": [[-1, 256, 64], [0, -1, 32], [16, 8, 0]],
    "kv_head_sink_size": [[0, 4, 0], [4, 4, 2], [1, 64, 0]],
    "window": 256,
    "rationale": "free text",
}


def written(path: Path, **changes: Any) -> Path:
    content = {name: value for name, value in (LAYOUT | changes).items() if value is not ...}
    path.write_text(json.dumps(content))
    return path


def test_classes_distances_and_sinks_are_read(tmp_path: Path) -> None:
    loaded = HeadMap.load(written(tmp_path / "map.json"))
    assert loaded.prefill == (
        (GLOBAL, HeadRule.local(256, 4), HeadRule.local(64, 0)),
        (GLOBAL, DENSE, HeadRule.local(32, 2)),
        (HeadRule.local(16, 1), HeadRule.local(8, 64), GLOBAL),
    )
    assert loaded.decode == loaded.prefill
    assert loaded.model == "some model"


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_dense_prefix_layers_are_dense(layers: int, tmp_path: Path) -> None:
    loaded = HeadMap.load(written(tmp_path / "map.json", dense_prefix_layers=layers))
    plain = HeadMap.load(written(tmp_path / "map.json"))
    assert loaded.prefill[:layers] == ((DENSE,) * 3,) * layers
    assert loaded.prefill[layers:] == plain.prefill[layers:]


def test_a_converted_map_is_saved_in_our_own_format(tmp_path: Path) -> None:
    loaded = HeadMap.load(written(tmp_path / "theirs.json"))
    loaded.save(tmp_path / "ours.json")
    assert HeadMap.load(tmp_path / "ours.json").rules(Phase.DECODE) == loaded.decode


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_head_classification": [["global", "local", "lokal"]] * 3},
        {"kv_head_classification": [["global", "local"]] * 3},
        {"kv_head_classification": LAYOUT["kv_head_classification"][:2]},
        {"kv_head_classification": None},
        {"kv_head_classification": [["global", "local", ["dense"]]] * 3},
        {"kv_head_max_distance": ...},
        {"kv_head_sink_size": ...},
        {"kv_head_max_distance": [[-1, 0, 64], *LAYOUT["kv_head_max_distance"][1:]]},
        {"kv_head_max_distance": [[-1, -1, 64], *LAYOUT["kv_head_max_distance"][1:]]},
        {"kv_head_max_distance": [[-1, "far", 64], *LAYOUT["kv_head_max_distance"][1:]]},
        {"kv_head_max_distance": [-1, 256, 64]},
        {"kv_head_sink_size": [[0, -4, 0], *LAYOUT["kv_head_sink_size"][1:]]},
        {"kv_head_sink_size": [[0, None, 0], *LAYOUT["kv_head_sink_size"][1:]]},
        {"dense_prefix_layers": "five"},
        {"dense_prefix_layers": [5]},
    ],
)
def test_a_malformed_layout_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"map\.json: not a head map"):
        HeadMap.load(written(tmp_path / "map.json", **changes))
