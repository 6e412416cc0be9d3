"""Head maps: files, the public reference's layout, fitting a model, and choice by score."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import tiny_model

from redknot.errors import InputError
from redknot.heads import HeadClass, HeadMap, HeadRule, Phase
from redknot.heads.head_map import Measurement
from redknot.kernels.attend.reference import visible

GLOBAL, DENSE = HeadRule(), HeadRule(head_class=HeadClass.DENSE)
SCORES = torch.rand(4, 2, generator=torch.Generator().manual_seed(1))


def a_map(**fields: Any) -> HeadMap:
    return HeadMap.from_scores(
        SCORES, global_share=0.5, window=32, decode_global_share=0.25, decode_window=64, **fields
    )


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """The saved map after ``edit`` of its JSON."""
    a_map().save(path)
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_text(json.dumps(content))
    return path


def widen(content: dict[str, Any]) -> None:
    """Change the first window."""
    rules = [rule for layer in content["prefill"] for rule in layer]
    next(rule for rule in rules if rule.get("window"))["window"] = 48


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond ``limit`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_saved_map_is_read_back_equal(tmp_path: Path) -> None:
    measured = Measurement(
        method="ablation", window=32, num_prompts=16, data=("a", "b"), scores=((0.1, 0.2),)
    )
    saved = a_map(model="tiny", weights="abc", measured=measured)
    saved.save(tmp_path / "map.json")
    loaded = HeadMap.load(tmp_path / "map.json")
    assert loaded.checksum == saved.digest()
    assert loaded.digest() == saved.digest()
    assert loaded.measured == measured
    for phase in Phase:
        assert loaded.rules(phase) == saved.rules(phase)
    assert loaded.prefill != loaded.decode


def test_an_edited_map_is_refused_until_its_checksum_is_removed(tmp_path: Path) -> None:
    path = edited(tmp_path / "map.json", widen)
    with pytest.raises(InputError, match="checksum"):
        HeadMap.load(path)
    content = json.loads(path.read_bytes())
    del content["checksum"]
    path.write_text(json.dumps(content))
    windows = {rule.window for layer in HeadMap.load(path).prefill for rule in layer}
    assert windows == {None, 32, 48}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.update(version=7), "version 7.* reads 1"),
        (lambda content: content.update(windw=3), "windw"),
        (lambda content: content["prefill"][0][0].update(snik=3), "snik"),
        (lambda content: content.update(format="other"), "other"),
        (lambda content: content.pop("decode"), "decode"),
        (lambda content: content["decode"][0][0].update(head_class="locla"), "locla"),
        (lambda content: content["prefill"].append([{"window": 4}]), "window"),
        (lambda content: content["prefill"].append([{"head_class": "local"}]), "window"),
        (lambda content: content["prefill"].append([{"head_class": "local", "window": 0}]), "0"),
    ],
)
def test_a_malformed_map_is_refused_by_name(
    edit: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        HeadMap.load(edited(tmp_path / "map.json", edit))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\x00", b'{"version": 1}'])
def test_what_is_no_map_is_refused_with_its_path(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(InputError, match=r"odd\.json"):
        HeadMap.load(tmp_path / "odd.json")
    with pytest.raises(InputError, match=r"none\.json"):
        HeadMap.load(tmp_path / "none.json")


def test_a_full_disk_leaves_the_earlier_map_whole(tmp_path: Path) -> None:
    path, earlier = tmp_path / "map.json", a_map(model="earlier")
    earlier.save(path)
    with pytest.raises(OSError, match="large"), full_disk(limit=100):
        a_map(model="later").save(path)
    assert HeadMap.load(path).digest() == earlier.digest()
    a_map(model="later").save(path)
    assert HeadMap.load(path).model == "later"


def test_a_target_that_cannot_be_replaced_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.mkdir()
    with pytest.raises(OSError, match=r"map\.json"):
        a_map().save(path)
    assert path.is_dir()
    assert not list(path.iterdir())


@pytest.mark.parametrize(
    ("layers", "heads", "numbers"),
    [(3, 2, "3 layers, the model 4"), (5, 2, "5 layers, the model 4"), (4, 3, "3 heads"),
     (4, 1, "1 heads.* 2 KV heads.* 8 query heads"), (4, 16, "16 heads"), (4, 0, "0 heads")],
)  # fmt: skip
def test_a_map_of_another_shape_is_refused_with_the_numbers(
    layers: int, heads: int, numbers: str
) -> None:
    rules = ((GLOBAL,) * heads,) * layers
    adapter = tiny_model().adapter
    fitting = ((GLOBAL,) * 2,) * 4
    for head_map in (
        HeadMap(prefill=rules, decode=fitting),
        HeadMap(prefill=fitting, decode=rules),
    ):
        with pytest.raises(InputError, match=numbers):
            head_map.fit(adapter)


def test_a_map_of_other_weights_is_refused() -> None:
    adapter = tiny_model().adapter
    with pytest.raises(InputError, match=r"other weights \(of tiny\)"):
        a_map(model="tiny", weights="mine").fit(adapter, "theirs")
    assert a_map(weights="mine").fit(adapter, "mine").prefill == a_map().prefill
    assert a_map().fit(adapter, "theirs").prefill == a_map().prefill


MIXED = [
    ([HeadRule.local(8, 0)] * 3 + [GLOBAL], GLOBAL),
    ([HeadRule.local(8, 0)] * 3 + [DENSE], DENSE),
    ([GLOBAL, DENSE, GLOBAL, HeadRule.local(512, 4)], DENSE),
    ([HeadRule.local(window, 4) for window in (8, 64, 16, 8)], HeadRule.local(64, 4)),
    ([HeadRule.local(64, 0), HeadRule.local(8, 16)] * 2, HeadRule.local(64, 16)),
]


@pytest.mark.parametrize(("row", "expected"), MIXED)
def test_a_group_of_mixed_query_heads_takes_the_fullest_class(
    row: list[HeadRule], expected: HeadRule
) -> None:
    other = [HeadRule.local(2, 1)] * 4
    for first, second in ((row, other), (row[::-1], other), (other, row)):
        rules = (tuple(first + second),) * 4
        fitted = HeadMap(prefill=rules, decode=rules).fit(tiny_model().adapter)
        groups = (expected, other[0]) if first != other else (other[0], expected)
        assert fitted.prefill == fitted.decode == (groups,) * 4


def test_promotion_hides_nothing_that_a_query_head_may_see() -> None:
    drawn = torch.randint(1, 60, (4, 8, 2), generator=torch.Generator().manual_seed(3))
    rules = tuple(tuple(HeadRule.local(*head) for head in layer) for layer in drawn.tolist())
    asked = HeadMap(prefill=rules, decode=rules)
    fitted, positions = asked.fit(tiny_model().adapter), torch.arange(100)
    for layer in range(4):
        groups = fitted.reaches(Phase.PREFILL, layer, None)
        for head, reach in enumerate(asked.reaches(Phase.PREFILL, layer, None)):
            lost = visible(positions, 100, reach) & ~visible(positions, 100, groups[head // 4])
            assert not lost.any()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.79, 1.0])
def test_scores_make_exactly_the_highest_share_global(share: float) -> None:
    scores = torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
    made = HeadMap.from_scores(scores, global_share=share, window=16, decode_global_share=0.5)
    chosen = torch.tensor([[rule.window is None for rule in row] for row in made.prefill])
    count = round(share * 21)
    assert int(chosen.sum()) == count
    assert set(scores[chosen].tolist()) == set(sorted(scores.flatten().tolist())[21 - count :])
    assert made.global_share(Phase.PREFILL) == count / 21
    assert made.global_share(Phase.DECODE) == round(0.5 * 21) / 21


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_outside_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        HeadMap.from_scores(SCORES, global_share=share, window=16)
