"""Trains one GPT with many optimizers on the same batches, and logs the norms of its weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _gpt import train
from _gpt.config import ModelShape, Settings, matrices

import optax_lowmem as lowmem
from benchmarks import training
from benchmarks.training import Curve, Program, Text
from optax_lowmem import codecs

CLIP = 1.0
GROUP = 256
# Adam-mini's for pre-training, which Q-Adam-mini takes over; matrices decay, the embedding too.
ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

Transformation = optax.GradientTransformation


# Equation 1 for a range from 0: an f32 scale, and a code 0 for what is small beside it. A group
# holds the means of 256 blocks, so those of many rows.
CASE_1 = dataclasses.replace(codecs.linear(signed=False), guarded=False)


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer to train with."""

    says: str  # what it is, for a legend
    make: Callable[..., Transformation]  # (schedule, blocks=, ...) -> transformation
    fused: bool = True  # whether it goes through `lowmem.step`


def _adamw(schedule: optax.Schedule, blocks: Any, **arguments: Any) -> Transformation:
    del blocks
    return optax.adamw(schedule, **arguments)


def _stored(says: str, **changes: Any) -> Variant:
    """The paper's storage, without its floor, with something changed."""
    paper = lowmem.Storage(mu=codecs.affine(), nu=None, group_size=GROUP, rounding="embeddings")
    storage = dataclasses.replace(paper, **changes)
    return Variant(says, functools.partial(lowmem.q_adam_mini, storage=storage))


VARIANTS = {
    "adamw": Variant("AdamW, f32", _adamw, fused=False),
    "adam_mini": Variant("Adam-mini, f32", lowmem.adam_mini),
    "q_adam_mini": Variant("ours: stochastic everywhere", lowmem.q_adam_mini),
    "q_adam_mini-embeddings": _stored("ours: stochastic in the embedding"),
    "q_adam_mini-nearest": _stored("ours: nearest", rounding="nearest"),
    "q_adam_mini-reference": _stored(
        "reference quantizer: floor, nearest", mu=codecs.affine_paper(), rounding="nearest"
    ),
    "q_adam_mini-case1": _stored("Case 1: 8-bit v", nu=CASE_1, rounding="nearest"),
    # Beyond the paper: a v that is never 0, and how far equal runs come apart.
    "q_adam_mini-case1-guarded": _stored("Case 1 with our codec", nu=codecs.linear(signed=False)),
    "adam_mini-again": Variant("Adam-mini, once more", lowmem.adam_mini),
}


def build(
    name: str, schedule: optax.Schedule, blocks: Any, arguments: dict[str, Any]
) -> Transformation:
    """A variant behind the clipping of the gradient's global norm."""
    variant = VARIANTS[name]
    chain = lowmem.chain if variant.fused else optax.chain
    return chain(
        optax.clip_by_global_norm(CLIP), variant.make(schedule, blocks=blocks, **arguments)
    )


_45M = Settings(
    "gpt-45m", "q_adam_mini", ModelShape(layers=4, heads=8, width=512, tied=False, fused=False),
    context=256, batch=8, steps=10_000, learning_rate=1e-3, tokenizer="bpe", vocab=32_000,
    text="installed", held_out_batches=128, compute="bfloat16",
)  # fmt: skip
_SMOKE = dataclasses.replace(
    _45M, preset="smoke", shape=ModelShape(layers=2, heads=2, width=64, tied=False, fused=False),
    context=32, steps=60, learning_rate=1e-2, tokenizer="byte", vocab=256, text="standard-library",
    held_out_batches=8, compute="float32",
)  # fmt: skip
PRESETS = {"gpt-45m": _45M, "smoke": _SMOKE}


def structure(shape: ModelShape) -> Any:
    """Adam-mini's blocks of the model; its head is (vocabulary, width), as the embedding."""
    return lowmem.blocks.Structure(heads=shape.heads, rules=(("lm_head", (1,)),))


def watched(shape: ModelShape) -> dict[str, str]:
    """Return a dict from the name of each watched norm to the path of its leaf."""
    middle = f"blocks/{shape.layers // 2}/up/kernel"
    return {"embedding": "embed", "head": "lm_head", "mlp": middle}


def moment_norm(state: Any, slot: str, path: str) -> jax.Array:
    """Norm of one leaf's moment, decoded; a codec's paper form decodes alike.

    8-bit second moments of blocks lie in groups along all of them.
    """
    found = _leaf(optax.tree_utils.tree_get(state, slot), path)
    if found.dtype in (jnp.int8, jnp.uint8):
        codec = codecs.affine() if slot == "mu" else codecs.linear(signed=False)
        codes = found if slot == "mu" else found.reshape(-1)
        scales = _leaf(optax.tree_utils.tree_get(state, f"{slot}_scale"), path)
        found = codecs.decode_array(codec, codes, scales, GROUP)
    return jnp.sqrt(jnp.sum(jnp.square(found)))


def _leaf(tree: Any, path: str) -> jax.Array:
    for key in path.split("/"):
        tree = tree[int(key) if key.isdigit() else key]
    return tree


class Experiment(training.Experiment):
    """A model and its text, to be trained with one optimizer after another."""

    what, base, validations = "q_adam_mini", "adam_mini", 20

    def __init__(
        self, settings: Settings, text: Text, every: int, arguments: dict[str, Any], seed: int
    ):
        super().__init__(settings, text, seed, every)
        self.arguments = arguments | {"mask": matrices}
        graphdef, self.weights = train.build_model(settings, text.vocab)
        self.loss = train.loss_function(graphdef, settings.compute)

    def flags(self) -> dict[str, Any]:
        own = dataclasses.asdict(self.run) | self.arguments
        del own["optimizer"], own["mask"]
        text = self.text
        return own | {"vocab": text.vocab, "train_tokens": text.last, "awake_rows": text.awake}

    def blocks(self) -> lowmem.blocks.Description:
        """Describe the blocks over which Adam-mini shares second moments."""
        found = structure(self.run.shape)
        params = jax.eval_shape(self.weights, jax.random.key(0))
        return lowmem.blocks.describe(params, heads=found.heads, rules=found.rules)

    def lower(self, name: str) -> Program:
        blocks, fused = structure(self.run.shape), VARIANTS[name].fused
        tx = build(name, self.run.schedule(), blocks, self.arguments)
        own_step = train.optimizer_step(
            train.LOWMEM if fused else train.F32, self.run.implementation
        )

        def start() -> tuple[Any, Any]:
            weights = self.weights(jax.random.key(self.seed))
            if not fused:
                return weights, tx.init(weights)
            return lowmem.init(tx, weights, dtype=jnp.float32, seed=self.seed)

        def take_step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            return own_step(tx, grads, state, params)

        return self.trace(start, self.loss, take_step, measure=self._measured)

    def _measured(self, params: Any, state: Any) -> dict[str, Any]:
        leaves = watched(self.run.shape)
        norms = lowmem.diagnostics.norms(params, leaves=tuple(leaves.values()))
        return {
            **{f"{what}_norm": norms[path] for what, path in leaves.items()},
            "mu_norm": moment_norm(state, "mu", "embed"),
            "nu_norm": moment_norm(state, "nu", "embed"),
        }

    def values(self, curves: Curve, program: Program) -> dict[str, tuple[float, str]]:
        units = {"val_loss": "nats/token", "embedding_norm": "norm", "mlp_norm": "norm"}
        found = {name: (float(curves[name][-1]), unit) for name, unit in units.items()}
        each = program.state_bytes / program.parameters
        return found | {"state_bytes_per_param": (each, "bytes")}
