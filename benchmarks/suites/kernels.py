"""Each GPU kernel by Pallas and as generated Triton, side by side.

The kernels of one array are looped in one jit; a step in place, of 16 leaves. Both backends take
turns, and the median of `--repeats` turns is kept. `device_ms` is the time of a call, `tbps` the
bytes that it reads and writes once, divided by that time.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from benchmarks import records, timing
from benchmarks.claims import Ratios
from benchmarks.peers import device_loop, in_jax
from benchmarks.render import Rendered, Table
from optax_lowmem import codecs
from optax_lowmem._src.arrays.block import Factors
from optax_lowmem._src.kernels import group_codec
from optax_lowmem._src.kernels.gpu_kernel import BACKENDS
from optax_lowmem._src.layers.fp8_flow import fp8_kernel as fp8
from optax_lowmem._src.layers.noise import kernels as noise
from optax_lowmem._src.layers.noise import noise_kernel
from optax_lowmem._src.layers.noise.distributions import NOISES
from optax_lowmem._src.layers.noise.formats import FORMATS
from optax_lowmem._src.layers.quantized_matmul import E4M3, INT8
from optax_lowmem._src.layers.quantized_matmul import quantize_kernel as matmul
from optax_lowmem._src.optim.blocks import block_means, block_means_kernel
from optax_lowmem.blocks import Block

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
COPY_TBPS = 3.0  # of an H100, nearly: for how often a loop calls
LEAVES = 16
MOST = 1.03  # times Pallas': the differences between runs
STEPS = {
    "flash_adamw": {},
    "flash_adamw/linear4": {"mu": codecs.linear4(), "nu": codecs.linear4(signed=False)},
    "flash_lion": {},
    "flash_adam_mini": {},
    "coat_adamw": {},
}

Made = tuple[Callable[..., Any], tuple[Any, ...]]  # a kernel, which takes a `backend`; arrays


def drawn(rows: int, columns: int, dtype: jnp.dtype = BF16, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, columns), dtype)


def of_codec(shape: tuple[int, int], name: str) -> Made:
    codec, key = codecs.CODECS[name], jnp.uint32(1)
    x = drawn(*shape, F32)
    x = x if codec.signed else jnp.abs(x)
    encode = group_codec.encode_by_kernel
    return (lambda x, key, **how: encode(codec, x, 32, key, **how)), (x, key)


def of_noise(shape: tuple[int, int], name: str) -> Made:
    own, key = NOISES["gaussws"], jnp.uint32(1)
    if name == "sample":
        how = (own, FORMATS["bfloat16"], BF16)
        given = drawn(*shape, F32), jnp.full(noise.block_shape(shape), 2.0**-5, F32), key
        return (lambda w, *more, **to: noise_kernel.sample(w, None, *more, *how, **to)), given
    kernel = {
        "sums": lambda g, key, **how: noise_kernel.noise_sums(g, key, own, **how),
        "alone": lambda _, key, **how: noise_kernel.noise_of(key, shape, own, BF16, **how),
    }[name]
    return kernel, (drawn(*shape) if name == "sums" else (), key)


def of_flow(shape: tuple[int, int], name: str) -> Made:
    x = drawn(*shape)
    if name in ("silu", "gelu"):
        how = {"activation": name, "group_size": 16, "exact": True}
        return functools.partial(fp8.store_gated, **how), ((x, drawn(*shape, seed=1)),)
    kernel = functools.partial(fp8.store_normed, eps=1e-6, group_size=16, exact=name == "norm")
    return kernel, (x, jnp.ones(shape[1], F32))


def of_codes(shape: tuple[int, int], name: str) -> Made:
    x = drawn(*shape).astype(jnp.float8_e4m3fn if name == "transpose" else BF16)
    kernel = {
        "rows": lambda x, _, **how: matmul.quantize_rows(x, INT8, **how),
        "transposed": lambda x, top, **how: matmul.quantize_transposed(x, top, INT8, **how),
        "both": lambda x, top, **how: fp8.quantize_both(x, top, E4M3, **how),
        "transpose": lambda x, _, **how: fp8.transpose(x, **how),
    }[name]
    return kernel, (x, jnp.float32(6))


def of_means(shape: tuple[int, int], block: Block) -> Made:
    passes, top = block_means.passes(block, shape), jnp.float32(1)
    kernel = block_means_kernel.means
    given = tuple(drawn(*shape, seed=i) for i in range(8))
    return (lambda *g, **how: kernel(passes, g, top, **how)), given


def cases(rows: int, columns: int) -> dict[str, Callable[[], Made]]:
    found: dict[str, tuple[Callable[..., Made], Any]] = {
        **{f"noise-{name}": (of_noise, name) for name in ("sample", "sums", "alone")},
        **{f"fp8-{name}": (of_flow, name) for name in ("norm", "norm/restored")},
        **{f"fp8-gate/{name}": (of_flow, name) for name in ("silu", "gelu")},
        **{f"codes-{x}": (of_codes, x) for x in ("rows", "transposed", "both", "transpose")},
        "block-means": (of_means, Block((0,))),
        "block-means/rows-and-columns": (of_means, Factors((0, 1))),
    }
    for name in ("softsign-int8", "sqrt-uint8", "linear-int4", "expanded-e4m3-int8"):
        found[f"group-encode/{name}"] = of_codec, name
    return {name: functools.partial(make, (rows, columns), how)
            for name, (make, how) in found.items()}  # fmt: skip


def stepped(name: str, rows: int, columns: int, backend: str) -> device_loop.Runner:
    make = lowmem.OPTIMIZERS[name.split("/")[0]].make
    tx = make(1e-3, storage=lowmem.Storage(**STEPS[name]))
    shapes = {f"w{i}": jax.ShapeDtypeStruct((rows, columns), F32) for i in range(LEAVES)}
    made = in_jax.Implementation(tx.init, in_jax.step_of(tx, backend), BF16)

    def calls(moved: int) -> int:
        return max(3, min(400, round(timing.CALL_SECONDS * COPY_TBPS * 1e12 / moved)))

    runner = device_loop.Runner(made, shapes, calls)
    runner.start()
    return runner


def measured(case: str, timed: dict[str, Any], bytes_: int, repeats: int) -> records.Rows:
    found = []
    for backend, times in timing.in_turns(timed, repeats).items():
        value, spread = timing.middle(times)
        found.append(records.record("kernels", case, backend, "device_ms", *value, **spread))
        rate = bytes_ / value[0] / 1e9
        found.append(records.record("kernels", case, backend, "tbps", rate, "TB/s"))
    return found


@records.suite(
    case={"nargs": "+", "metavar": "CASE", "help": "some of the kernels; default: all"},
    backends={"nargs": "+", "choices": (*BACKENDS, "interpret"), "default": BACKENDS},
    tiny={"action": "store_true", "help": "small arrays, to try the benchmark itself"},
    repeats={"type": int, "default": 9},
)
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    rows, columns = (16, 64) if args.tiny else (8192, 4096)
    found = cases(rows, columns)
    for name in args.case or [*found, *(f"step/{name}" for name in STEPS)]:
        if name.startswith("step/"):
            size = rows, columns // 2
            own = {to: stepped(name.partition("/")[2], *size, to) for to in args.backends}
            moved = next(iter(own.values())).found["moved_bytes"]
            yield measured(f"{name}/{LEAVES}x{rows}x{columns // 2}", own, moved, args.repeats)
            continue
        kernel, given = found[name]()
        runs = {to: functools.partial(kernel, backend=to) for to in args.backends}
        results = jax.eval_shape(runs[args.backends[0]], *given)
        moved = device_loop.live_bytes((given, results))
        guess = moved / COPY_TBPS / 1e12 * (1e4 if args.tiny else 1)
        timed = {to: timing.Timed(jax.jit(run), given, guess) for to, run in runs.items()}
        yield measured(f"{name}/{rows}x{columns}", timed, moved, args.repeats)


def table(rows: records.Rows) -> Table:
    """Generated Triton's time over Pallas', over the kernels that a GPU has run by both."""
    found, body = records.select(rows, bench="kernels", metric="device_ms"), []
    for gpu, own in records.by_gpu(found).items():
        ratios = Ratios(records.grouped(own, "case", "impl"), *reversed(BACKENDS))
        most = f"x {ratios.most:.2f}"
        close = sum(ratio <= MOST for ratio in ratios.each)
        body.append([gpu, str(ratios.count), f"x {ratios.median:.2f}", most, str(close)])
    head = ["GPU", "kernels", "generated Triton's time over Pallas', median", "largest",
            f"at most x {MOST}"]  # fmt: skip
    return head, body, found


TABLES = {"gpu_kernels": Rendered(table, "kernels")}
