"""Noise on weights: how fast it is made and added (GaussWS' Figure 5), and what it costs a Llama.

`noise`: R alone, and equation 1's forward pass of f32 weights, in elements a second. `train`:
tokens a second and bytes of a training step with noise on no matrix, [od] and [all]. Programs are
looped in one jit, median of `--repeats` calls; implementations take turns.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from _gpt.train import planned_bytes
from _llama.config import PRESETS as LLAMAS

from benchmarks import records, timing
from benchmarks.peers.device_loop import live_bytes
from benchmarks.suites.gaussws.training import BASE, NOISES, Experiment, bitwidths
from benchmarks.timing import Keyed
from benchmarks.training import Program, Run, Text
from optax_lowmem._src.arrays import trees
from optax_lowmem._src.kernels import step_arguments
from optax_lowmem._src.layers.noise import distributions, formats, kernels

# rows x columns: Llama 3.2 1B has (2k, 0.5k) to (2k, 8k), Llama 3.1 405B (16k, 1k) to (16k, 16k)
SHAPES = [
    "2048x2048", "2048x8192", "4096x4096", "4096x14336", "8192x8192", "16384x4096", "16384x16384",
]  # fmt: skip
NORMAL, XLA = "jax-normal", "gaussws-xla"
FORWARD = ["gaussws", "box-muller", "diffq", NORMAL, XLA]
ALONE = ["gaussws", "box-muller", "diffq", NORMAL]
NAMES = sorted({*FORWARD, *ALONE})
OPTIMIZERS = ["flash_adamw", "flash_adam_mini"]
STEPS = 10  # in a call
BF16 = jnp.dtype(jnp.bfloat16)
BITS = 6.0


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """bf16 N(0, 1) of JAX's own generator, from a uint32."""
    data = jnp.stack([key, key ^ jnp.uint32(0x9E3779B9)])
    return jax.random.normal(jax.random.wrap_key_data(data), shape, jnp.bfloat16)


def forward(name: str) -> Callable[..., jax.Array]:
    """(weights, factor 2^(1 - b_t) of each block, key) -> sampled weights in bf16."""
    to = formats.format_of("bfloat16")

    def in_one(w: jax.Array, factor: jax.Array, key: jax.Array) -> jax.Array:
        noise = distributions.NOISES["gaussws" if name == XLA else name]
        with step_arguments.stepping(implementation="xla" if name == XLA else None):
            return kernels.sample(w, None, factor, key, noise, to, BF16)[0]

    def of_normal(w: jax.Array, factor: jax.Array, key: jax.Array) -> jax.Array:
        r = jnp.round(normal(key, w.shape).astype(jnp.float32) * 0.5)
        return kernels.cast(kernels.perturb(w, kernels.absmax(w) * factor, r), to, BF16)

    return of_normal if name == NORMAL else in_one


def alone(name: str, shape: tuple[int, ...]) -> Callable[..., jax.Array]:
    """key -> R in bf16, or a normal that is not yet rounded."""
    if name == NORMAL:
        return functools.partial(normal, shape=shape)
    noise = distributions.NOISES[name]
    return functools.partial(kernels.noise_of, shape=shape, noise=noise, dtype=BF16)


def rows_of(shape: str, repeats: int, only: list[str] | None) -> records.Rows:
    size = tuple(map(int, shape.split("x")))
    elements = size[0] * size[1]
    guess = max(3e-6, 6 * elements / 2e12) * (300 if jax.default_backend() == "cpu" else 1)
    key = jnp.uint32(1)
    w = jax.jit(lambda: jax.random.normal(jax.random.key(0), size) * 0.02)()
    factor = jnp.full(kernels.block_shape(size), 2 ** (1 - BITS), jnp.float32)
    wanted = {("gelem_per_s", name): (forward(name), (w, factor, key)) for name in FORWARD}
    wanted |= {("noise_gelem_per_s", name): (alone(name, size), (key,)) for name in ALONE}
    wanted = {one: how for one, how in wanted.items() if only is None or one[1] in only}
    with ThreadPoolExecutor() as pool:  # compiled side by side
        jobs = [pool.submit(Keyed, *how, guess) for how in wanted.values()]
        timed = dict(zip(wanted, (job.result() for job in jobs), strict=True))
    found = []
    for (metric, name), times in timing.in_turns(timed, repeats).items():
        value, spread = timing.middle([elements / ms / 1e6 for ms in times], "10^9/s")
        found.append(records.record("noise", shape, name, metric, *value, **spread))
    return found


