"""Shapes and activations of decoders, from the `config.json` of a Hugging Face model."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_lowmem._src.arrays import nf4, trees
from optax_lowmem._src.layers.losses.cross_entropy import chunk_limit, chunks
from optax_lowmem._src.training.memory.plan import (
    OFFLOAD,
    RESIDENT,
    STREAM,
    STREAM_FROZEN,
    Activations,
)

# model_type -> what a config.json may leave out
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
_KNOWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": _QWEN | {"num_key_value_heads": 32},
    "qwen3": _QWEN | {"num_key_value_heads": 32, "head_dim": 128},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA,
}
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
)  # fmt: skip
# Keys that examples/finetune.py refuses if they are set
_UNSET = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen3": ("attention_bias",),
    "gemma2": ("attention_bias", "use_bidirectional_attention"),
    "gemma3_text": ("attention_bias", "use_bidirectional_attention", "attn_logit_softcapping"),
}
_ROPE_TYPES = ("default", "linear", "llama3")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CHUNK_BESIDE_4_BITS = 512  # tokens whose logits exist at once, as in examples/finetune.py
_INPUTS = 3  # of layers, on the device while the others are on the host: in, at work, out


def lora_names(text: str) -> tuple[str, ...]:
    """Return the matrices of layers that get adapters: `q_proj, v_proj`, or `all-linear`.

    Raises:
      ValueError: for a name that is no matrix of a layer, with those near to it.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ("all-linear",):
        return MATRICES
    for name in names or [text]:
        if name not in MATRICES:
            near = difflib.get_close_matches(name.split(".")[-1], MATRICES, 2) or MATRICES
            raise ValueError(
                f"no matrix of the layers is named {name!r}: write {' or '.join(near)}, several "
                "with commas between them, or all-linear"
            )
    return names


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
      scores: attention heads whose scores are stored; 0: fused attention stores none.
      gemma: whether it has Gemma's GELU, four norms per layer, and layers of two kinds.
      caps: whether scores and logits have soft caps.
      mixed: whether some layers attend to a window, and others do not.
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
    scores: int
    gemma: bool
    caps: bool
    mixed: bool = False

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
            names = lora_names(",".join(names))
            if rank < 1:
                raise ValueError(f"the rank of adapters is {rank}, not 1 or more")
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
        for i in range(4 if self.gemma else 2):
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

    def in_4_bits(self) -> Any:
        """Return the weights as shapes, with the layers' matrices in NF4; None if they cannot be.

        NF4 takes matrices whose inputs are multiples of 64.
        """
        if any(size % nf4.BLOCK for size in (self.width, self.heads, self.hidden)):
            return None
        result = self.params()
        for name in MATRICES:
            own = result["layers"][name]
            _, inputs, outputs = own["kernel"].shape
            own["kernel"] = jax.eval_shape(nf4.quantize, self._stack(outputs, inputs))
        return result

    def _stack(self, *shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.layers, *shape), dtype)

    def activations(
        self,
        batch: int,
        sequence: int,
        mode: str = RESIDENT,
        lora: Sequence[str] | None = None,
        kept: int | None = None,
        accumulate: bool = False,
        in_f32: bool = False,
        in_4_bits: bool = False,
    ) -> Activations:
        """Estimate the activations in bf16, and the gradients of embedding and head.

        Args:
          batch: rows.
          sequence: tokens per row.
          mode: of the step; but with `resident`, an untied head is updated at once.
          lora: names of adapted matrices; nothing else is trained.
          kept: bytes that each layer keeps per token, such as those of `activation_report`, where
            layers are not stacked; None: its input, from which the backward pass computes it again.
          accumulate: whether the gradients are added to those of other batches.
          in_f32: whether the weights are f32, of which products take copies in bf16.
          in_4_bits: whether the layers' matrices are in NF4, of which each is decoded when it is
            multiplied.
        """
        tokens = batch * sequence
        limit = _CHUNK_BESIDE_4_BITS if in_4_bits else chunk_limit(self.vocab)
        number, length = chunks((batch, sequence) if batch <= limit else (tokens,), limit)
        logits = length * (batch if batch <= limit else 1) * self.vocab
        stream, table = 2 * tokens * self.width, 2 * self.vocab * self.width
        trained = lora is None
        loss = (8 if self.caps else 6) * logits
        if trained and number > 1:
            loss += 2 * table  # the sum of the head's gradients, in f32
        elif trained:
            loss = max(loss, 2 * logits + 2 * table)
        loss += 3 * stream
        if not trained:
            held = end = 0
        elif accumulate and mode == RESIDENT:  # layers' are added before the embedding's
            held = 2 * table  # of the head in f32
            end = held + (2 * table if self.tied else 0)  # and of the embedding
        elif self.tied:
            held, end = 2 * table, 5 * table  # both in f32, and their sum
        else:
            loss = max(loss, 3 * table + stream)  # of the head in f32 and bf16
            held = table if mode == RESIDENT else 0
            end = 3 * table + held
        inputs = self.layers * (stream if kept is None else kept * tokens)
        if mode in (OFFLOAD, STREAM, STREAM_FROZEN):  # most are on the host
            inputs = _INPUTS * stream
        work, beside = self._layer(tokens, sequence, lora, kept), inputs
        if in_f32:
            loss += table
            if not accumulate:
                held, end = 2 * table, 6 * table if self.tied else 4 * table
            work += 2 * trees.nbytes(self.params()["layers"]) // self.layers
        if in_4_bits:
            work += 2 * self.width * max(self.hidden, self.heads)
        if kept is not None:  # freed layer by layer, while gradients come into being
            beside = max(inputs - trees.nbytes(self.params()["layers"]), 0)
        return Activations(inputs + loss, beside + held + work, end)

    def _layer(
        self, tokens: int, sequence: int, lora: Sequence[str] | None, kept: int | None
    ) -> int:
        """Return the bytes of a layer's activations and their gradients in its backward pass."""
        mlp = 14 if self.gemma else 12
        if lora is not None:  # frozen matrices need no gradients of their outputs for their own
            mlp = 14 if {"gate_proj", "up_proj", "down_proj"} & set(lora) else 10
        others = 12 if self.gemma else 8
        work = mlp * self.hidden + others * self.width + 4 * (self.heads + self.kv_heads)
        if kept is not None:
            work = max(work - kept, 6 * self.hidden)
        scores = self.scores * sequence
        attention = (13 if self.caps else 10) * scores + 6 * self.hidden
        # cuDNN adds the mask of packed rows to the scores: [batch, 1, sequence, sequence] in bf16
        mask = 0 if self.scores else 2 * sequence
        return tokens * (max(work + 6 * scores, attention) + mask)


