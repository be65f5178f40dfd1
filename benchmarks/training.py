"""Trains models on text that lies on the device, many steps a call: Python costs nothing.

One loop for every training benchmark, and the runs of their variants, one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _gpt import data
from _llama.config import Shape

from benchmarks import records
from benchmarks.curves import store

VALIDATIONS = 10
Curve = dict[str, np.ndarray]
Look = Callable[[Any, Any], dict[str, Any]]  # (weights, state) -> curve -> its value now
Say = Callable[[str], None]
say = functools.partial(print, flush=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """A model and its training, with the names of the examples' settings where they have them.

    Attributes:
      preset: its name.
      shape: of the model.
      context: bytes in a window.
      batch: windows in a step.
      steps: of the run.
      every: steps of a call.
      learning_rate: the peak.
      text: which.
      held_out_batches: of an evaluation.
      compute: dtype of what is not in 8 bits.
      attention: `xla` or `cudnn`.
    """

    preset: str
    shape: Shape
    context: int
    batch: int
    steps: int
    every: int
    learning_rate: float
    text: str
    held_out_batches: int
    compute: str
    attention: str = "xla"
    tokenizer: str = "byte"

    @property
    def tokens(self) -> int:
        """In a step: the length of the sums of a weight's gradient."""
        return self.batch * self.context

    @property
    def vocab(self) -> int:
        """Of a tokenizer that is trained."""
        return self.shape.vocab

    def changed(self, **given: Any) -> Run:
        """With what a command line gives; None: as it is."""
        own = dataclasses.replace(self, **{k: v for k, v in given.items() if v is not None})
        if own.steps % own.every:
            raise SystemExit(f"--steps {own.steps} is not a multiple of {own.every}, a call's")
        return own


@dataclasses.dataclass(frozen=True)
class Text:
    """The tokens on the device, the held-out windows, and the share of rows that a step wakes."""

    tokens: jax.Array
    held_out: jax.Array
    vocab: int
    awake: float
    bytes_per_token: float

    @property
    def last(self) -> int:
        """Tokens to train on."""
        return self.tokens.shape[0]


def load_text(settings: Any, cache: Path) -> Text:
    """Tokenises the text of `settings`."""
    corpus = data.load_corpus(text=settings.text)
    if settings.tokenizer == "bpe":
        found = data.bpe_tokens(corpus, settings.vocab, cache)
    else:
        found = data.byte_tokens(corpus)
    size = settings.batch, settings.context
    held_out = np.stack(data.held_out_batches(found.held_out, *size, settings.held_out_batches))
    seen = [
        len(np.unique(data.sample_batch(found.train, *size, 0, step)[:, :-1])) for step in range(50)
    ]
    return Text(
        jnp.asarray(found.train),
        jnp.asarray(held_out),
        found.vocab,
        float(np.mean(seen)) / found.vocab,
        found.bytes_per_token,
    )


def offsets(settings: Any, text: Text, seed: int) -> np.ndarray:
    """[steps, batch]: where the windows of each step start."""
    size = settings.steps, settings.batch
    return np.random.default_rng(seed).integers(0, text.last - settings.context, size, np.int32)


