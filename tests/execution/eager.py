"""An independent truth: float64 attention under explicit masks over a model's weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.tiny import random_ids, tiny_hf
from torch import Tensor
from transformers import PreTrainedModel

from redknot.execution import PromptCache
from redknot.execution.builder import building
from redknot.execution.session import Session
from redknot.execution.turns import drained
from redknot.heads import HeadMap
from redknot.models import Adapter
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model
from redknot.segments import Prompt, SegmentState

EPS = torch.finfo(torch.float32).eps

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-9/3": {"heads": (9, 3)},
    "qwen2-14/2": {"family": "qwen2", "heads": (14, 2)},
    "qwen3": {"family": "qwen3"},
    "mistral": {"family": "mistral", "sliding_window": 48},
    "qwen2-mixed": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 2,
    },
    "llama-linear": {"rotary": "linear"},
    "llama-llama3": {"rotary": "llama3"},
    "llama-yarn": {"rotary": "yarn"},
    "llama-9/3-yarn": {"heads": (9, 3), "rotary": "yarn"},
    "qwen2-14/2-llama3": {"family": "qwen2", "heads": (14, 2), "rotary": "llama3"},
    "qwen3-yarn": {"family": "qwen3", "rotary": "yarn"},
    "mistral-linear": {"family": "mistral", "sliding_window": 48, "rotary": "linear"},
    "llama-1": {"layers": 1},
    "qwen2-14/2-1": {"family": "qwen2", "heads": (14, 2), "layers": 1},
}


def lively_hf(name: str = "llama", **settings: Any) -> PreTrainedModel:
    """A tiny model whose biases and norms, which start as zeros and ones, are random too."""
    hf = tiny_hf(**(FAMILIES[name] | settings))
    torch.manual_seed(7)
    with torch.no_grad():
        for key, weight in hf.named_parameters():
            if key.endswith("bias"):
                weight.normal_(std=0.5)
            elif key.endswith(("q_norm.weight", "k_norm.weight")):
                weight.uniform_(1, 3)  # a norm undoes sharpened projections
            elif key.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    return hf


def lively_session(name: str = "llama", *, add_bos: bool = True, **settings: Any) -> Session:
    """A session over such a model; its anchor is the BOS token."""
    return Session(wrap_model(lively_hf(name), byte_tokenizer(add_bos=add_bos), name), **settings)


def spanned(*lengths: int, question: int = 30, seed: int = 0) -> Prompt:
    """BOS, seven tokens, random segments of ``lengths`` side by side, and a question."""
    start, spans = 8, []
    for length in lengths:
        spans.append((start, start + length))
        start += length
    ids = [256, *random_ids(start + question - 1, seed).tolist()]
    return Prompt.of_ids(ids, spans)


@dataclass(frozen=True)
class Forward:
    """What the truth says of one prompt."""

    logits: Tensor
    keys: list[Tensor]
    "Rotated, by layer."
    values: list[Tensor]


Mask = Callable[[int, Tensor, Tensor], Tensor]
"From layer, row positions [p, 1] and key positions [1, j] to [group, p, j]."


def forward(hf: PreTrainedModel, token_ids: Tensor, mask: Mask | None = None) -> Forward:
    """Every row's logits; group g of layer l sees what ``mask`` says, causally, under the model's
    own sliding window."""
    config, weights = hf.config, {key: value.double() for key, value in hf.state_dict().items()}
    groups, heads, dim = config.num_key_value_heads, config.num_attention_heads, config.head_dim
    p, j = torch.arange(len(token_ids))[:, None], torch.arange(len(token_ids))[None]
    rotary = hf.model.rotary_emb(torch.zeros(1), p.T)
    cosine, sine = (table[0].double() for table in rotary)
    hidden = weights["model.embed_tokens.weight"][token_ids]
    all_keys, all_values = [], []

    def norm(states: Tensor, name: str) -> Tensor:
        weight = weights.get(f"{name}.weight")
        if weight is None:
            return states
        scale = (states.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return states * scale * weight

    def linear(states: Tensor, name: str) -> Tensor:
        return F.linear(states, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def turn(states: Tensor) -> Tensor:
        first, second = states.chunk(2, -1)
        return states * cosine + torch.cat((-second, first), -1) * sine

    for index in range(config.num_hidden_layers):
        at = f"model.layers.{index}"
        normed = norm(hidden, f"{at}.input_layernorm")
        projected = {
            name: linear(normed, f"{at}.self_attn.{name}_proj").unflatten(-1, (count, dim))
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        }
        query = turn(norm(projected["q"], f"{at}.self_attn.q_norm").transpose(0, 1))
        keys = turn(norm(projected["k"], f"{at}.self_attn.k_norm").transpose(0, 1))
        values = projected["v"].transpose(0, 1)
        seen = (j <= p) & (p - j < sliding_window(hf, index))
        if mask is not None:
            seen = (seen & mask(index, p, j)).repeat_interleave(heads // groups, 0)
        wide_keys, wide_values = (
            state.repeat_interleave(heads // groups, 0) for state in (keys, values)
        )
        scores = (query @ wide_keys.mT * dim**-0.5).masked_fill(~seen, float("-inf"))
        attended = (scores.softmax(-1) @ wide_values).transpose(0, 1).flatten(1)
        hidden = hidden + linear(attended, f"{at}.self_attn.o_proj")
        normed = norm(hidden, f"{at}.post_attention_layernorm")
        gate, up = (linear(normed, f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
        hidden = hidden + linear(F.silu(gate) * up, f"{at}.mlp.down_proj")
        all_keys.append(keys)
        all_values.append(values)
    logits = F.linear(norm(hidden, "model.norm"), weights["lm_head.weight"])
    return Forward(logits, all_keys, all_values)


def sliding_window(hf: PreTrainedModel, layer: int) -> float:
    """The model's own limit in tokens."""
    kinds = getattr(hf.config, "layer_types", None)
    limit = getattr(hf.config, "sliding_window", None)
    slides = limit is not None and (kinds is None or kinds[layer] == "sliding_attention")
    return limit if slides else float("inf")


