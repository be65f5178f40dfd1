"""Compiles a training step and runs it."""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt import data
from _gpt.train import F32, LOWMEM, optimizer_step, planned_bytes
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem import layers, release

from . import choose
from . import mesh as meshes
from .config import HEADS, LINEARS, PLAIN, STATE, WEIGHTS, Settings
from .model import LAYERS, Llama
from .optimizer import make_optimizer, weights_dtype

_TOKENS_AT_ONCE = 65_536  # whose inputs of all layers are in host memory
Batches = Callable[[int], np.ndarray]
# (parameters, state, tokens) -> (loss, parameters, state)
Step = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any, Any]]


@dataclass(frozen=True)
class Program:
    """Settings, optimizer and functions of a run; none of its arrays is on a device yet.

    `step` is jitted, or of several programs, which `step.compile` compiles.
    """

    settings: Settings  # with what `auto` has become
    tx: Any
    like: tuple[Any, Any]  # parameters and state, as shapes with their shardings
    start: Callable[[], tuple[Any, Any]]  # makes these on their devices
    # (parameters, ordinary state) -> those that the step takes
    moved: Callable[[Any, Any], tuple[Any, Any]]
    step: Step  # takes its arguments' place
    model: Llama
    tokens: jax.ShapeDtypeStruct  # a batch, with its sharding

    @functools.cached_property
    def compiled(self) -> Any:
        """The step; compiled before anything is allocated, it has room for trying kernels out."""
        if self.settings.offload:
            self.step.compile(*self.moved(self.like[0], None), self.tokens)
            return self.step
        return self.step.lower(*self.like, self.tokens).compile()

    @property
    def shardings(self) -> tuple[Any, Any]:
        """Of parameters and state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.like)

    @property
    def report(self) -> lowmem.memory.Report:
        """Bytes of weights and state, on all devices together."""
        return lowmem.memory.report(self.tx, self.like[0])

    @property
    def device_bytes(self) -> int:
        """Bytes of weights and state that one device holds."""
        return meshes.bytes_per_device(self.like, self.shardings)


def make_program(settings: Settings) -> Program:
    """Traces the model and plans where its arrays lie; allocates nothing."""
    mesh, tx = meshes.make_mesh(settings), make_optimizer(settings)
    of_batch = NamedSharding(mesh, meshes.BATCH)
    here = SingleDeviceSharding(mesh.devices.flat[0])  # of offloaded runs

    def constrain(x: jax.Array) -> jax.Array:
        return x if settings.offload else jax.lax.with_sharding_constraint(x, of_batch)

    model = Llama(
        settings.shape,
        settings.compute,
        choose.attention(settings),
        constrain=constrain,
        dot_general=LINEARS[settings.linear],
        activations=choose.activations(settings),
        stacked=choose.stacked(settings),
        unroll=choose.unroll(settings),
        loss=functools.partial(
            layers.linear_cross_entropy,
            products=HEADS[settings.head],
            **meshes.of_loss(settings, mesh),
        ),
    )
    dtype, plain = functools.partial(weights_dtype, settings), settings.optimizer == PLAIN

    def start() -> tuple[Any, Any]:
        if settings.noise:  # lowmem.init makes that of the first step, and tx.init does not
            weights = model.weights(jax.random.key(settings.seed))
            return lowmem.init(tx, weights, lambda path, leaf: dtype(path), seed=settings.seed)
        # bf16 numbers are their own master weights: lowmem.init would split them into copies
        weights = model.weights(jax.random.key(settings.seed), dtype)
        state = tx.init(weights)
        return weights, state if plain else optax.tree.set(state, seed=jnp.uint32(settings.seed))

    params, state = jax.eval_shape(start)
    places = meshes.shardings(tx, params, settings, mesh)
    if settings.offload:
        places = jax.tree.map(lambda _: here, places)
    where = {} if plain else meshes.step_placement(places[1], mesh)

    @functools.cache
    def kept_bytes(remat: str) -> int:
        own = dataclasses.replace(model, remat=remat, constrain=lambda x: x)
        return own.kept_bytes(settings.rows, settings.sequence)

    # gradients take as much as weights, and what they are added to in bf16 as much again
    gradients_bytes = meshes.bytes_per_device(params, places[0]) * (1 + (settings.accumulate > 1))
    fixed_bytes = gradients_bytes + meshes.bytes_per_device((params, state), places)
    once = choose.may_quantize_once(settings)
    codes_bytes = _codes_bytes(model, params, places[0]) if once else 0
    settings = choose.resolved(settings, fixed_bytes, kept_bytes, codes_bytes)
    model = dataclasses.replace(model, remat=settings.remat)
    step = (released if settings.release else _ordinary)(model, tx, settings, **where)
    moved = functools.partial(offloaded, model, tx, settings)

    def start_offloaded() -> tuple[Any, Any]:
        if settings.offload == WEIGHTS:
            return moved(model.weights_in_turn(jax.random.key(settings.seed), dtype, here), None)
        return moved(jax.jit(lambda: start()[0], out_shardings=places[0])(), None)

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    if not settings.offload:
        everywhere = NamedSharding(mesh, P())
        step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(everywhere, *places))
    return Program(
        settings,
        tx,
        jax.tree.map(placed, (params, state), places),
        start_offloaded if settings.offload else jax.jit(start, out_shardings=places),
        moved,
        step,
        model,
        jax.ShapeDtypeStruct((settings.batch, settings.sequence + 1), jnp.int32, sharding=of_batch),
    )


def _codes_bytes(model: Llama, params: Any, of_params: Any) -> int:
    """Compute the bytes per device of the weights' codes, which lie as the weights do."""

    def size(tree: Any) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    share = meshes.bytes_per_device(params[LAYERS], of_params[LAYERS]) / size(params[LAYERS])
    return round(share * size(jax.eval_shape(model.quantized_weights, params)))