# ---- the loop ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """One variant: its start, its steps and its evaluation, to be compiled.

    Attributes:
      start: gives weights and state.
      steps: `every` of them.
      evaluate: the loss of the held-out windows.
      parameters: of the model.
      state_bytes: of the optimizer.
      first: the start again, where it is to be compiled beside the steps.
    """

    start: Callable[[], tuple[Any, Any]]
    steps: jax.stages.Lowered
    evaluate: jax.stages.Lowered
    parameters: int
    state_bytes: int = 0
    first: jax.stages.Lowered | None = None

    def compile(self) -> tuple[Any, ...]:
        """The steps, the evaluation, and the start if it is to be."""
        parts = (self.steps, self.evaluate, self.first)
        return tuple(part.compile() for part in parts if part is not None)


def many_steps(
    loss: Any, take_step: Callable[..., tuple[Any, Any]], context: int, measure: Look | None = None
) -> Any:
    """(weights, state, text, where the windows of each step start, ...) -> both, measures.

    `take_step` has (gradients, state, weights, ...); measures are the mean loss, and those of
    `measure` after the steps.
    """

    def steps(params: Any, state: Any, tokens: jax.Array, starts: jax.Array, *more: Any) -> Any:
        def step(carry: Any, at: jax.Array) -> tuple[Any, jax.Array]:
            params, state = carry
            windows = tokens[at[:, None] + jnp.arange(context + 1)[None]]
            value, grads = jax.value_and_grad(loss)(params, windows.astype(jnp.int32))
            return take_step(grads, state, params, *more), value

        (params, state), losses = jax.lax.scan(step, (params, state), starts)
        measured = measure(params, state) if measure else {}
        return params, state, {"train_loss": jnp.mean(losses), **measured}

    return steps


def calls(
    offsets: np.ndarray, text: Text, start: tuple[Any, Any], steps: Any
) -> Iterator[tuple[int, Any, Any, dict[str, Any], float]]:
    """After each call: steps done, weights, state, its measures, its seconds."""
    params, state = start
    for index, starts in enumerate(offsets, start=1):
        began = time.perf_counter()
        params, state, found = steps(params, state, text.tokens, starts)
        found = jax.device_get(found)
        yield index * len(starts), params, state, found, time.perf_counter() - began


def follow(
    offsets: np.ndarray,
    text: Text,
    start: Any,
    steps: Any,
    look: Look,
    say: Say,
    validations: int = VALIDATIONS,
) -> tuple[Curve, Any, Any]:
    """Trains from the start: curves by name, weights, state. A run that becomes NaN ends there.

    `look` gives `val_loss`, and what else is to be a curve. `tokens_per_s` is the median over
    calls, without evaluations.
    """
    first = start()
    found: dict[str, list[Any]] = {"step": [], "val_step": []}
    seconds: list[float] = []

    def keep(values: dict[str, Any]) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    keep({"val_step": 0} | look(*first))
    every, last = offsets.shape[1], len(offsets) * offsets.shape[1]
    validate = every * max(1, len(offsets) // validations)
    for step, params, state, logged, took in calls(offsets, text, first, steps):
        seconds.append(took)
        keep({"step": step} | logged)
        if step % validate and step < last and np.isfinite(logged["train_loss"]):
            continue
        keep({"val_step": step} | look(params, state))
        held_out = found["val_loss"][-1]
        ms = 1e3 * float(np.median(seconds)) / every
        say(f"{step:6d}  held out {held_out:.4f}  {ms:.2f} ms a step")
        if not np.isfinite(held_out):
            break
    curves = {name: np.asarray(values) for name, values in found.items()}
    tokens = offsets[0].size * (text.held_out.shape[-1] - 1)  # of a call
    rate = tokens / np.median(seconds[1:] or seconds)
    return curves | {"tokens_per_s": np.asarray([rate])}, params, state


class Experiment:
    """A run and its text, to be trained with one variant after another on the same batches."""

    def __init__(self, run: Any, text: Text, seed: int, every: int | None = None):
        self.run, self.text, self.seed = run, text, seed
        self.every = every or run.every
        self.offsets = offsets(run, text, seed).reshape(-1, self.every, run.batch)

    def trace(
        self,
        start: Any,
        loss: Any,
        take_step: Any,
        evaluate: Any = None,
        *more: Any,
        measure: Look | None = None,
    ) -> Program:
        """Traces `every` steps; the held-out loss is the mean of `loss` unless `evaluate` is.

        `more` are the types of what `take_step` takes beside gradients, state and weights.
        """

        def mean(params: Any, batches: jax.Array) -> jax.Array:
            return jax.lax.map(functools.partial(loss, params), batches).mean()

        steps = many_steps(loss, take_step, self.run.context, measure)
        params, state = jax.eval_shape(start)
        starts = jax.ShapeDtypeStruct(self.offsets.shape[1:], np.int32)
        return Program(
            start,
            jax.jit(steps, donate_argnums=(0, 1)).lower(
                params, state, self.text.tokens, starts, *more
            ),
            jax.jit(evaluate or mean).lower(params, self.text.held_out),
            sum(leaf.size for leaf in jax.tree.leaves(params)),
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        )


class Measured(Experiment):
    """An experiment with models whose `measured` gives the loss and the sizes of features."""

    def trace_measured(self, model: Any, start: Any, take_step: Any) -> Program:
        """Traces `every` steps; `start` is jitted."""

        def evaluate(params: Any, batches: jax.Array) -> tuple[jax.Array, jax.Array]:
            losses, sizes = jax.lax.map(functools.partial(model.measured, params), batches)
            return losses.mean(), sizes.mean(0)

        return self.trace(start, model, take_step, evaluate)

    def train(self, program: Program, compiled: tuple[Any, ...], say: Say) -> Curve:
        """Trains from the start: name -> curve. A run that becomes NaN ends there."""
        steps, evaluate = compiled

        def look(params: Any, state: Any) -> dict[str, Any]:
            loss, sizes = jax.device_get(evaluate(params, self.text.held_out))
            return {"val_loss": loss, "features": sizes}

        return follow(self.offsets, self.text, program.start, steps, look, say)[0]


# ---- the runs of a benchmark ---------------------------------------------------------------------


def parser(doc: str | None, limit: int, curves: Path) -> argparse.ArgumentParser:
    """Return the command line that every training benchmark has."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--steps", type=int, help="of each run; default: the preset's")
    add("--seed", type=int, default=0, help="of weights, batches and what else is random")
    add("--limit", type=float, default=limit, metavar="S",
        help="start no run that would end later (default: %(default)s s)")  # fmt: skip
    add("--cache", type=Path, default=Path("demo_output"), help="where a tokenizer is kept")
    add("--curves", type=Path, help=f"default: {curves.name} in benchmarks/results")
    records.add_option(made)
    return made


