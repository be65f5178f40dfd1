"""Trains models on text that is on the device, many steps a call: Python costs nothing.

One loop for every training benchmark; `variants.py` runs it for their variants and seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt import data
from _gpt.train import F32, LOWMEM, optimizer_step
from _llama.config import Shape

import optax_lowmem as lowmem
from benchmarks import curves, package_text

SAVE_SECONDS = 120  # between two saves of an unfinished run
UNITS = {"byte": "byte", "bpe": "token"}
ADAM = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}
Curve = dict[str, np.ndarray]
Measure = Callable[[Any, Any], dict[str, Any]]  # (weights, state) -> curve -> its value now
Say = Callable[[str], None]
say = functools.partial(print, flush=True)


def changed(settings: Any, **given: Any) -> Any:
    """Settings with what a command line gives; None: as it is."""
    return dataclasses.replace(settings, **{k: v for k, v in given.items() if v is not None})


@dataclasses.dataclass(frozen=True)
class Run:
    """A model and its training, with the names of the examples' settings where they have them."""

    preset: str  # its name
    shape: Shape  # of the model
    context: int  # bytes in a window
    batch: int  # windows in a step
    steps: int  # of the run
    every: int  # steps of a call
    learning_rate: float  # the peak
    text: str  # which
    held_out_batches: int  # of an evaluation
    compute: str  # dtype of what is not in 8 bits
    attention: str = "xla"  # `xla` or `cudnn`
    tokenizer: str = "byte"

    @property
    def tokens(self) -> int:
        """In a step: the length of the sums of a weight's gradient."""
        return self.batch * self.context

    @property
    def vocab(self) -> int:
        """Of a tokenizer that is trained."""
        return self.shape.vocab


# models of bytes, which others are made of: minutes on a GPU and on a CPU, and seconds
LLAMA_27M = Run(
    "llama-27m", Shape(8, 512, 1536, 8, 8, 256), 256, 32, 2_000, 50, 1e-3, "installed", 64,
    "bfloat16",
)  # fmt: skip
SMALL = Run(
    "llama-mini", Shape(4, 96, 288, 3, 3, 256), 64, 8, 1_000, 20, 4e-3, "standard-library", 32,
    "float32",
)  # fmt: skip
SMOKE = Run(
    "smoke", Shape(2, 32, 64, 2, 2, 256), 16, 4, 10, 5, 1e-2, "standard-library", 2, "float32"
)


@dataclasses.dataclass(frozen=True)
class Text:
    """The tokens on the device, the held-out windows, and the share of rows that a step wakes."""

    tokens: jax.Array
    held_out: jax.Array
    vocab: int
    awake: float
    bytes_per_token: float


def load_text(settings: Any, cache: Path) -> Text:
    if settings.text == package_text.NAME:
        found = package_text.load(cache)
    else:
        corpus = data.load_corpus(text=settings.text)
        bpe = functools.partial(data.bpe_tokens, vocab=settings.vocab, cache=cache)
        found = (bpe if settings.tokenizer == "bpe" else data.byte_tokens)(corpus)
    size = settings.batch, settings.context
    held_out = np.stack(data.held_out_batches(found.held_out, *size, settings.held_out_batches))
    batches = (data.sample_batch(found.train, *size, 0, step)[:, :-1] for step in range(50))
    awake = float(np.mean([len(np.unique(batch)) for batch in batches])) / found.vocab
    tokens = jnp.asarray(found.train), jnp.asarray(held_out)
    return Text(*tokens, found.vocab, awake, found.bytes_per_token)


@dataclasses.dataclass(frozen=True)
class Program:
    """One variant: its start, its steps and its evaluation, to be compiled."""

    start: Callable[[], tuple[Any, Any]]  # gives weights and state
    steps: jax.stages.Lowered  # `every` of them
    evaluate: jax.stages.Lowered  # the loss of the held-out windows
    parameters: int  # of the model
    state_bytes: int = 0  # of the optimizer

    def compile(self) -> tuple[Any, Any]:
        return self.steps.compile(), self.evaluate.compile()


def many_steps(
    gradient: Any, take_step: Callable[..., Any], context: int, measure: Measure | None
) -> Any:
    """(weights, state, text, where the windows of each step start, ...) -> both, measures.

    `gradient` has (weights, windows) and gives the loss and its gradients; `take_step` has
    (gradients, state, weights, ...); measures are the mean loss, and those of `measure` after the
    steps.
    """

    def steps(params: Any, state: Any, tokens: jax.Array, starts: jax.Array, *more: Any) -> Any:
        def step(carry: Any, at: jax.Array) -> tuple[Any, jax.Array]:
            params, state = carry
            windows = tokens[at[:, None] + jnp.arange(context + 1)[None]]
            value, grads = gradient(params, windows.astype(jnp.int32))
            return take_step(grads, state, params, *more), value

        (params, state), losses = jax.lax.scan(step, (params, state), starts)
        measured = measure(params, state) if measure else {}
        return params, state, {"train_loss": jnp.mean(losses), **measured}

    return steps


