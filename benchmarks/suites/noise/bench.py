"""Noise on weights: how fast it is made and added (GaussWS' Figure 5), and what it costs a Llama.

python -m benchmarks.run noise --record                   # Figure 5 and Table 1 anew
python -m benchmarks.run noise --part noise --shapes 16384x16384
python -m benchmarks.run noise --part train --optimizers flash_adamw

`noise`: R alone, and equation 1's forward pass of f32 weights, in elements a second. `train`:
tokens a second and bytes of a training step with noise on no matrix, [od] and [all]. Programs are
looped in one jit, median of `--repeats` calls; implementations take turns.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import records, timing
from benchmarks.suites.noise import training as noise_training
from benchmarks.timing import Keyed
from optax_lowmem._src.core import scope
from optax_lowmem._src.noise import formats, kernels
from optax_lowmem._src.noise.distributions import NOISES

# rows x columns: Llama 3.2 1B has (2k, 0.5k) to (2k, 8k), Llama 3.1 405B (16k, 1k) to (16k, 16k)
SHAPES = [
    "2048x512", "2048x2048", "2048x8192", "4096x1024", "4096x4096", "4096x14336", "8192x1024",
    "8192x8192", "8192x28672", "16384x1024", "16384x4096", "16384x16384",
]  # fmt: skip
NORMAL, XLA = "jax-normal", "gaussws-xla"
FORWARD = ["gaussws", "box-muller", "diffq", NORMAL, XLA]
ALONE = ["gaussws", "gaussws-packed", "box-muller", "diffq", NORMAL]
NAMES = sorted({*FORWARD, *ALONE})
VARIANTS = list(noise_training.VARIANTS)
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
        noise = NOISES["gaussws" if name == XLA else name]
        with scope.implementing("xla" if name == XLA else None):
            return kernels.sample(w, None, factor, key, noise, to, BF16)[0]

    def of_normal(w: jax.Array, factor: jax.Array, key: jax.Array) -> jax.Array:
        r = jnp.round(normal(key, w.shape).astype(jnp.float32) * 0.5)
        return kernels.cast(kernels.perturb(w, kernels.absmax(w) * factor, r), to, BF16)

    return of_normal if name == NORMAL else in_one


def alone(name: str, shape: tuple[int, ...]) -> Callable[..., jax.Array]:
    """key -> R in bf16, packed in 4 bits, or a normal that is not yet rounded."""
    if name == NORMAL:
        return functools.partial(normal, shape=shape)
    if name == "gaussws-packed":
        return functools.partial(kernels.packed_noise, shape=shape)
    return functools.partial(kernels.noise_of, shape=shape, noise=NOISES[name], dtype=BF16)


def rows_of(shape: str, repeats: int, only: list[str] | None) -> records.Rows:
    size = tuple(map(int, shape.split("x")))
    elements = size[0] * size[1]
    guess = max(3e-6, 6 * elements / 2e12) * (300 if jax.default_backend() == "cpu" else 1)
    key = jnp.uint32(1)
    w = jax.jit(lambda: jax.random.normal(jax.random.key(0), size) * 0.02)()
    factor = jnp.full(kernels.block_shape(size), 2 ** (1 - BITS), jnp.float32)
    wanted = {
        ("gelem_per_s", name): (forward, (name,), (w, factor, key)) for name in FORWARD
    } | {("noise_gelem_per_s", name): (alone, (name, size), (key,)) for name in ALONE}  # fmt: skip
    wanted = {one: how for one, how in wanted.items() if only is None or one[1] in only}

    def keyed(how: tuple[Any, ...]) -> Keyed:
        make, of, args = how
        return Keyed(make(*of), args, guess)

    with ThreadPoolExecutor() as pool:  # compiled side by side
        timed = dict(zip(wanted, pool.map(keyed, wanted.values()), strict=True))
    found = []
    for (metric, name), times in timing.in_turns(timed, repeats).items():
        value, spread = timing.middle([elements / ms / 1e6 for ms in times], "10^9/s")
        found.append(records.record("noise", shape, name, metric, *value, **spread))
    return found


def train_rows(args: argparse.Namespace, optimizer: str) -> records.Rows:
    runs = {
        name: noise_training.Run(args.preset, optimizer, name, args.batch, args.attention)
        for name in args.variants
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(noise_training.Run.compile, runs.values()))
    for run in runs.values():
        run.start()
    times = timing.in_turns(runs, args.repeats)
    found, base = [], times[args.variants[0]]
    for name, run in runs.items():
        # the turns are paired: a slow spell of the machine hits all variants
        ratios = [own / plain for own, plain in zip(times[name], base, strict=True)]
        rate = run.tokens / statistics.median(times[name]) * 1e3
        values = {
            "tokens_per_s": (rate, "tokens/s"),
            "overhead": (statistics.median(ratios) - 1, "of the time without noise"),
            "bytes_per_param": (run.bytes_per_param, "bytes"),
            "extra_bytes": (run.extra_bytes, "bytes a sampled parameter"),
            "peak_bytes": (run.peak_bytes, "bytes"),
        }
        more = {"batch": run.batch, "sequence": run.sequence, "attention": args.attention}
        case = f"llama-{args.preset}/{optimizer}"
        found += records.records_of("train", case, name, values, repeats=args.repeats, **more)
    return found


@records.suite(
    part={"nargs": "+", "choices": ("noise", "train"), "default": ["noise", "train"]},
    shapes={"nargs": "+", "default": SHAPES, "metavar": "ROWSxCOLUMNS"},
    impl={"nargs": "+", "choices": NAMES, "metavar": "NAME",
          "help": f"of {', '.join(NAMES)}; default: all"},
    preset={"default": "134m", "help": "of examples/train_llama.py (default: %(default)s)"},
    optimizers={"nargs": "+", "choices": noise_training.OPTIMIZERS, "metavar": "NAME",
                "default": ["flash_adamw", "flash_adam_mini"],
                "help": f"of {', '.join(noise_training.OPTIMIZERS)}"},
    variants={"nargs": "+", "choices": VARIANTS, "default": VARIANTS, "metavar": "NAME",
              "help": f"the first is what others are compared with; of {', '.join(VARIANTS)}"},
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
