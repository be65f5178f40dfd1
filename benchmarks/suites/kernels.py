"""Each GPU kernel by Pallas and as generated Triton, side by side.

python -m benchmarks.run kernels --record
python -m benchmarks.run kernels --case group-encode/softsign-int8 fp8-norm
JAX_PLATFORMS=cpu python -m benchmarks.run kernels --tiny --backends interpret

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
from benchmarks.peers import device_loop, in_jax
from benchmarks.render import Rendered, Table, cell
from optax_lowmem import codecs
from optax_lowmem._src.codecs import group_codec, group_codec_triton
from optax_lowmem._src.core.block import Factors
from optax_lowmem._src.core.gpu_kernel import BACKENDS
from optax_lowmem._src.fp8_flow import kernels_triton as fp8
from optax_lowmem._src.noise import kernels as noise
from optax_lowmem._src.noise import kernels_triton as noise_triton
from optax_lowmem._src.noise.distributions import NOISES
from optax_lowmem._src.noise.formats import FORMATS
from optax_lowmem._src.quantized_matmul import E4M3, INT8
from optax_lowmem._src.quantized_matmul import triton as matmul
from optax_lowmem._src.update import block_means, block_means_triton
from optax_lowmem.blocks import Block

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
COPY_TBPS = 3.0  # of an H100, nearly: for how often a loop calls
LEAVES = 16
MOST = 1.03  # times Pallas' that generated Triton is to take
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


def of_codec(name: str, shape: tuple[int, int], decodes: bool) -> Made:
    codec, key, kernel = codecs.CODECS[name], jnp.uint32(1), group_codec_triton
    x = drawn(*shape, F32)
    x = x if codec.signed else jnp.abs(x)
    if not decodes:
        return (lambda x, key, **how: kernel.encode(codec, x, 32, key, **how)), (x, key)
    stored = jax.jit(lambda x: group_codec.encode_plain(codec, x, 32, key))(x)
    return (lambda *stored, **how: kernel.decode(codec, *stored, 32, shape[1], **how)), stored


def of_sample(shape: tuple[int, int]) -> Made:
    factor = jnp.full(noise.block_shape(shape), 2.0**-5, F32)
    own = (NOISES["gaussws"], FORMATS["bfloat16"], BF16)
    given = drawn(*shape, F32), factor, jnp.uint32(1)
    return (lambda w, *given, **how: noise_triton.sample(w, None, *given, *own, **how)), given


def of_noise(shape: tuple[int, int], name: str) -> Made:
    own = NOISES["gaussws"]
    kernel = {
        "sums": lambda g, key, **how: noise_triton.noise_sums(g, key, own, **how),
        "alone": lambda _, key, **how: noise_triton.noise_of(key, shape, own, BF16, **how),
        "packed": lambda _, key, **how: noise_triton.packed_noise(key, shape, **how),
    }[name]
    return kernel, (drawn(*shape) if name == "sums" else (), jnp.uint32(1))


def of_norm(shape: tuple[int, int], exact: bool) -> Made:
    kernel = functools.partial(fp8.store_normed, eps=1e-6, group_size=16, exact=exact)
    return kernel, (drawn(*shape), jnp.ones(shape[1], F32))


def of_gate(shape: tuple[int, int], activation: str) -> Made:
    kernel = functools.partial(fp8.store_gated, activation=activation, group_size=16, exact=True)
    return kernel, ((drawn(*shape), drawn(*shape, seed=1)),)


def of_codes(shape: tuple[int, int], name: str) -> Made:
    x = drawn(*shape).astype(jnp.float8_e4m3fn if name == "transpose" else BF16)
    kernel = {
        "rows": lambda x, _, **how: matmul.quantize_rows(x, INT8, **how),
        "transposed": lambda x, top, **how: matmul.quantize_transposed(x, top, INT8, **how),
        "both": lambda x, top, **how: fp8.quantize_both(x, top, E4M3, **how),
        "transpose": lambda x, _, **how: fp8.transpose(x, **how),
    }[name]
    return kernel, (x, jnp.float32(6))


def of_means(block: Block, shape: tuple[int, int]) -> Made:
    passes, top = block_means.passes(block, shape), jnp.float32(1)
    kernel = block_means_triton.means
    return (lambda *g, **how: kernel(passes, g, top, **how)), tuple(
        drawn(*shape, seed=i) for i in range(8)
    )


def cases(rows: int, columns: int) -> dict[str, Callable[[], Made]]:
    """Every kernel of one array, at a size."""
    shape, made = (rows, columns), functools.partial
    coded = ("softsign-int8", "sqrt-uint8", "linear-int4", "expanded-e4m3-int8")
    return {
        **{f"group-encode/{name}": made(of_codec, name, shape, False) for name in coded},
        **{f"group-decode/{name}": made(of_codec, name, shape, True) for name in coded},
        "noise-sample": made(of_sample, shape),
        **{f"noise-{name}": made(of_noise, shape, name) for name in ("sums", "alone", "packed")},
        "fp8-norm": made(of_norm, shape, True),
        "fp8-norm/restored": made(of_norm, shape, False),
        **{f"fp8-gate/{name}": made(of_gate, shape, name) for name in ("silu", "gelu")},
        **{
            f"codes-{name}": made(of_codes, shape, name)
            for name in ("rows", "transposed", "both", "transpose")
        },
        "block-means": made(of_means, Block((0,)), shape),
        "block-means/rows-and-columns": made(of_means, Factors((0, 1)), shape),
    }


def stepped(name: str, rows: int, columns: int, backend: str) -> device_loop.Runner:
    """Steps of an optimizer in place, on the device."""
    make = lowmem.OPTIMIZERS[name.split("/")[0]].make
    tx = make(1e-3, storage=lowmem.Storage(**STEPS[name]))

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return lowmem.step(tx, grads, state, params, implementation=backend)

    shapes = {f"w{i}": jax.ShapeDtypeStruct((rows, columns), F32) for i in range(LEAVES)}
    made = in_jax.Implementation(tx.init, step, BF16, "")

    def calls(moved: int) -> int:
        return max(3, min(400, round(timing.CALL_SECONDS * COPY_TBPS * 1e12 / moved)))

    runner = device_loop.Runner(made, shapes, calls)
    runner.start()
    return runner


def bytes_of(*trees: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trees))


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
    names = [*found, *(f"step/{name}" for name in STEPS)]
    if unknown := sorted({*(args.case or ())} - {*names}):
        raise SystemExit(f"--case {' '.join(unknown)}: no such kernel; of {', '.join(names)}")
    for name, made in found.items():
        if args.case and name not in args.case:
            continue
        kernel, given = made()
        own = {backend: functools.partial(kernel, backend=backend) for backend in args.backends}
        moved = bytes_of(given, jax.eval_shape(own[args.backends[0]], *given))
        guess = moved / COPY_TBPS / 1e12 * (1e4 if args.tiny else 1)
        timed = {name: timing.Timed(jax.jit(one), given, guess) for name, one in own.items()}
        yield measured(f"{name}/{rows}x{columns}", timed, moved, args.repeats)
    for name in STEPS:
        if "interpret" in args.backends or (args.case and f"step/{name}" not in args.case):
            continue
        steps = {backend: stepped(name, rows, columns // 2, backend) for backend in args.backends}
        moved = next(iter(steps.values())).found["moved_bytes"]
        yield measured(f"step/{name}/{LEAVES}x{rows}x{columns // 2}", steps, moved, args.repeats)


def table(rows: records.Rows) -> Table:
    """Times of each kernel on each GPU, and how the backends compare."""
    found = records.select(rows, bench="kernels")
    gpus = {
        gpu: records.grouped(own, "case", "impl", "metric")
        for gpu, own in records.by_gpu(found).items()
    }
    body = []
    for name in sorted({row["case"] for row in found}):
        cells = [one for own in gpus.values() for one in _compared(own.get(name, {}))]
        if any(cells):
            body.append([f"`{name}`", *cells])
    head = ["kernel, on what"]
    for gpu in gpus:
        head += [f"{gpu}: Pallas, ms", "generated Triton, ms", f"relative, ≤ {MOST}",
                 "TB/s of the faster"]  # fmt: skip
    return head, body, found


def _compared(of: dict[str, dict[str, Any]]) -> list[str]:
    """Return the times of both backends, their ratio and the better rate."""
    if not set(BACKENDS) <= of.keys():
        return [""] * 4
    times = [of[backend]["device_ms"] for backend in BACKENDS]
    ratio = times[1]["value"] / times[0]["value"]
    rate = max(of[backend]["tbps"]["value"] for backend in BACKENDS)
    verdict = "yes" if ratio <= MOST else "**no**"
    return [*(cell(row, "{:.3f}") for row in times), f"{ratio:.3f}, {verdict}", f"{rate:.2f}"]


TABLES = {"gpu_kernels": Rendered(table, "kernels")}