def usual(presets: dict[str, Any], name: str | None) -> Any:
    """The preset of that name; without one, that of this device."""
    return presets[name or ("cpu" if jax.default_backend() == "cpu" else "gpu")]


def about(experiment: Experiment, parameters: int, **own: Any) -> dict[str, Any]:
    """Return the settings that runs share, for the curves and the records."""
    return own | {
        "seed": experiment.seed,
        "parameters": parameters,
        "device": records.device(),
        "jax": jax.__version__,
        "commit": records.commit(),
    }


def rows_of(
    flags: dict[str, Any],
    what: str,
    name: str,
    values: dict[str, tuple[float, str]],
    bench: str = "train",
) -> records.Rows:
    """Records of one run: metric -> value and unit."""
    own = {key: value for key, value in flags.items() if key not in ("device", "jax", "commit")}
    case = f"{flags['preset']}/{what}"
    return [
        records.record(bench, case, name, metric, value, unit, seed=own["seed"], flags=own)
        for metric, (value, unit) in values.items()
    ]


def compile_all(experiment: Any, names: list[str]) -> dict[str, tuple[Program, tuple[Any, ...]]]:
    """Traces the variants one by one and compiles them side by side; returns when they have."""
    with ThreadPoolExecutor() as pool:
        found = {}
        for name in names:
            program = experiment.lower(name)
            found[name] = program, pool.submit(program.compile)
        return {name: (program, one.result()) for name, (program, one) in found.items()}


class Part:
    """The runs of a part, one after the other, until the limit; stored and recorded.

    Attributes:
      experiment: that is trained.
      programs: variant -> what is traced and what is compiled.
      flags: that the runs share.
      runs: what was trained -> curves.

    `began` is when the limit started to run; by default now.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        make: Callable[[], Any],
        names: list[str],
        flags: Callable[[Any, int], dict[str, Any]],
        path: Path | None,
        part: str | None = None,
        began: float | None = None,
    ):
        self.args, self.part, self.path = args, part, args.curves or path
        self._began, self._longest = began or time.perf_counter(), 0.0
        self.experiment = make()
        self.programs = compile_all(self.experiment, names)
        self.flags = flags(self.experiment, next(iter(self.programs.values()))[0].parameters)
        self.runs: dict[str, Curve] = {}
        run = self.experiment.run
        size = f"{self.flags['parameters']:,} weights, {run.steps} steps"
        size += f" of {run.batch * run.context:,} {run.tokenizer}s"
        say(f"{run.preset}: {size}; compiled {len(names)} variants after {self.seconds():.0f} s")

    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began

    def begins(self, label: str) -> bool:
        """Return whether a run is to begin; otherwise it would end too late."""
        self._at = self.seconds()
        late = self._at + self._longest > self.args.limit
        say(f"{label} {'is left out ' if late else ''}after {self._at:.0f} s")
        return not late

    def add(self, label: str, curves: Curve, rows: records.Rows) -> None:
        """Keeps what a run that began has become."""
        self._longest = max(self._longest, self.seconds() - self._at)
        self.runs[label] = curves
        self.store()
        records.keep(rows, self.args.record)

    def store(self) -> None:
        """Writes the curves that there are."""
        if self.path is not None:
            store(self.path, self.part, self.flags, self.runs)