def section_3(head_map: HeadMap, border: int) -> Mask:
    """The visible sets of the design: the prefill map before ``border``, the decode map from it."""

    def mask(layer: int, p: Tensor, j: Tensor) -> Tensor:
        def seen(rules: Any) -> Tensor:
            rows = [
                torch.ones_like(p - j, dtype=torch.bool)
                if rule.window is None
                else (j < rule.sink) | (j > p - rule.window)
                for rule in rules[layer]
            ]
            return torch.stack(rows)

        return torch.where(p < border, seen(head_map.prefill), seen(head_map.decode))

    return mask


def rounding(hf: PreTrainedModel, tokens: int) -> float:
    """Bound of the float32 error, relative to the largest entry of what is compared.

    A sum of n products is off by at most n * eps of its terms' size. One layer chains sums over the
    hidden size (q, k, v), the head dimension (scores), the tokens (softmax and its product with V),
    the query heads (output), the hidden size (gate, up) and the inner size (down). Real errors grow
    with the square root of n; what that leaves covers the amplification by later layers.
    """
    config = hf.config
    width = config.num_attention_heads * config.head_dim
    sums = 2 * config.hidden_size + config.head_dim + 2 * tokens + width + config.intermediate_size
    return EPS * (config.num_hidden_layers * sums + config.hidden_size)


def assert_near(got: Tensor, truth: Tensor, bound: float) -> None:
    """Every entry within ``bound`` of the truth, relative to the truth's largest entry."""
    error = float((got.double() - truth.double()).abs().max() / truth.double().abs().max())
    assert error <= bound, f"off by {error:.2e} of the largest entry, allowed {bound:.2e}"


def far(got: Tensor, truth: Tensor, bound: float) -> bool:
    """Whether two results differ by more than rounding."""
    scale = truth.double().abs().max()
    return bool((got.double() - truth.double()).abs().max() > bound * scale)


def held(cache: PromptCache, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [group, token, dim] of one layer, and where they are held at all."""
    kv, tokens = cache.layer(layer), torch.arange(cache.length)
    pages = kv.table[:, tokens // kv.page_size].long()
    offset = tokens % kv.page_size
    return kv.key[pages.clamp(min=0), offset], kv.value[pages.clamp(min=0), offset], pages >= 0


def build_state(adapter: Adapter, token_ids: torch.Tensor, anchor: Sequence[int]) -> SegmentState:
    """Canonical state, without a pause."""
    return drained(building(adapter, token_ids, anchor))
