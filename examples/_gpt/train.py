"""Trains one model with optax in f32 and with low-memory state, side by side."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import optax_lowmem as lowmem

from . import data
from .config import OPTIMIZERS, Settings
from .model import GPT, next_token_loss

CLIP = 1.0
# Steps between synchronisations with the device; each run's steps are timed in such groups, the
# two runs taking turns, so that a busy machine slows both alike.
GROUP = 10
EVALUATIONS = 10
F32, LOWMEM = "optax-f32", "lowmem"


@dataclass(frozen=True)
class Program:
    """One way to train: how to start, the compiled step, and what both take."""

    start: Callable[[int], tuple[Any, Any]]
    step: Callable[..., tuple[Any, Any, jax.Array]]
    evaluate: Callable[..., jax.Array]
    compile_s: float
    peak_bytes: int
    parameters: int
    bytes_by_slot: dict[str, int]


class Run:
    """A training run: its arrays and what was measured."""

    def __init__(self, program: Program, seed: int):
        self.program = program
        self.params, self.state = program.start(seed)
        self.train_loss: list[float] = []
        self.val_steps: list[int] = []
        self.val_loss: list[float] = []
        self.group_s: list[float] = []

    def advance(self, batches: Sequence[np.ndarray]) -> None:
        """Takes a step on each batch and times them together."""
        start, losses = time.perf_counter(), []
        for batch in batches:
            self.params, self.state, loss = self.program.step(self.params, self.state, batch)
            losses.append(loss)
        self.train_loss += [float(loss) for loss in jax.device_get(losses)]
        self.group_s.append((time.perf_counter() - start) / len(batches))

    def validate(self, step: int, batches: Sequence[np.ndarray]) -> None:
        """Mean loss on held-out batches, from the weights as they are stored."""
        self.val_steps.append(step)
        losses = [self.program.evaluate(self.params, batch) for batch in batches]
        self.val_loss.append(float(np.mean(jax.device_get(losses))))

    @property
    def step_s(self) -> float:
        """Median time of a step; the first group pays for the device's warm-up."""
        return float(np.median(self.group_s[1:] or self.group_s))


def build_model(settings: Settings, vocab: int) -> tuple[Any, Callable[[jax.Array], Any]]:
    """The model's graph definition and a function from a key to its f32 weights."""

    def model(key: jax.Array) -> GPT:
        return GPT(settings.shape, vocab, nnx.Rngs(key))

    def weights(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(model(key), nnx.Param))

    return nnx.graphdef(nnx.eval_shape(lambda: model(jax.random.key(0)))), jax.jit(weights)


def stored_dtype(path: str, leaf: jax.Array) -> Any:
    """Matrices are trained as bf16; the norms' scales, a thousandth of the weights, stay f32."""
    del path
    return jnp.bfloat16 if leaf.ndim > 1 else jnp.float32


def loss_function(graphdef: Any, compute: str) -> Callable[[Any, jax.Array], jax.Array]:
    """(f32 or 16-bit weights, tokens) -> loss, with the matrices in the dtype `compute`."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        cast = jax.tree.map(lambda p: p.astype(compute) if p.ndim > 1 else p, params)
        return next_token_loss(graphdef, cast, tokens)

    return loss


def _optimizer(impl: str, settings: Settings) -> optax.GradientTransformation:
    pair, schedule = OPTIMIZERS[settings.optimizer], settings.schedule()
    clip = optax.clip_by_global_norm(CLIP)
    if impl == LOWMEM:
        return lowmem.chain(clip, pair.lowmem(schedule, **pair.arguments))
    return optax.chain(clip, pair.plain(schedule, **pair.arguments))


def check_implementation(name: str) -> None:
    """Ends the program where lowmem.step does not know or cannot use an implementation."""
    tx, weights = lowmem.flash_adamw(1e-3), {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    step = optimizer_step(LOWMEM, name)

    def one_step(weights: Any) -> Any:
        params, state = lowmem.init(tx, weights)
        return step(tx, params, state, params)

    try:
        jax.eval_shape(one_step, weights)
    except ValueError as error:
        raise SystemExit(f"--implementation {name}: {error}") from None


def optimizer_step(impl: str, implementation: str) -> Callable[..., tuple[Any, Any]]:
    """(tx, grads, state, params) -> (params, state): optax's own way, or lowmem.step."""
    if impl == F32:
        return _plain_step
    chosen = None if implementation == "auto" else implementation
    return functools.partial(lowmem.step, implementation=chosen)


def _plain_step(tx: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def compile_program(impl: str, settings: Settings, vocab: int) -> Program:
    """Compiles one of the two ways to train; `start` gives it arrays, which its steps donate."""
    graphdef, make_weights = build_model(settings, vocab)
    loss, tx = loss_function(graphdef, settings.compute), _optimizer(impl, settings)
    take_step = optimizer_step(impl, settings.implementation)

    def start(seed: int) -> tuple[Any, Any]:
        weights = make_weights(jax.random.key(seed))
        if impl == LOWMEM:
            return lowmem.init(tx, weights, dtype=stored_dtype, seed=seed)
        return weights, tx.init(weights)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        params, state = take_step(tx, grads, state, params)
        return params, state, value

    params, state = jax.eval_shape(lambda: start(0))
    tokens = jax.ShapeDtypeStruct((settings.batch, settings.context + 1), np.int32)
    begin = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens).compile()
    compile_s = time.perf_counter() - begin
    sizes, parameters = bytes_by_slot(tx, params), sum(p.size for p in jax.tree.leaves(params))
    peak_bytes = planned_bytes(compiled)
    return Program(start, compiled, jax.jit(loss), compile_s, peak_bytes, parameters, sizes)


def planned_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the peak bytes of a step, activations included, as planned by the compiler."""
    plan = compiled.memory_analysis()
    results = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return plan.argument_size_in_bytes + plan.temp_size_in_bytes + results


def bytes_by_slot(tx: optax.GradientTransformation, params: Any) -> dict[str, int]:
    """Bytes of weights, gradients and state while training."""
    report = lowmem.memory.report(tx, params)
    # Gradients have the dtypes of the weights they belong to.
    slots = {"weights": report.params_bytes, "gradients": report.params_bytes} | report.by_slot
    counters = sum(slots.pop(name) for name, size in list(slots.items()) if size <= 8)
    return slots | {"counters": counters, "total": report.total_bytes + report.params_bytes}


def train(
    runs: dict[str, Run], settings: Settings, tokens: data.Tokens, seed: int
) -> Iterator[tuple[int, bool]]:
    """Trains the runs on the same batches in the same order.

    Yields the number of steps done, and whether the runs were validated after them.
    """
    held_out = data.held_out_batches(
        tokens.held_out, settings.batch, settings.context, settings.held_out_batches
    )
    every = max(1, round(settings.steps / EVALUATIONS))
    for run in runs.values():
        run.validate(0, held_out)
    done = 0
    while done < settings.steps:
        until = min(done + GROUP, settings.steps, done - done % every + every)
        batches = [
            data.sample_batch(tokens.train, settings.batch, settings.context, seed, step)
            for step in range(done, until)
        ]
        for run in runs.values():
            run.advance(batches)
        done = until
        is_validated = done == settings.steps or done % every == 0
        if is_validated:
            for run in runs.values():
                run.validate(done, held_out)
        yield done, is_validated
