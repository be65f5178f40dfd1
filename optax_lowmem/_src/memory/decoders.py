"""Shapes and activations of decoders, from the `config.json` of a Hugging Face model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.memory.plan import Activations

# model_type -> what a config.json may leave out
_KNOWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True, "attn_logit_softcapping": 50.0},
    "gemma3_text": {"head_dim": 256, "tie_word_embeddings": True},
}
_CHUNK_LOGITS = 2**28  # of linear_cross_entropy


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder with SwiGLU layers.

    Attributes:
      layers: number of layers.
      width: of the residual stream.
      hidden: width of the MLP.
      heads: width of all query heads together.
      kv_heads: width of all key heads together.
      vocab: number of tokens.
      tied: whether the output head is the embedding.
      bias: whether queries, keys and values have biases.
      head_norms: width of the norms of queries and keys; 0: none.
      norms: norms of width `width` per layer.
      scores: attention heads whose scores are stored; 0: fused attention stores none.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    bias: bool
    head_norms: int
    norms: int
    scores: int

    def params(self, lora: tuple[tuple[str, ...], int] | None = None) -> Any:
        """Return the weights as shapes: bf16 matrices, f32 norms, layers stacked on axis 0.

        Args:
          lora: names and rank of adapters; the adapters are returned instead of the weights.
        """
        shapes = {
            "q_proj": (self.width, self.heads),
            "k_proj": (self.width, self.kv_heads),
            "v_proj": (self.width, self.kv_heads),
            "o_proj": (self.heads, self.width),
            "gate_proj": (self.width, self.hidden),
            "up_proj": (self.width, self.hidden),
            "down_proj": (self.hidden, self.width),
        }
        if lora is not None:
            names, rank = lora
            unknown = set(names) - set(shapes)
            if unknown:
                raise ValueError(f"no matrices {sorted(unknown)}: {', '.join(shapes)} are there")
            of_layers: dict[str, Any] = {
                name: {"lora_a": self._stack(shapes[name][0], rank),
                       "lora_b": self._stack(rank, shapes[name][1])}
                for name in names
            }  # fmt: skip
            return {"layers": of_layers}
        of_layers = {name: {"kernel": self._stack(*shape)} for name, shape in shapes.items()}
        if self.bias:
            for name in ("q_proj", "k_proj", "v_proj"):
                of_layers[name]["bias"] = self._stack(shapes[name][1])
        for i in range(self.norms):
            of_layers[f"norm_{i}"] = {"scale": self._stack(self.width, dtype=jnp.float32)}
        if self.head_norms:
            for name in ("q_norm", "k_norm"):
                of_layers[name] = {"scale": self._stack(self.head_norms, dtype=jnp.float32)}
        table = jax.ShapeDtypeStruct((self.vocab, self.width), jnp.bfloat16)
        result = {
            "embed_tokens": {"embedding": table},
            "layers": of_layers,
            "norm": {"scale": jax.ShapeDtypeStruct((self.width,), jnp.float32)},
        }
        if not self.tied:
            result["lm_head"] = {"kernel": table.update(shape=(self.width, self.vocab))}
        return result

    def _stack(self, *shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.layers, *shape), dtype)

    def activations(self, batch: int, sequence: int, head_gradient: bool = True) -> Activations:
        """Estimate the activations of a step that recomputes each layer, in bf16.

        Args:
          batch: rows.
          sequence: tokens per row.
          head_gradient: whether the output head is trained.
        """
        tokens = batch * sequence
        kept = 2 * self.layers * tokens * self.width
        chunk = min(tokens, max(_CHUNK_LOGITS // self.vocab, 1))
        loss = 4 * chunk * self.vocab + 4 * tokens * self.width
        if head_gradient:
            loss += 4 * self.vocab * self.width
        of_layer = 8 * self.width + 3 * (self.heads + self.kv_heads) + 6 * self.hidden
        scores = 10 * self.scores * sequence
        return Activations(kept + loss, kept + tokens * (2 * of_layer + scores))


def decoder(config: Mapping[str, Any]) -> Decoder:
    """Return the sizes of a `config.json`.

    Raises:
      ValueError: for an architecture that is not known.
    """
    kind = config.get("model_type")
    if kind not in _KNOWN:
        raise ValueError(
            f"model_type {kind!r} is not known: {', '.join(_KNOWN)} are. For another model pass "
            "its shapes and activations to optax_lowmem.memory.plan"
        )
    values = _KNOWN[kind] | dict(config)
    heads = values["num_attention_heads"]
    head = values.get("head_dim") or values["hidden_size"] // heads
    return Decoder(
        layers=values["num_hidden_layers"],
        width=values["hidden_size"],
        hidden=values["intermediate_size"],
        heads=heads * head,
        kv_heads=(values.get("num_key_value_heads") or heads) * head,
        vocab=values["vocab_size"],
        tied=values.get("tie_word_embeddings", False),
        bias=kind == "qwen2",
        head_norms=head if kind in ("qwen3", "gemma3_text") else 0,
        norms=4 if kind.startswith("gemma") else 2,
        scores=heads if values.get("attn_logit_softcapping") else 0,
    )
