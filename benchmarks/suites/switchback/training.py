"""Trains one Llama on bytes with many ways to multiply matrices, and what is to help them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _llama.config import Shape
from _llama.model import LAYERS, Block, Llama
from flax import nnx

from benchmarks import llama
from benchmarks.llama import Variant
from benchmarks.training import LLAMA_27M, SMALL, SMOKE, Curve, Program
from optax_lowmem import layers

_dot = layers.switchback_dot_general


def _variant(dot: Any = None, **more: Any) -> Variant:
    return Variant({"dot_general": dot} | more, clip=False)


# E4M3 forward and E5M2 for gradients, 1 for the largest number: section 2.2.1's float8 by its words
_UNIT = _dot("tensorwise", "fp8-e5m2", scaling="unit")
VARIANTS = {
    "standard": _variant(),
    "standard-other-start": Variant(clip=False, other_start=True),
    "switchback-int8": _variant(_dot()),
    "switchback-fp8": _variant(_dot("switchback", "fp8")),
    "switchback_m-int8": _variant(_dot("switchback_m")),
    "switchback_q-int8": _variant(_dot("switchback_q")),
    "llm_int8": _variant(_dot("llm_int8")),
    "tensorwise-fp8": _variant(_dot("tensorwise", "fp8-e5m2")),  # scaled to its range
    "tensorwise-unit": _variant(_UNIT),
    "tensorwise-unit-clipped": Variant({"dot_general": _UNIT}),
    "tensorwise-unit-kq-norm": _variant(_UNIT, kq_norm=True),
    "tensorwise-unit-layer-scale": _variant(_UNIT, layer_scale=True),
    "standard-layer-scale": _variant(layer_scale=True),
}


class HeadNorm(nnx.Module):
    """A layer norm of each head, as Flax's attention has with `normalize_qk=True`."""

    def __init__(self, head: int, dtype: str):
        self.head = head
        self.norm = nnx.LayerNorm(head, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x.reshape(*x.shape[:-1], -1, self.head)).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Remedied(Llama):
    """The Llama of examples/ with what is to help tensor-wise float8 (section 2.3).

    Attributes:
      kq_norm: whether queries and keys are normalised.
      layer_scale: whether blocks are multiplied with vectors that are 0 at first.
    """

    kq_norm: bool = False
    layer_scale: bool = False

    def _block(self, key: jax.Array) -> Block:
        block = super()._block(key)
        if self.kq_norm:
            own = block.self_attn
            for name in ("q_proj", "k_proj"):
                normed = nnx.Sequential(getattr(own, name), HeadNorm(own.head, self.compute))
                setattr(own, name, normed)
        if self.layer_scale:
            for name in ("self_attn", "mlp"):
                scale = layers.LayerScale(self.shape.width)
                setattr(block, name, nnx.Sequential(getattr(block, name), scale))
        return block

    def measured(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The loss, and the mean magnitude of what goes into each layer and out of the last."""

        def size(x: jax.Array) -> jax.Array:
            return jnp.mean(jnp.abs(x.astype(jnp.float32)))

        def body(x: jax.Array, own: Any) -> tuple[jax.Array, jax.Array]:
            return self.layer(own, params, x, tokens), size(x)

        x, sizes = jax.lax.scan(body, self.first(params, tokens), params[LAYERS])
        return self.last(params, x, tokens), jnp.append(sizes, size(x))


_TINY = dataclasses.replace(
    SMALL, preset="llama-tiny", shape=Shape(4, 64, 192, 2, 2, 256), steps=600, held_out_batches=64
)
# preset -> part -> run; a large batch is 65,536 tokens, the CLIP ViT-Huge's of appendix D.3
PRESETS = {
    name: {"run": run, "large": dataclasses.replace(run, preset=f"{run.preset}-large", **large)}
    for name, run, large in (
        ("gpu", LLAMA_27M, {"batch": 256, "steps": 400, "every": 20, "held_out_batches": 8}),
        ("cpu", _TINY, {"batch": 64, "steps": 200, "every": 10, "held_out_batches": 8}),
        ("smoke", SMOKE, {"batch": 16, "steps": 4, "every": 2}),
    )
}


class Experiment(llama.Experiment):
    """An experiment that measures features too."""

    what, base, variants, kind = "switchback", "standard", VARIANTS, Remedied

    def evaluation(self, loss: Any) -> Callable[[Any, jax.Array], Any]:
        def evaluate(params: Any, batches: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses, sizes = jax.lax.map(functools.partial(loss.measured, params), batches)
            return losses.mean(), sizes.mean(0)

        return evaluate

    def look(self, evaluate: Any, params: Any, state: Any) -> dict[str, Any]:
        loss, sizes = jax.device_get(evaluate(params, self.text.held_out))
        return {"val_loss": loss, "features": sizes}

    def values(self, curves: Curve, program: Program) -> dict[str, tuple[float, str]]:
        first, *_, last = (float(sizes[-1]) for sizes in curves["features"])
        return super().values(curves, program) | {
            "first_features": (first, "mean magnitude"),
            "last_features": (last, "mean magnitude"),
        }