def calls(
    offsets: np.ndarray, text: Text, start: tuple[Any, Any], steps: Any, done: int = 0
) -> Iterator[tuple[int, Any, Any, dict[str, Any], float]]:
    """After each call: steps done, weights, state, its measures, its seconds.

    `start` are the weights and the state after `done` calls.
    """
    params, state = start
    for index, starts in enumerate(offsets[done:], start=done + 1):
        began = time.perf_counter()
        params, state, found = steps(params, state, text.tokens, starts)
        found = jax.device_get(found)
        yield index * len(starts), params, state, found, time.perf_counter() - began


@dataclasses.dataclass(frozen=True)
class Kept:
    """The file of an unfinished run, from which a later command goes on bit for bit."""

    path: Path
    about: dict[str, Any]  # the settings of the run, which must be those of the file
    until: float  # when the command has to end, by `time.perf_counter`

    def _about(self, tree: Any) -> dict[str, Any]:
        kinds = [(str(x.dtype), x.shape) for x in jax.tree.leaves(tree)]
        return {"settings": self.about, "leaves": kinds}

    @property
    def ended(self) -> bool:
        return self.path.with_suffix(".ended").exists()

    def end(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.with_suffix(".ended").touch()
        self.path.unlink(missing_ok=True)

    def write(self, found: dict[str, list[Any]], tree: Any) -> None:
        """Writes the curves so far, and weights and state of any dtype: all or nothing."""
        leaves = map(np.ascontiguousarray, jax.device_get(jax.tree.leaves(tree)))
        # NumPy's files have no bf16
        arrays = {f"leaf {i}": x[None].view(np.uint8) for i, x in enumerate(leaves)}
        arrays |= {name: np.asarray(values) for name, values in found.items()}
        unfinished = self.path.with_suffix(f".{os.getpid()}.npz")
        curves.write(unfinished, self._about(tree), arrays, np.savez)
        unfinished.replace(self.path)

    def read(self, like: Any) -> tuple[dict[str, list[Any]], Any] | None:
        """Return what `write` wrote, with the shapes and dtypes of `like`; None without a file."""
        if not self.path.exists():
            return None
        about, arrays = curves.read(self.path)
        if not curves.alike(about, self._about(like)):
            raise SystemExit(f"{self.path} is of another run: choose another --folder")
        leaves, tree = jax.tree.flatten(like)
        stored = [arrays.pop(f"leaf {i}").view(x.dtype) for i, x in enumerate(leaves)]
        found = [jnp.asarray(x.reshape(own.shape)) for x, own in zip(stored, leaves, strict=True)]
        return {name: list(x) for name, x in arrays.items()}, jax.tree.unflatten(tree, found)


class Experiment:
    """A run and its text, to be trained with one variant after another on the same batches."""

    bench, what = "train", ""  # of records: their bench, and what their case says is trained
    base, variant = "", ""  # with whose losses the others' are compared, and which is trained now
    validations = 10  # evaluations of a run, but for the first

    def __init__(self, run: Any, text: Text, seed: int, every: int | None = None):
        self.run, self.text = run, text
        self.every = every or run.every
        if run.steps % self.every:
            raise SystemExit(f"--steps {run.steps} is not a multiple of {self.every}, a call's")
        self.turn_to(self.variant, seed)

    def turn_to(self, variant: str, seed: int) -> None:
        """Begins with a variant and a seed: of the start, if that reads it, and of the batches."""
        self.variant, self.seed = variant, seed
        # [calls, steps, batch]: where the windows of each step start
        size = self.run.steps // self.every, self.every, self.run.batch
        last = self.text.tokens.size - self.run.context
        self.offsets = np.random.default_rng(seed).integers(0, last, size, np.int32)

    @property
    def case(self) -> str:
        return f"{self.run.preset}/{self.what}"

    def lower(self, name: str) -> Program:
        raise NotImplementedError

    def evaluation(self, loss: Any) -> Callable[[Any, jax.Array], Any]:
        """(weights, held-out windows) -> what `look` gets: the mean of a loss."""
        return lambda params, batches: jax.lax.map(functools.partial(loss, params), batches).mean()

    def look(self, evaluate: Any, params: Any, state: Any) -> dict[str, Any]:
        """Return `val_loss`, and what else is to be a curve, of weights and state."""
        return {"val_loss": float(evaluate(params, self.text.held_out))}

    def values(self, curves: Curve, program: Program) -> dict[str, tuple[float, str]]:
        return {
            "val_loss": (float(curves["val_loss"][-1]), f"nats/{UNITS[self.run.tokenizer]}"),
            "tokens_per_s": (float(curves["tokens_per_s"][0]), "tokens/s"),
            "done": (int(curves["step"][-1]), "steps"),
        }

    def fields(self, curves: Curve) -> dict[str, Any]:
        """Return what else the record of the loss has."""
        return {}

    def flags(self) -> dict[str, Any]:
        """Return the settings that the runs share, but for what `about` adds."""
        own = {"tokens": self.run.tokens, "train_tokens": self.text.tokens.size}
        return dataclasses.asdict(self.run) | own

    def gradient(self, loss: Any) -> Any:
        """(weights, windows) -> loss, gradients."""
        return jax.value_and_grad(loss)

    def trace(
        self, start: Any, loss: Any, take_step: Any, *more: Any, measure: Measure | None = None
    ) -> Program:
        """Traces `every` steps.

        `more` are the types of what `take_step` takes beside gradients, state and weights.
        """
        steps = many_steps(self.gradient(loss), take_step, self.run.context, measure)
        params, state = jax.eval_shape(start)
        starts = jax.ShapeDtypeStruct(self.offsets.shape[1:], np.int32)
        given = params, state, self.text.tokens, starts, *more
        traced = jax.jit(steps, donate_argnums=(0, 1)).lower(*given)
        evaluation = jax.jit(self.evaluation(loss)).lower(params, self.text.held_out)
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        return Program(start, traced, evaluation, size, state_bytes)

    def optimized(
        self,
        tx: optax.GradientTransformation,
        weights: Callable[[jax.Array], Any],
        loss: Any,
        dtype: Any = None,
        measure: Measure | None = None,
    ) -> Program:
        """Traces `every` steps of an optimizer from the weights of a key, the seed's.

        `dtype` is that of the weights of `lowmem.step`, as `lowmem.init` takes it; None for optax,
        in f32.
        """
        step = optimizer_step(F32 if dtype is None else LOWMEM, "auto")

        @jax.jit
        def begin(seed: Any) -> tuple[Any, Any]:
            first = weights(jax.random.key(seed))
            if dtype is None:
                return first, tx.init(first)
            return lowmem.init(tx, first, dtype=dtype, seed=seed)

        take_step = functools.partial(step, tx)
        return self.trace(lambda: begin(np.uint32(self.seed)), loss, take_step, measure=measure)

    def follow(
        self, start: Any, steps: Any, evaluate: Any, say: Say, kept: Kept | None = None
    ) -> tuple[Curve, Any, Any]:
        """Trains from the start, or from where a run was kept: curves by name, weights, state.

        `tokens_per_s` is the median over calls, without evaluations. A run that becomes NaN ends
        there; one that is kept does not, and ends where its time does.
        """
        found: dict[str, list[Any]] = {"step": [], "val_step": [], "seconds": []}

        def keep(values: dict[str, Any]) -> None:
            for name, value in values.items():
                found.setdefault(name, []).append(value)

        resumed = kept.read(jax.eval_shape(start)) if kept else None
        if resumed is not None:
            found, first = resumed
        else:
            first = start()
            keep({"val_step": 0} | self.look(evaluate, *first))
        calls_of_run, last = len(self.offsets), len(self.offsets) * self.every
        validate = self.every * max(1, calls_of_run // self.validations)
        done, saved = len(found["step"]), time.perf_counter()
        for step, params, state, logged, took in calls(self.offsets, self.text, first, steps, done):
            keep({"step": step, "seconds": took} | logged)
            goes_on = kept is not None or np.isfinite(logged["train_loss"])
            if step % validate == 0 or step == last or not goes_on:
                keep({"val_step": step} | self.look(evaluate, params, state))
                held_out = found["val_loss"][-1]
                ms = 1e3 * float(np.median(found["seconds"])) / self.every
                say(f"{step:6d}  held out {held_out:.4f}  {ms:.2f} ms a step")
                if kept is None and not np.isfinite(held_out):
                    break
            now = time.perf_counter()
            late = kept is not None and now + 3 * took > kept.until
            if kept and step < last and (late or now - saved > SAVE_SECONDS):
                kept.write(found, (params, state))
                saved = now
            if late:
                break
        arrays = {name: np.asarray(values) for name, values in found.items()}
        seconds = arrays.pop("seconds")
        tokens = self.offsets[0].size * (self.text.held_out.shape[-1] - 1)  # of a call
        rate = tokens / np.median(seconds[1:] if len(seconds) > 1 else seconds)
        return arrays | {"tokens_per_s": np.asarray([rate])}, params, state