class Steps:
    """Training steps in place, some in a call: `time` is of one of them."""

    def __init__(self, program: Program, run: Run, tokens: jax.Array, starts: jax.Array):
        self.compiled, self.every, self.given = program.steps.compile(), run.every, (tokens, starts)
        self.peak_bytes = planned_bytes(self.compiled)
        self.carry = program.start()
        self.time()

    def time(self) -> float:
        begun = time.perf_counter()
        *self.carry, _ = jax.block_until_ready(self.compiled(*self.carry, *self.given))
        return (time.perf_counter() - begun) / self.every * 1e3


def train_rows(args: argparse.Namespace, optimizer: str) -> records.Rows:
    own = LLAMAS[args.preset]
    batch, length = args.batch or own.batch, own.sequence
    run = Run(args.preset, own.shape, length, batch, STEPS, STEPS, 1e-4, "random", 1, "bfloat16",
              args.attention)  # fmt: skip
    tokens = jax.random.randint(jax.random.key(1), (2**16,), 0, own.shape.vocab, jnp.int32)
    text = Text(tokens, tokens[: batch * (length + 1)].reshape(1, batch, -1), own.shape.vocab, 1, 1)
    experiment = Experiment(run, text, 0, optimizer=optimizer)
    with ThreadPoolExecutor() as pool:
        programs = [experiment.lower(name) for name in NOISES]
        jobs = [pool.submit(Steps, one, run, tokens, experiment.offsets[0]) for one in programs]
        steps = dict(zip(NOISES, (job.result() for job in jobs), strict=True))
    times = timing.in_turns(steps, args.repeats)
    found, base = [], next(iter(times.values()))
    plain = live_bytes(jax.eval_shape(experiment.lower(BASE).start))
    for name, one in steps.items():
        # the turns are paired: a slow spell of the machine hits all variants
        ratios = [own / other for own, other in zip(times[name], base, strict=True)]
        rate = run.tokens / statistics.median(times[name]) * 1e3
        bits, leaves = bitwidths(one.carry[1]), trees.named_leaves(one.carry[0])
        noisy = sum(x.size for path, x in leaves if path in bits)
        extra = (live_bytes(one.carry) - plain) / max(1, noisy)
        values = {
            "tokens_per_s": (rate, "tokens/s"),
            "overhead": (statistics.median(ratios) - 1, "of the time without noise"),
            "extra_bytes": (extra, "bytes per sampled parameter"),
            "peak_bytes": (one.peak_bytes, "bytes"),
        }
        more = {"batch": batch, "sequence": length, "attention": args.attention}
        case = f"llama-{args.preset}/{optimizer}"
        found += records.records_of("train", case, name, values, repeats=args.repeats, **more)
    return found


@records.suite(
    part={"nargs": "+", "choices": ("noise", "train"), "default": ["noise", "train"]},
    shapes={"nargs": "+", "default": SHAPES, "metavar": "ROWSxCOLUMNS"},
    impl={"nargs": "+", "choices": NAMES, "metavar": "NAME",
          "help": f"of {', '.join(NAMES)}; default: all"},
    preset={"default": "134m", "help": "of examples/train_llama.py (default: %(default)s)"},
    optimizers={"nargs": "+", "choices": OPTIMIZERS, "default": OPTIMIZERS},
    batch={"type": int, "help": "sequences in a batch; default: the preset's"},
    attention={"choices": ("xla", "cudnn"), "default": "xla"},
    repeats={"type": int, "default": 5},
)  # fmt: skip
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    for shape in args.shapes if "noise" in args.part else ():
        yield rows_of(shape, args.repeats, args.impl)
    for optimizer in args.optimizers if "train" in args.part else ():
        yield train_rows(args, optimizer)
        jax.clear_caches()
