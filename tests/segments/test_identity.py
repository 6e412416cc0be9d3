"""A key names exactly one state: any difference in what shapes it is a miss."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.tiny import random_ids, tiny_hf

from redknot.execution.session import Session
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model
from redknot.segments import MemoryStore, Namespace, Prompt

TOKENS = torch.tensor([3, 1, 4, 1, 5])
BASE = Namespace(
    weights="ab",
    settings="silu",
    rotary="cd",
    dtype="torch.float32",
    anchor=(1, 2),
    state="kv",
    salt="s",
)


def altered(value: Any) -> Any:
    """Another value of the same type."""
    return {str: lambda: value + "x", tuple: lambda: (*value, 1), int: lambda: value + 1}[
        type(value)
    ]()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Namespace)])
def test_any_field_of_the_namespace_changes_the_key(field: str) -> None:
    other = dataclasses.replace(BASE, **{field: altered(getattr(BASE, field))})
    assert other.key("segment", TOKENS) != BASE.key("segment", TOKENS)


def test_the_kind_changes_the_key() -> None:
    assert BASE.key("segment", TOKENS) != BASE.key("exact", TOKENS)


def test_any_token_and_their_number_change_the_key() -> None:
    keys = {BASE.key("segment", TOKENS)}
    for index in range(len(TOKENS)):
        changed = TOKENS.clone()
        changed[index] += 256  # another byte of the number than the lowest
        keys.add(BASE.key("segment", changed))
    keys |= {BASE.key("segment", tokens) for tokens in (TOKENS[:-1], TOKENS[1:], TOKENS.flip(0))}
    keys.add(BASE.key("segment", torch.cat([TOKENS, torch.tensor([0])])))
    assert len(keys) == 1 + len(TOKENS) + 4


def test_the_key_depends_on_tokens_and_not_on_how_they_are_held() -> None:
    key = BASE.key("segment", TOKENS)
    assert BASE.key("segment", torch.stack([TOKENS, TOKENS], 1)[:, 0]) == key  # strided
    assert BASE.key("segment", TOKENS.to(torch.int32)) == key


TEXT = st.text(alphabet="ab:", max_size=3)
NAMED = st.tuples(
    st.builds(
        Namespace,
        settings=TEXT,
        weights=TEXT,
        rotary=TEXT,
        dtype=TEXT,
        anchor=st.lists(st.integers(0, 2), max_size=2).map(tuple),
        state=TEXT,
        salt=TEXT,
    ),
    TEXT,
    st.lists(st.integers(0, 2), max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(NAMED, NAMED, st.data())
def test_fields_cannot_be_shifted_into_each_other(first: Any, second: Any, data: Any) -> None:
    """Equal keys exactly for equal fields, also where two fields only move a border."""
    namespace, kind, tokens = first
    names = [field.name for field in dataclasses.fields(Namespace) if field.type in (str, "str")]
    one, other = data.draw(st.permutations(names))[:2]
    joined = getattr(namespace, one) + getattr(namespace, other)
    cut = data.draw(st.integers(0, len(joined)))
    shifted = dataclasses.replace(namespace, **{one: joined[:cut], other: joined[cut:]})

    def key(space: Namespace, kind: str, tokens: list[int]) -> bytes:
        return space.key(kind, torch.tensor(tokens, dtype=torch.int64))

    assert (key(*first) == key(*second)) == (first == second)
    assert (key(*first) == key(shifted, kind, tokens)) == (shifted == namespace)


def session(store: MemoryStore, *, add_bos: bool = True, salt: str = "", **options: Any) -> Session:
    """A session over one set of weights; ``options`` change the config only."""
    hf = tiny_hf(**options)
    return Session(wrap_model(hf, byte_tokenizer(add_bos=add_bos)), store=store, salt=salt)


PROMPT = Prompt.of_ids([256, *random_ids(50).tolist()], [(5, 40)])


def reused(opened: Session) -> int:
    """Tokens with stored state; what is missing is stored afterwards."""
    count = sum(len(span) for span, _ in opened.look_up(PROMPT).hits)
    opened.build_missing(PROMPT)
    return count


def test_salts_keep_tenants_apart_and_find_their_own_again() -> None:
    store = MemoryStore()
    assert [reused(session(store, salt=salt)) for salt in ("a", "b", "a", "b")] == [0, 0, 35, 35]


def test_a_second_session_of_the_same_model_finds_the_state() -> None:
    store = MemoryStore()
    assert [reused(session(store)) for _ in range(2)] == [0, 35]


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1},
        {"add_bos": False},
        {"rotary": "linear"},
        {"rotary": "yarn"},
        {"family": "mistral", "sliding_window": None},
        {"rms_norm_eps": 1e-2},
        {"hidden_act": "gelu"},
    ],
    ids=str,
)
def test_anything_that_shapes_state_is_a_miss(options: dict[str, Any]) -> None:
    """Weights, anchor, rotary settings and the rest of the config, one at a time."""
    store = MemoryStore()
    assert reused(session(store)) == 0
    assert reused(session(store, **options)) == 0


def test_another_rotary_base_is_a_miss() -> None:
    store, hf = MemoryStore(), tiny_hf()
    assert reused(session(store)) == 0
    hf.config.rope_parameters["rope_theta"] = 20000.0
    assert reused(Session(wrap_model(hf, byte_tokenizer(add_bos=True)), store=store)) == 0


def test_another_sliding_window_is_a_miss() -> None:
    """Same weights, but segments longer than the window have another state."""
    store = MemoryStore()
    assert reused(session(store, family="mistral", sliding_window=None)) == 0
    assert reused(session(store, family="mistral", sliding_window=16)) == 0


def test_one_bit_of_one_weight_and_an_adapter_are_misses() -> None:
    store = MemoryStore()
    assert reused(session(store)) == 0
    flipped, adapted = tiny_hf(), tiny_hf()
    with torch.no_grad():
        flipped.model.layers[3].mlp.down_proj.weight.view(torch.int32)[5, 7] ^= 1
    adapted.model.layers[0].self_attn.q_proj.register_parameter(
        "lora_A", torch.nn.Parameter(torch.zeros(2, 2))
    )
    for hf in (flipped, adapted):
        assert reused(Session(wrap_model(hf, byte_tokenizer(add_bos=True)), store=store)) == 0


def test_another_element_type_is_a_miss() -> None:
    store = MemoryStore()
    assert reused(session(store)) == 0
    half = wrap_model(tiny_hf().bfloat16(), byte_tokenizer(add_bos=True))
    assert reused(Session(half, store=store)) == 0