def decoder(config: Mapping[str, Any]) -> Decoder:
    """Return the sizes of a `config.json`.

    Raises:
      ValueError: for an architecture that is not known, sizes that are missing, and keys that
        `examples/finetune.py` refuses.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"a configuration is an object, not a {type(config).__name__}")
    try:
        return _decoder(config)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"a key has a value of a wrong type: {error}") from None


def _decoder(config: Mapping[str, Any]) -> Decoder:
    kind = config.get("model_type")
    if kind not in _KNOWN:
        raise ValueError(
            f"model_type {kind!r} is not known: {', '.join(_KNOWN)} are. For another model pass "
            "its shapes and activations to optax_lowmem.memory.plan"
        )
    values = _KNOWN[kind] | dict(config)
    wrong = [f"lacks {key}" for key in _SIZES if key not in config]
    unset = ("quantization_config", *_UNSET.get(kind, ()))
    wrong += [f"has {k} {values[k]!r}" for k in unset if values.get(k) not in (None, False)]
    wrong += [f"has rope_type {name!r}" for name in _rope_types(values) - set(_ROPE_TYPES)]
    sizes = {key: values.get(key) for key in (*_SIZES, "num_key_value_heads", "head_dim")}
    wrong += [
        f"has {key} {size!r}"
        for key, size in sizes.items()
        if size is not None and (not isinstance(size, int) or size < 1)
    ]
    if wrong:
        raise ValueError(f"the {kind} {', '.join(wrong)}: examples/finetune.py does not train it")
    heads = values["num_attention_heads"]
    head = values.get("head_dim") or values["hidden_size"] // heads
    gemma = kind.startswith("gemma")
    fused = head <= 128 and head % 8 == 0 and not values.get("attn_logit_softcapping")
    return Decoder(
        layers=values["num_hidden_layers"],
        width=values["hidden_size"],
        hidden=values["intermediate_size"],
        heads=heads * head,
        kv_heads=(values.get("num_key_value_heads") or heads) * head,
        vocab=values["vocab_size"],
        tied=bool(values.get("tie_word_embeddings")),
        bias=kind == "qwen2",
        head_norms=head if kind in ("qwen3", "gemma3_text") else 0,
        scores=0 if fused else heads,
        gemma=gemma,
        caps=bool(values.get("final_logit_softcapping")),
        mixed=len(set(_windows(values))) > 1,
    )


def _rope_types(values: Mapping[str, Any]) -> set[Any]:
    """Return the scalings of rotary frequencies, by the keys of newer or older files."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    nested = [one for one in given.values() if isinstance(one, dict)]
    return {one.get("rope_type", one.get("type", "default")) for one in nested or [given]}


def _windows(values: Mapping[str, Any]) -> list[bool]:
    """Return which layers of a model attend to a window, where they may differ."""
    kind, numbers = values["model_type"], range(values["num_hidden_layers"])
    if kind in ("llama", "mistral"):
        return []
    if values.get("layer_types"):
        return [name == "sliding_attention" for name in values["layer_types"]]
    if kind.startswith("qwen"):
        return [values["use_sliding_window"] and i >= values["max_window_layers"] for i in numbers]
    every = values.get("sliding_window_pattern", 6) if kind == "gemma3_text" else 2
    return [(i + 1) % every != 0 for i in numbers]
