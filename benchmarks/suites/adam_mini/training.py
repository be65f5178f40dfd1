"""Q-Adam-mini's Figures 3, 5, 6, 7 and 8 on a GPT: losses and norms under each way to keep m and v.

Untied embedding and head of 32,000 rows, of which a batch of 2,048 tokens wakes about a fiftieth.
The curves go to benchmarks/results/q_adam_mini.npz after each variant.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _gpt import train
from _gpt.config import ModelShape, Settings

import optax_lowmem as lowmem
from benchmarks import training
from benchmarks.curves import CURVES
from benchmarks.training import Curve, Program
from benchmarks.variants import Part, built, parser
from optax_lowmem import codecs
from optax_lowmem.blocks import decay_mask

GROUP = 256
# Adam-mini's for pre-training, which Q-Adam-mini takes over; matrices decay, the embedding too.
ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
# Equation 1 for a range from 0: an f32 scale, and a code 0 for what is small beside it. A group
# holds the means of 256 blocks, so those of many rows.
CASE_1 = dataclasses.replace(codecs.linear(signed=False), guarded=False)


def _stored(**changes: Any) -> Any:
    """The paper's storage, without its floor, with something changed."""
    paper = lowmem.Storage(mu=codecs.affine(), nu=None, group_size=GROUP, rounding="embeddings")
    return functools.partial(lowmem.q_adam_mini, storage=dataclasses.replace(paper, **changes))


PLAIN = "adamw"  # optax's; the others go through `lowmem.step`
# name -> (schedule, blocks=, ...) -> transformation
VARIANTS = {
    PLAIN: lambda schedule, blocks, **more: optax.adamw(schedule, **more),
    "adam_mini": lowmem.adam_mini,
    "q_adam_mini": lowmem.q_adam_mini,
    "q_adam_mini-embeddings": _stored(),
    "q_adam_mini-nearest": _stored(rounding="nearest"),
    "q_adam_mini-reference": _stored(mu=codecs.affine_paper(), rounding="nearest"),
    "q_adam_mini-case1": _stored(nu=CASE_1, rounding="nearest"),
    # Beyond the paper: a v that is never 0, and how far equal runs come apart.
    "q_adam_mini-case1-guarded": _stored(nu=codecs.linear(signed=False)),
    "adam_mini-again": lowmem.adam_mini,
}

_45M = Settings(
    preset="gpt-45m", optimizer="q_adam_mini",
    shape=ModelShape(layers=4, heads=8, width=512, tied=False, fused=False),
    context=256, batch=8, steps=10_000, learning_rate=1e-3, tokenizer="bpe", vocab=32_000,
    text="installed", held_out_batches=128, compute="bfloat16",
)  # fmt: skip
PRESETS = {
    "gpt-45m": _45M,
    "smoke": dataclasses.replace(
        _45M, preset="smoke", shape=dataclasses.replace(_45M.shape, layers=2, heads=2, width=64),
        context=32, steps=60, learning_rate=1e-2, tokenizer="byte", vocab=256,
        text="standard-library", held_out_batches=8, compute="float32",
    ),
}  # fmt: skip


def moment_norm(state: Any, slot: str) -> jax.Array:
    """Norm of the embedding's moment, decoded; a codec's paper form decodes alike.

    8-bit second moments of blocks lie in groups along all of them.
    """
    found = optax.tree_utils.tree_get(state, slot)["embed"]
    if found.dtype in (jnp.int8, jnp.uint8):
        codec = codecs.affine() if slot == "mu" else codecs.linear(signed=False)
        codes = found if slot == "mu" else found.reshape(-1)
        scales = optax.tree_utils.tree_get(state, f"{slot}_scale")["embed"]
        found = codecs.decode_array(codec, codes, scales, GROUP)
    return jnp.sqrt(jnp.sum(jnp.square(found)))


class Experiment(training.Experiment):
    what, base, validations = "q_adam_mini", "adam_mini", 20

    def __init__(self, run: Settings, text: training.Text, seed: int):
        super().__init__(run, text, seed, 5 if run.preset == "smoke" else 50)
        graphdef, self.weights = train.build_model(run, text.vocab)
        self.loss = train.loss_function(graphdef, run.compute)
        # its head is (vocabulary, width), as the embedding
        rules = (("lm_head", (1,)),)
        self.blocks = lowmem.blocks.Structure(heads=run.shape.heads, rules=rules)
        middle = f"blocks/{run.shape.layers // 2}/up/kernel"
        self.watched = {"embedding": "embed", "head": "lm_head", "mlp": middle}

    def flags(self) -> dict[str, Any]:
        text, own = self.text, dataclasses.asdict(self.run) | ADAM
        del own["optimizer"]
        own["train_tokens"] = text.tokens.size
        return own | {"vocab": text.vocab, "awake_rows": text.awake}

    def lower(self, name: str) -> Program:
        chain = optax.chain if name == PLAIN else lowmem.chain
        make = functools.partial(VARIANTS[name], blocks=self.blocks, mask=decay_mask, **ADAM)
        tx = chain(optax.clip_by_global_norm(train.CLIP), make(self.run.schedule()))
        dtype = None if name == PLAIN else jnp.float32
        return self.optimized(tx, self.weights, self.loss, dtype, measure=self._measured)

    def _measured(self, params: Any, state: Any) -> dict[str, Any]:
        norms = lowmem.diagnostics.norms(params, leaves=tuple(self.watched.values()))
        found = {f"{what}_norm": norms[path] for what, path in self.watched.items()}
        return found | {f"{slot}_norm": moment_norm(state, slot) for slot in ("mu", "nu")}

    def values(self, curves: Curve, program: Program) -> dict[str, tuple[float, str]]:
        units = {"val_loss": "nats/token", "embedding_norm": "norm", "mlp_norm": "norm"}
        found = {name: (float(curves[name][-1]), unit) for name, unit in units.items()}
        each = program.state_bytes / program.parameters
        return found | {"state_bytes_per_param": (each, "bytes")}


def main(arguments: list[str] | None = None) -> dict[str, Curve]:
    made = parser(__doc__, 570, CURVES, VARIANTS, PRESETS)
    args = made.parse_args(arguments)
    make = functools.partial(built, args, Experiment, PRESETS[args.preset or "gpt-45m"])
    return Part(args, make, args.variants or VARIANTS, CURVES).train_all()
