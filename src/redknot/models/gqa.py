"""Adapter of grouped-query attention: Llama, Mistral, Qwen2, Qwen3 and their like."""

from collections.abc import Sequence
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from redknot.errors import InputError
from redknot.models.adapter import Layer, LayerCost, LayerShape, StateKind
from redknot.models.rotary import Rotary

# Settings that change attention and that this adapter does not apply.
UNSUPPORTED_SETTINGS = ("attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size")


class GqaLayer:
    """One decoder layer of a Transformers model, taken apart."""

    def __init__(self, module: nn.Module, shape: LayerShape) -> None:
        self.shape = shape
        self._norm: Any = module.input_layernorm
        self._attention: Any = module.self_attn
        self._ffn_norm: Any = module.post_attention_layernorm
        self._mlp: Any = module.mlp

    def attention_input(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """Normalised input of the projections."""
        return self._norm(hidden)

    def queries(self, normed: Float[Tensor, "row hidden"]) -> Float[Tensor, "query_head row dim"]:
        """Un-rotated queries, after the query norm where there is one."""
        return self._heads(self._attention.q_proj(normed), "q_norm")

    def keys(self, normed: Float[Tensor, "row hidden"]) -> Float[Tensor, "kv_head row dim"]:
        """Un-rotated keys, after the key norm where there is one."""
        return self._heads(self._attention.k_proj(normed), "k_norm")

    def values(self, normed: Float[Tensor, "row hidden"]) -> Float[Tensor, "kv_head row dim"]:
        """Values."""
        return self._heads(self._attention.v_proj(normed), "")

    def attention_output(
        self, attended: Float[Tensor, "row query_head*dim"]
    ) -> Float[Tensor, "row hidden"]:
        """What attention adds to the residual stream."""
        return self._attention.o_proj(attended)

    def ffn(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """What the FFN, its norm included, adds to the residual stream."""
        return self._mlp(self._ffn_norm(hidden))

    def _heads(self, projected: Tensor, norm: str) -> Tensor:
        heads = projected.view(projected.shape[0], -1, self.shape.head_dim)
        if hasattr(self._attention, norm):
            heads = getattr(self._attention, norm)(heads)
        return heads.transpose(0, 1)


class Gqa:
    """Models whose layers are `input_layernorm, self_attn, post_attention_layernorm, mlp`."""

    model_types: ClassVar = ("llama", "mistral", "qwen2", "qwen3")

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        for name in UNSUPPORTED_SETTINGS:
            if getattr(config, name, None) is not None:
                raise InputError(f"{name} is set in the model's config and is not supported")
        self._model: Any = model
        self.rotary = Rotary.of(self._model.model.rotary_emb, config)
        shapes = [_shape(module, config) for module in self._model.model.layers]
        self.settings = f"{config.hidden_act} {config.rms_norm_eps!r} " + " ".join(
            f"{shape.scale!r}/{shape.horizon}" for shape in shapes
        )
        self.context_length = int(config.max_position_embeddings)
        self.device, self.dtype = model.device, model.dtype
        self.layers: Sequence[Layer] = [
            GqaLayer(*pair) for pair in zip(self._model.model.layers, shapes, strict=True)
        ]

    def embed(self, token_ids: Int[Tensor, "row"]) -> Float[Tensor, "row hidden"]:
        """Input of the first layer."""
        return self._model.model.embed_tokens(token_ids)

    def logits(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Final norm and output head, in float32."""
        return self._model.lm_head(self._model.model.norm(hidden)).float()


def _shape(module: nn.Module, config: Any) -> LayerShape:
    attention: Any = module.self_attn
    if getattr(attention, "sinks", None) is not None:
        raise InputError("learned attention sinks are not supported")
    head_dim, hidden = attention.head_dim, config.hidden_size
    query_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return LayerShape(
        state=StateKind.KV,
        num_groups=kv_heads,
        queries_per_group=query_heads // kv_heads,
        head_dim=head_dim,
        scale=attention.scaling,
        horizon=_horizon(attention, config),
        cost=LayerCost(
            query=2 * hidden * query_heads * head_dim,
            key_value=2 * hidden * 2 * kv_heads * head_dim,
            output=2 * query_heads * head_dim * hidden,
            ffn=6 * hidden * config.intermediate_size,
        ),
    )


def _horizon(attention: Any, config: Any) -> int | None:
    """The layer's sliding window: per layer where the family says so, else the config's."""
    if hasattr(config, "layer_types") and config.layer_types is not None:
        sliding = config.layer_types[attention.layer_idx] == "sliding_attention"
        return config.sliding_window if sliding else None
    return getattr(config, "sliding_window", None)
