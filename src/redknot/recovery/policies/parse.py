"""Policies by name: ``question_drop:first=0.4:then=0.2``."""

import dataclasses
from typing import Any

import msgspec

from redknot.errors import InputError
from redknot.recovery.policies.cacheblend import CacheBlend
from redknot.recovery.policies.dense import Dense, Prefix
from redknot.recovery.policies.epic import Epic
from redknot.recovery.policies.heads import Duo, RedKnot
from redknot.recovery.policies.question import LayerDrop, Question, QuestionDrop
from redknot.recovery.policies.reuse import Reuse
from redknot.recovery.policy import Policy

POLICIES: dict[str, type[Policy]] = {
    kind.name: kind
    for kind in (
        Dense,
        Prefix,
        Reuse,
        Epic,
        CacheBlend,
        Question,
        Duo,
        RedKnot,
        QuestionDrop,
        LayerDrop,
    )
}


def parse_policy(text: str) -> Policy:
    """The policy that ``name:option=value:...`` names; `InputError` for anything unknown."""
    name, *options = text.strip().split(":")
    if name not in POLICIES:
        raise InputError(f"unknown policy {name!r} (known: {', '.join(POLICIES)})")
    kind = POLICIES[name]
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator or key not in types:
            raise InputError(f"policy {name} has no option {option!r} (has: {', '.join(types)})")
        if key in values:
            raise InputError(f"policy {name}: option {key} stands twice")
        try:
            values[key] = msgspec.convert(value, types[key], strict=False)
        except msgspec.ValidationError as error:
            raise InputError(f"policy {name}, option {option!r}: {error}") from error
    try:
        return kind(**values)
    except ValueError as error:
        raise InputError(f"policy {name}: {error}") from error


def parse_policies(text: str) -> list[Policy]:
    """Comma-separated policies; `InputError` where one stands twice."""
    policies = [parse_policy(part) for part in text.split(",") if part.strip()]
    if not policies:
        raise InputError("no policy named")
    names = [policy.describe() for policy in policies]
    if len(set(names)) != len(names):
        raise InputError(f"a policy stands twice in {text!r}")
    return policies
