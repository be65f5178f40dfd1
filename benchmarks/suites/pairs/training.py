"""An optimizer and its low-memory forms, trained from the same weights on the same batches.

What is unfinished at the limit is kept in `--folder`, and the same command goes on from there.
GPT-2 124M has the hyperparameters of FlashOptim's Table 7; its text is all sources and pages of
documentation that Python packages bring. Curves go to benchmarks/results/pairs-PRESET-RULE.npz.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt.train import build_model, loss_function
from _llama.config import FP8
from _llama.model import Llama

import optax_lowmem as lowmem
from benchmarks import records, training
from benchmarks.suites.pairs import states
from benchmarks.suites.pairs.gpt2 import GPT2
from benchmarks.suites.pairs.presets import (
    ADAM,
    BASES,
    LION,
    PRESETS,
    VARIANTS,
    Pairs,
    case_of,
    stem_of,
)
from benchmarks.training import Curve, Program, changed
from benchmarks.variants import Part, parser

CLIP = 1.0


def model(run: Pairs, vocab: int, activations: str) -> tuple[Any, Any]:
    """(key -> f32 weights, (weights, windows) -> mean loss) of a run's model."""
    if run.model.startswith("gpt2"):
        qk_norm = run.model == "gpt2-qk"
        gpt2 = GPT2(run.shape, vocab, run.context, run.compute, run.attention, qk_norm)
        return gpt2.weights, gpt2
    if run.model == "llama":
        shape = dataclasses.replace(run.shape, vocab=vocab)
        llama = Llama(shape, run.compute, run.attention, activations=activations, stacked=False)
        return functools.partial(llama.weights, dtype=lambda path: jnp.float32), llama
    graphdef, weights = build_model(run, vocab)
    return weights, loss_function(graphdef, run.compute)


def optimizer(run: Pairs, name: str) -> optax.GradientTransformation:
    chosen = VARIANTS[name]
    rule, (b1, b2) = chosen.rule, run.betas[chosen.rule]
    more: dict[str, Any] = {"weight_decay": run.decays[rule], "mask": lowmem.blocks.decay_mask}
    if chosen.blocks:
        more["blocks"] = lowmem.blocks.Structure(run.shape.heads)
    chain = optax.chain if chosen.plain else lowmem.chain
    tx = chosen.make(run.schedule(rule), b1=b1, b2=b2, **more)
    return chain(optax.clip_by_global_norm(CLIP), tx)


class Experiment(training.Experiment):
    bench = "pairs"

    def __init__(self, run: Pairs, text: training.Text, rule: str, case: str):
        self.base, self.validations, self._case = BASES[rule], run.validations, case
        super().__init__(run, text, 0)

    @property
    def case(self) -> str:
        return self._case

    def flags(self) -> dict[str, Any]:
        own = {"vocab": self.text.vocab, "bytes_per_token": self.text.bytes_per_token}
        return super().flags() | own

    def evaluation(self, loss: Any) -> Any:
        """(weights, held-out windows) -> mean losses of groups of windows."""

        def evaluate(params: Any, batches: jax.Array) -> jax.Array:
            groups = batches.reshape(-1, self.run.held_out_group, batches.shape[-1])
            return jax.lax.map(functools.partial(loss, params), groups)

        return evaluate

    def look(self, evaluate: Any, params: Any, state: Any) -> dict[str, Any]:
        groups = np.asarray(evaluate(params, self.text.held_out))
        found = {"val_loss": groups.mean(dtype=np.float64), "val_groups": groups}
        return found | (states.errors(state) if self.variant in (BASES[ADAM], BASES[LION]) else {})

    def fields(self, curves: Curve) -> dict[str, Any]:
        """The losses of groups at the end, which give an interval."""
        return {"held_out_groups": [round(float(x), 5) for x in curves["val_groups"][-1]]}

    def gradient(self, loss: Any) -> Any:
        """(weights, windows) -> mean loss and gradient over micro-batches, which are added in f32.

        A gradient has its weight's dtype.
        """
        if self.run.micro == self.run.batch:
            return jax.value_and_grad(loss)
        parts = self.run.batch // self.run.micro

        def accumulated(params: Any, windows: jax.Array) -> tuple[jax.Array, Any]:
            def add(total: Any, micro: jax.Array) -> tuple[Any, None]:
                found = jax.value_and_grad(loss)(params, micro)
                return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, found), None

            zero = jnp.float32(0), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
            micros = windows.reshape(parts, self.run.micro, -1)
            (value, grads), _ = jax.lax.scan(add, zero, micros)
            mean = jax.tree.map(lambda g, p: (g / parts).astype(p.dtype), grads, params)
            return value / parts, mean

        return accumulated

    def lower(self, name: str) -> Program:
        chosen = VARIANTS[name]
        if chosen.activations == FP8 and self.run.model != "llama":
            raise SystemExit(f"{name}: only a Llama has layers with FP8 activations")
        weights, loss = model(self.run, self.text.vocab, chosen.activations)

        def first(key: jax.Array) -> Any:
            found = weights(key)
            if not chosen.rounded:
                return found
            return jax.tree.map(lambda w: jax.lax.reduce_precision(w, 8, 15), found)

        return self.optimized(optimizer(self.run, name), first, loss, chosen.dtype)


def main(arguments: list[str] | None = None) -> None:
    made = parser(__doc__, 3600, Path("pairs-PRESET-RULE.npz"), VARIANTS, PRESETS, several=True)
    made.set_defaults(preset="smoke-gpt2", variants=["adamw", "flash_adamw"])
    made.add_argument("--seeds", type=int, default=1, help="how many, from --seed (default: 1)")
    made.add_argument("--folder", type=Path, metavar="FOLDER",
                      help="of unfinished runs (default: demo_output/PRESET)")  # fmt: skip
    args = made.parse_args(arguments)
    rules = {VARIANTS[name].rule for name in args.variants}
    if len(rules) > 1:
        raise SystemExit(f"--variants {' '.join(args.variants)}: of {len(rules)} rules")
    (rule,) = rules
    chosen = list(itertools.product(args.steps or [None], args.lr or [None]))
    if args.curves and len(chosen) > 1:
        raise SystemExit(f"--curves {args.curves} is one file, for one of {len(chosen)} settings")
    preset = changed(PRESETS[args.preset], attention=args.attention)
    text = training.load_text(preset, args.cache)

    def part(given: tuple[int | None, float | None]) -> tuple[str, Part]:
        steps, lr = given
        run = changed(preset, steps=steps, rates=None if lr is None else {rule: lr})
        case = case_of(args.preset, rule, steps, lr)
        make, name = functools.partial(Experiment, run, text, rule, case), stem_of(case)
        return name, Part(args, make, args.variants, records.RESULTS / f"{name}.npz")

    parts = list(map(part, chosen))
    for _, one in parts:  # they are compiled side by side, before the first trains
        one.wait()
    folder = args.folder or Path("demo_output") / args.preset
    for name, one in parts:
        one.train_all(range(args.seed, args.seed + args.seeds), folder / name)
        if one.late:
            break