def _ordinary(model: Llama, tx: Any, settings: Settings, **where: Any) -> Step:
    """All gradients, then the optimizer's step."""
    # through `apply_updates` weights with noise would be rounded once more
    impl = F32 if settings.optimizer == PLAIN and not settings.noise else LOWMEM
    take_step = optimizer_step(impl, settings.implementation)
    prepare = model.quantized_weights if settings.quantize_once else None
    value_and_grad = lowmem.value_and_grad(model, settings.accumulate, prepare)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any, Any]:
        # the tokens, which no two steps have alike, make the rounding of each its own
        loss, grads = value_and_grad(params, tokens, tokens.sum())
        return loss, *take_step(tx, grads, state, params, **where)

    return step


def layered(model: Llama) -> release.Layered:
    """The stages of the model."""
    return release.Layered(model.first, {LAYERS: model.layer}, model.last)


def offloaded(
    model: Llama, tx: Any, settings: Settings, params: Any, state: Any
) -> tuple[Any, Any]:
    """Return parameters and state as the step takes them; a state of None is a new one."""
    if not settings.offload:
        return params, state
    kind = settings.offload
    if kind == WEIGHTS:
        params, kind = release.offload_weights(layered(model), params), STATE
    return params, release.offload(tx, layered(model), params, state, memory_kind=kind)


def released(model: Llama, tx: Any, settings: Settings, **where: Any) -> Step:
    """Each layer's gradient, then its step, before the gradient of the layer below is taken."""
    chosen = None if settings.implementation == "auto" else settings.implementation
    if settings.offload:
        at_once = max(1, _TOKENS_AT_ONCE // (settings.rows * settings.sequence))
        where = {"offload": True, "micro_batches": settings.accumulate, "at_once": at_once}
    # as in the same model with unrolled layers, which is how RMS_t of a tensor is meant
    return release.train_step(tx, layered(model), per_layer=True, implementation=chosen, **where)


def make_batches(settings: Settings, cache: Path) -> tuple[str, Batches]:
    """Return the text's name, and the batch of a step: a function of it and the seed alone."""
    shape = settings.shape
    size = (settings.batch, settings.sequence + 1)
    if settings.text == "random":

        def random(step: int) -> np.ndarray:
            drawn = np.random.default_rng((settings.seed, step)).random(size)
            return (shape.vocab**drawn).astype(np.int32) - 1  # Zipf's law: there is a loss to lower

        return "random tokens", random
    own = None if settings.text in data.TEXTS else Path(settings.text)
    corpus = data.load_corpus(own, settings.text)
    by_byte = shape.vocab == 256
    tokens = data.byte_tokens(corpus) if by_byte else data.bpe_tokens(corpus, shape.vocab, cache)
    if len(tokens.train) <= settings.sequence:
        raise SystemExit(f"{corpus.source}: too little text for --sequence {settings.sequence}")
    return corpus.source, lambda step: data.sample_batch(
        tokens.train, settings.batch, settings.sequence, settings.seed, step
    )


@dataclass
class Run:
    """A run under way: its arrays, a step ahead of the rest in `advance`, and what was measured."""

    params: Any
    state: Any
    step: int  # how many were taken, those before a resumption included
    losses: list[float]  # of the steps taken here
    seconds: list[float]

    @property
    def step_s(self) -> float:
        """Median time of a step.

        The first two pay for the warm-up, and the last one's has begun in that of the one before,
        where sending a step to the device takes as long as the step.
        """
        return float(np.median(self.seconds[2:-1] or self.seconds[1:-1] or self.seconds))


def advance(
    run: Run,
    program: Program,
    batches: Batches,
    until: int,
    pauses: Callable[[int], bool] = lambda step: False,
) -> Iterator[Run]:
    """Train until a step, yielding after each, while the device is at the next one already.

    `pauses`: step -> whether the device waits after it, with the run's arrays as that step left
    them; it does after the last step.
    """

    def placed(step: int) -> jax.Array:
        return jax.device_put(batches(step), program.tokens.sharding)

    given, under_way = run.step, deque[jax.Array]()
    begin, tokens = time.perf_counter(), placed(given)
    while given < until:
        loss, run.params, run.state = program.compiled(run.params, run.state, tokens)
        under_way.append(loss)
        given += 1
        if given < until:
            tokens = placed(given)  # while the device computes
        # a device that waits for each loss to be read idles while the next step is sent to it
        while len(under_way) > (0 if given == until or pauses(given) else 1):
            run.losses.append(float(under_way.popleft()))
            run.step += 1
            run.seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            yield run
            if not under_way:
                begin = time.perf_counter()


def measured(run: Run, settings: Settings, program: Program) -> dict[str, float]:
    """The numbers of a run; its loss is the mean over the last tenth of the run."""
    stats = jax.local_devices()[0].memory_stats() or {}  # a CPU has none
    rate = settings.batch * settings.sequence / run.step_s
    found = {
        "train_loss": float(np.mean(run.losses[-max(1, settings.steps // 10) :])),
        "tokens_per_s": rate,
        "step_ms": 1e3 * run.step_s,
        "fits": 1,
    }
    if not settings.offload:
        found["planned_bytes"] = found["peak_bytes"] = planned_bytes(program.compiled)
    if "peak_bytes_in_use" in stats:
        found["peak_bytes"] = stats["peak_bytes_in_use"]
    peak = choose.peak_flops(jax.local_devices()[0].device_kind)
    if peak:
        flops = rate * settings.shape.flops_per_token(settings.sequence)
        found["mfu"] = flops / (peak * settings.devices)
    return found
