"""Trains optimizers in lockstep, from the same weights on the same batches; can be resumed."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt.config import matrices
from _gpt.train import F32, LOWMEM, build_model, loss_function, optimizer_step
from _llama.config import FP8
from _llama.model import Llama

import optax_lowmem as lowmem
from benchmarks import training
from benchmarks.suites.pairs import kept, states
from benchmarks.suites.pairs.gpt2 import GPT2
from benchmarks.suites.pairs.presets import BASES, VARIANTS, Pairs
from benchmarks.training import Curve, Program, Text, say

CLIP = 1.0
SAVE_SECONDS = 120  # between two states that are kept
UNITS = {"val_loss": "nats/token", "tokens_per_s": "tokens/s", "done": "steps"}


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Settings that `build_model` takes."""

    shape: Any


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
    graphdef, weights = build_model(_Settings(run.shape), vocab)  # type: ignore[arg-type]
    return weights, loss_function(graphdef, run.compute)


def optimizer(run: Pairs, name: str, steps: Any) -> optax.GradientTransformation:
    """A variant behind clipping, for a run of so many steps, which may be traced."""
    chosen = VARIANTS[name]
    rule, (b1, b2) = chosen.rule, run.betas[chosen.rule]
    more: dict[str, Any] = {"weight_decay": run.decays[rule], "mask": matrices}
    if chosen.blocks:
        more["blocks"] = lowmem.blocks.Structure(run.shape.heads)
    tx = chosen.make(run.schedule(rule, steps), b1=b1, b2=b2, **more)
    chain = optax.chain if chosen.plain else lowmem.chain
    return chain(optax.clip_by_global_norm(CLIP), tx)


class Experiment(training.Experiment):
    """A run and its text, to be trained with some variants of one rule."""

    what = "pairs"

    def __init__(self, run: Pairs, text: Text, seed: int = 0):
        super().__init__(run, text, seed)

    def flags(self) -> dict[str, Any]:
        own = {"vocab": self.text.vocab, "train_tokens": self.text.last}
        return super().flags() | own | {"bytes_per_token": self.text.bytes_per_token}

    def evaluation(self, loss: Any) -> Any:
        """(weights, held-out windows) -> mean losses of groups of windows."""

        def evaluate(params: Any, batches: jax.Array) -> jax.Array:
            groups = batches.reshape(-1, self.run.held_out_group, batches.shape[-1])
            return jax.lax.map(functools.partial(loss, params), groups)

        return evaluate

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

    def optimizer(self, name: str, steps: Any) -> optax.GradientTransformation:
        """A variant behind clipping, for a run of so many steps, which may be traced."""
        return optimizer(self.run, name, steps)

    @functools.cached_property
    def start(self) -> Any:
        """(variant, seed) -> weights and state; the f32 weights of a seed are all variants'."""
        return jax.jit(self._start, static_argnums=0)

    def _start(self, name: str, seed: Any) -> tuple[Any, Any]:
        chosen, tx = VARIANTS[name], self.optimizer(name, self.run.steps)
        weights = model(self.run, self.text.vocab, chosen.activations)[0](jax.random.key(seed))
        if chosen.rounded:
            weights = jax.tree.map(lambda w: jax.lax.reduce_precision(w, 8, 15), weights)
        if chosen.plain:
            return weights, tx.init(weights)
        return lowmem.init(tx, weights, dtype=chosen.dtype(), seed=seed)

    def lower(self, name: str) -> Program:
        chosen = VARIANTS[name]
        if chosen.activations == FP8 and self.run.model != "llama":
            raise SystemExit(f"{name}: only a Llama has layers with FP8 activations")
        _, loss = model(self.run, self.text.vocab, chosen.activations)
        own_step = optimizer_step(F32 if chosen.plain else LOWMEM, "auto")

        def take_step(grads: Any, state: Any, params: Any, steps: Any) -> tuple[Any, Any]:
            return own_step(self.optimizer(name, steps), grads, state, params)

        start = functools.partial(self.start, name, np.uint32(0))
        return self.trace(start, loss, take_step, jax.ShapeDtypeStruct((), jnp.float32))


@dataclasses.dataclass
class One:
    """A variant under way."""

    params: Any
    state: Any
    curves: dict[str, list[Any]]

    def keep(self, **values: Any) -> None:
        for name, value in values.items():
            self.curves.setdefault(name, []).append(value)

    def arrays(self) -> Curve:
        return {name: np.asarray(values) for name, values in self.curves.items()}


class Clock:
    """Seconds since a command began, and when it has to end."""

    def __init__(self, limit: float):
        self._began, self.limit = time.perf_counter(), limit

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def ends_within(self, seconds: float) -> bool:
        return self.seconds() + seconds > self.limit


