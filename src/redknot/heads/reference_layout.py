"""Head maps in the public reference's layout: three arrays by layer and head."""

from typing import Any

import msgspec

from redknot.heads.rules import HeadClass, HeadRule, LayerRules

# `retrieval` (top-p) is read as global until it is specified and measured.
CLASSES = {
    "global": HeadClass.GLOBAL,
    "retrieval": HeadClass.GLOBAL,
    "dense": HeadClass.DENSE,
    "local": HeadClass.LOCAL,
    "local_full": HeadClass.LOCAL,
    "limited": HeadClass.LOCAL,
    "streaming": HeadClass.LOCAL,
    "sink_dominant": HeadClass.LOCAL,
}


class ReferenceLayout(msgspec.Struct, frozen=True):
    """The arrays that matter, by layer and head; other fields are ignored."""

    kv_head_classification: list[list[str]]
    kv_head_max_distance: list[list[int]]
    kv_head_sink_size: list[list[int]]
    dense_prefix_layers: int | None = None


def read_reference_layout(raw: dict[str, Any]) -> LayerRules:
    """Rules from ``kv_head_classification``, ``kv_head_max_distance``, ``kv_head_sink_size``.

    A distance of -1 or 0 means no limit. Layers of ``dense_prefix_layers`` become dense. Missing or
    ragged arrays, unknown classes and local heads without a distance raise ValueError.
    """
    try:
        layout = msgspec.convert(raw, ReferenceLayout)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    classes, distances = layout.kv_head_classification, layout.kv_head_max_distance
    sinks = layout.kv_head_sink_size
    for name, rows in (("kv_head_max_distance", distances), ("kv_head_sink_size", sinks)):
        if [len(row) for row in rows] != [len(row) for row in classes]:
            raise ValueError(f"{name} has another shape than kv_head_classification")
    dense_prefix = layout.dense_prefix_layers or 0
    return tuple(
        tuple(
            HeadRule(head_class=HeadClass.DENSE) if layer < dense_prefix else _rule(*head)
            for head in zip(*rows, strict=True)
        )
        for layer, rows in enumerate(zip(classes, distances, sinks, strict=True))
    )


def _rule(name: str, distance: int, sink: int) -> HeadRule:
    if name not in CLASSES:
        raise ValueError(f"unknown head class {name!r}")
    if CLASSES[name] is not HeadClass.LOCAL:
        return HeadRule(head_class=CLASSES[name])
    if distance <= 0:
        raise ValueError("a local head needs a distance above zero")
    return HeadRule.local(distance, sink)
