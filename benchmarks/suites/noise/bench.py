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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import records
from benchmarks.suites.linear.bench import Timed, measure
from benchmarks.suites.noise import training as noise_training
from optax_lowmem._src.core import scope
from optax_lowmem._src.noise import kernels
from optax_lowmem._src.noise.kernels import NOISES

# rows x columns: Llama 3.2 1B has (2k, 0.5k) to (2k, 8k), Llama 3.1 405B (16k, 1k) to (16k, 16k)
SHAPES = [
    "2048x512", "2048x2048", "2048x8192", "4096x1024", "4096x4096", "4096x14336", "8192x1024",
    "8192x8192", "8192x28672", "16384x1024", "16384x4096", "16384x16384",
]  # fmt: skip
NORMAL, XLA = "jax-normal", "gaussws-xla"
FORWARD = ["gaussws", "box-muller", "diffq", NORMAL, XLA]
ALONE = ["gaussws", "gaussws-packed", "box-muller", "diffq", NORMAL]
BF16 = jnp.dtype(jnp.bfloat16)
BITS = 6.0


# ---- what is timed -------------------------------------------------------------------------------


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """bf16 N(0, 1) of JAX's own generator, from a uint32."""
    data = jnp.stack([key, key ^ jnp.uint32(0x9E3779B9)])
    return jax.random.normal(jax.random.wrap_key_data(data), shape, jnp.bfloat16)


def forward(name: str) -> Callable[..., jax.Array]:
    """(weights, factor 2^(1 - b_t) of each block, key) -> sampled weights in bf16."""
    to = kernels.format_of("bfloat16")

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


# ---- how -----------------------------------------------------------------------------------------


class Keyed(Timed):
    """`Timed` whose last argument, a key, is the turn's number: nothing moves out of the loop."""

    @staticmethod
    def _loop(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> Any:
        def body(i: jax.Array, found: Any) -> Any:
            (*own, _), _ = jax.lax.optimization_barrier((args, found))
            # as it is: an addition would be a launch more, of kernels alone
            return function(*own, jax.lax.bitcast_convert_type(i, jnp.uint32))

        shape = jax.eval_shape(function, *args)
        return jax.lax.fori_loop(0, calls, body, jnp.zeros(shape.shape, shape.dtype))


def rows_of(shape: str, repeats: int, only: list[str] | None) -> list[dict[str, Any]]:
    """Records of a shape."""
    size = tuple(map(int, shape.split("x")))
    elements = size[0] * size[1]
    guess = max(3e-6, 6 * elements / 2e12) * (300 if jax.default_backend() == "cpu" else 1)
    key = jnp.uint32(1)
    w = jax.jit(lambda: jax.random.normal(jax.random.key(0), size) * 0.02)()
    factor = jnp.full(kernels.block_shape(size), 2 ** (1 - BITS), jnp.float32)

    def keyed(one: tuple[str, str]) -> Keyed:
        kind, name = one
        if kind == "forward":
            return Keyed(forward(name), (w, factor, key), guess)
        return Keyed(alone(name, size), (key,), guess)

    wanted = [
        (kind, name)
        for kind, names in (("forward", FORWARD), ("noise", ALONE))
        for name in names
        if only is None or name in only
    ]
    with ThreadPoolExecutor() as pool:  # compiled side by side
        timed = dict(zip(wanted, pool.map(keyed, wanted), strict=True))
    found = []
    for (kind, name), times in measure(timed, repeats).items():
        rates = [elements / ms / 1e6 for ms in times]  # 10^9 a second
        metric = "gelem_per_s" if kind == "forward" else "noise_gelem_per_s"
        spread = {"min": min(rates), "max": max(rates), "repeats": repeats}
        value = statistics.median(rates)
        found.append(records.record("noise", shape, name, metric, value, "10^9/s", **spread))
        print(f"{shape:<14}{kind:<9}{name:<16}{value:9.1f} Gelem/s", flush=True)
    return found


def train_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of training steps."""
    found = []
    for optimizer in args.optimizers:
        runs = {
            name: noise_training.Run(args.preset, optimizer, name, args.batch, args.attention)
            for name in args.variants
        }
        with ThreadPoolExecutor() as pool:
            list(pool.map(noise_training.Run.compile, runs.values()))
        for run in runs.values():
            run.start()
        times = measure(runs, args.repeats)
        base = statistics.median(times[args.variants[0]])
        for name, run in runs.items():
            case, milliseconds = f"llama-{args.preset}/{optimizer}", statistics.median(times[name])
            # the turns are paired: a slow spell of the machine hits all variants
            ratios = [own / plain for own, plain in
                      zip(times[name], times[args.variants[0]], strict=True)]  # fmt: skip
            numbers = {
                "tokens_per_s": (run.tokens / milliseconds * 1e3, "tokens/s"),
                "overhead": (statistics.median(ratios) - 1, "of the time without noise"),
                "bytes_per_param": (run.bytes_per_param, "bytes"),
                "extra_bytes": (run.extra_bytes, "bytes a sampled parameter"),
                "peak_bytes": (run.peak_bytes, "bytes"),
            }
            found += [
                records.record("train", case, name, metric, value, unit, repeats=args.repeats,
                               batch=run.batch, sequence=run.sequence, attention=args.attention)
                for metric, (value, unit) in numbers.items()
            ]  # fmt: skip
            print(
                f"{case:<28}{name:<16}{numbers['tokens_per_s'][0]:11,.0f} tokens/s"
                f"{100 * (milliseconds / base - 1):8.2f} % ({100 * numbers['overhead'][0]:.2f} % "
                f"paired){run.extra_bytes:8.4f} extra bytes{run.peak_bytes / 2**30:8.2f} GiB",
                flush=True,
            )
        del runs
        jax.clear_caches()
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints; `--record` also stores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", choices=("noise", "train"), action="append", help="default: both")
    add("--shapes", nargs="+", default=SHAPES, metavar="ROWSxCOLUMNS")
    add("--impl", nargs="+", choices=sorted({*FORWARD, *ALONE}), metavar="NAME",
        help=f"of {', '.join(sorted({*FORWARD, *ALONE}))}; default: all")  # fmt: skip
    add("--preset", default="134m", help="of examples/train_llama.py (default: %(default)s)")
    add("--optimizers", nargs="+", choices=noise_training.OPTIMIZERS,
        default=["flash_adamw", "flash_adam_mini"], metavar="NAME",
        help=f"of {', '.join(noise_training.OPTIMIZERS)}")  # fmt: skip
    add("--variants", nargs="+", choices=noise_training.VARIANTS,
        default=list(noise_training.VARIANTS), metavar="NAME",
        help=f"the first is what others are compared with; of {', '.join(noise_training.VARIANTS)}")  # fmt: skip  # noqa: E501
    add("--batch", type=int, help="sequences in a batch; default: the preset's")
    add("--attention", choices=("xla", "cudnn"), default="xla")
    add("--repeats", type=int, default=5)
    records.add_option(parser)
    args = parser.parse_args(arguments)
    parts = args.part or ["noise", "train"]
    if "noise" in parts:
        for shape in args.shapes:
            rows = rows_of(shape, args.repeats, args.impl)
            records.keep(rows, args.record)
    if "train" in parts:
        rows = train_rows(args)
        records.keep(rows, args.record)