class Seed:
    """One seed of all variants, call by call in turn, and what it has kept in a folder."""

    def __init__(self, experiment: Experiment, programs: Any, seed: int, steps: int, folder: Path):
        self.experiment, self.programs, self.seed = experiment, programs, seed
        self.path = folder / f"seed-{seed}.npz"
        run = experiment.run
        self.offsets = training.offsets(
            dataclasses.replace(run, steps=steps), experiment.text, seed
        ).reshape(-1, run.every, run.batch)
        self.steps = np.float32(steps)
        self.validate = max(1, len(self.offsets) // run.validations)
        self.done = 0  # calls
        self.runs: dict[str, One] = {}
        self._begin()

    def _begin(self) -> None:
        found = kept.read(self.path)
        for name in self.programs:
            begin = functools.partial(self.experiment.start, name, np.uint32(self.seed))
            if found is None:
                self.runs[name] = One(*begin(), {})
                self._look(name)
                continue
            about, arrays = found
            if about["steps"] != int(self.steps):
                raise SystemExit(f"{self.path} is of {about['steps']} steps, not {self.steps:.0f}")
            like = jax.eval_shape(begin)
            params, state = kept.restored(name, arrays, like)
            prefix = f"{name}/"
            curves = {k[len(prefix) :]: list(x) for k, x in arrays.items() if k.startswith(prefix)}
            self.runs[name], self.done = One(params, state, curves), about["done"]

    def save(self) -> None:
        """Keep everything that the next call depends on, and the curves so far."""
        arrays: dict[str, Any] = {}
        for name, one in self.runs.items():
            arrays |= kept.flattened(name, (one.params, one.state))
            arrays |= {f"{name}/{curve}": x for curve, x in one.arrays().items()}
        kept.write(self.path, {"done": self.done, "steps": int(self.steps)}, arrays)

    def _look(self, name: str) -> None:
        """Evaluate, and measure a reference's state."""
        one, evaluate = self.runs[name], self.programs[name][1][1]
        losses = np.asarray(evaluate(one.params, self.experiment.text.held_out))
        one.keep(val_step=self.done * self.experiment.every, val_loss=losses.mean(dtype=np.float64))
        one.curves["val_groups"] = list(losses)
        if name in BASES.values() and self.done:
            one.keep(**states.errors(one.state))

    @property
    def ended(self) -> bool:
        return self.done == len(self.offsets)

    def train(self, clock: Clock) -> bool:
        """Go on until the end, and return whether it came before the clock's."""
        saved = clock.seconds()
        while not self.ended:
            began = clock.seconds()
            for name, one in self.runs.items():
                self._call(name, one)
            self.done += 1
            took = clock.seconds() - began
            if self.done % self.validate == 0 or self.ended:
                for name in self.runs:
                    self._look(name)
                self._tell(took)
            late = clock.ends_within(3 * took)
            if late or self.ended or clock.seconds() - saved > SAVE_SECONDS:
                self.save()
                saved = clock.seconds()
            if late:
                break
        return self.ended

    def _call(self, name: str, one: One) -> None:
        starts, began = self.offsets[self.done], time.perf_counter()
        given = one.params, one.state, self.experiment.text.tokens, starts, self.steps
        one.params, one.state, found = self.programs[name][1][0](*given)
        loss = jax.device_get(found)["train_loss"]
        step = (self.done + 1) * self.experiment.every
        one.keep(step=step, train_loss=loss, seconds=time.perf_counter() - began)

    def _tell(self, took: float) -> None:
        losses = "  ".join(f"{n} {one.curves['val_loss'][-1]:.4f}" for n, one in self.runs.items())
        step = self.done * self.experiment.every
        say(f"seed {self.seed}  {step:6d} of {self.steps:.0f}  {losses}  {took:.1f} s a call")

    def curves(self) -> dict[str, Curve]:
        """Curves by label; seconds become the median rate."""
        found = {}
        for name, one in self.runs.items():
            own = one.arrays()
            seconds = own.pop("seconds")
            tokens = self.experiment.run.tokens * self.experiment.every
            usual = np.median(seconds[1:] if len(seconds) > 1 else seconds)
            own["tokens_per_s"] = np.asarray([tokens / usual])
            found[f"{name} seed {self.seed}"] = own
        return found

    def values(self, name: str) -> dict[str, tuple[float, str]]:
        own = self.curves()[f"{name} seed {self.seed}"]
        last = {"val_loss": own["val_loss"][-1], "tokens_per_s": own["tokens_per_s"][0],
                "done": own["step"][-1]}  # fmt: skip
        return {metric: (float(value), UNITS[metric]) for metric, value in last.items()}


def affordable(experiment: Experiment, programs: Any, seconds: float) -> int:
    """The steps of all variants that fit into so many seconds, at most the preset's.

    A call of each is timed from a start that is thrown away.
    """
    run, total = experiment.run, 0.0
    starts, steps = experiment.offsets[0], np.float32(run.steps)
    for name, (_, compiled) in programs.items():
        params, state = experiment.start(name, np.uint32(0))
        for _ in range(2):  # the first pays for what is loaded
            began = time.perf_counter()
            given = params, state, experiment.text.tokens, starts, steps
            params, state, found = jax.block_until_ready(compiled[0](*given))
            took = time.perf_counter() - began
        total += took
        del found
    calls = int(seconds / total) // run.validations * run.validations
    chosen = min(run.steps, max(1, calls) * run.every)
    say(f"{total:.1f} s a call of all variants: {chosen} of {run.steps} steps in {seconds:.0f} s")
    return chosen
