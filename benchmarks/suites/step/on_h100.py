"""Steps compiled for an H100 that is not there: instructions, launches and bytes that they move.

python -m benchmarks.run instructions --record                     # Triton
JAX_PLATFORMS=cpu python -m benchmarks.run launches --record       # jax[cuda12]

Nothing is run or timed. Instructions are per element of the generated kernel of one leaf of 4096 x
4096: machine code up to its last EXIT, as `cuobjdump` lists it, over the elements of a thread. What
a purpose takes is what goes where it is left out. `benchmarks.absent_gpu` says what launches are
counted; a step may take the place of weights and state.
"""

import argparse
import collections
import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks import absent_gpu, records
from benchmarks.peers import cases, in_jax
from benchmarks.records import Rows
from optax_lowmem._src.core import compiled, platform

SHAPE, WARP = (4096, 4096), 32


def _stored(**storage: Any) -> optax.GradientTransformation:
    return lowmem.flash_adamw(1e-3, weight_decay=0.1, storage=lowmem.Storage(**storage))


_NEAREST: dict[str, Any] = {"rounding": "nearest"}
_UNSPLIT: dict[str, Any] = _NEAREST | {"master_weight_bits": None}
# name -> the step: from the first to `LEAST` each has one thing less than the one before
LEAST = "v in f32"
STEPS: dict[str, optax.GradientTransformation] = {
    "flash_adamw": _stored(),
    "codes to nearest": _stored(**_NEAREST),
    "weights to nearest": _stored(**_NEAREST, master_rounding="nearest"),
    "no corrections": _stored(**_UNSPLIT),
    "v in f32": _stored(nu=None, **_UNSPLIT),
    "flash_lion": lowmem.flash_lion(1e-3, weight_decay=0.1),
    "flash_sgd": lowmem.flash_sgd(1e-3, momentum=0.9),
    "coat_adamw": lowmem.coat_adamw(1e-3, weight_decay=0.1),
    "4-bit moments": lowmem.flash_adamw(1e-3, weight_decay=0.1, storage=lowmem.Storage.four_bit()),
}
OPTIMIZERS = ("adamw", "lion", "sgd", "coat_adamw", "flash_adam_mini", "flash_factored_adamw")
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]*)")
_TILE = re.compile(r"tensor<(\d+)x(\d+)xf32>")


def listed(cubin: bytes) -> collections.Counter[str]:
    """Counts of each instruction in the machine code of a kernel."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.check_output([program, "-sass", file.name], text=True)
    names = [found[1] for found in map(_LINE.search, listing.splitlines()) if found]
    last = max(i for i, name in enumerate(names) if name == "EXIT")  # then padding
    return collections.Counter(name for name in names[: last + 1] if name != "NOP")


def of_step(tx: optax.GradientTransformation, kernels: list[Any]) -> tuple[float, Any]:
    """Instructions per element of the one kernel of a step, and how often each stands in it."""
    weights = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    params, state = jax.eval_shape(lambda w: lowmem.init(tx, w, jnp.bfloat16), weights)
    jax.clear_caches()
    del kernels[:]
    jax.eval_shape(in_jax.step_of(tx, "triton"), params, state, params)
    (kernel,) = kernels
    found = listed(kernel.asm["cubin"])
    tile = max(int(a) * int(b) for a, b in _TILE.findall(kernel.asm["ttir"]))
    return found.total() / (tile / (WARP * kernel.metadata.num_warps)), found


@records.suite()
def instructions(args: argparse.Namespace) -> Iterator[Rows]:
    from tools import triton_compiler

    with tempfile.TemporaryDirectory() as cache, contextlib.ExitStack() as stack:
        for module, name, value in (
            (platform, "no_device_reason", lambda: None),
            (platform, "has_pallas_triton", lambda: False),
            (platform, "has_jax_triton", lambda: True),
            (jax, "device_count", lambda: 1),
            (compiled, "is_eager", lambda leaves: False),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        kernels = stack.enter_context(triton_compiler.compiling(Path(cache)))
        for name, tx in STEPS.items():
            value, names = of_step(tx, kernels)
            more = {"device": records.H100_NEVER_RUN, "names": dict(names.most_common(12))}
            yield [records.record("instructions", "step", name, "per_element", value, "", **more)]
    jax.clear_caches()


@records.suite(
    leaf_set={"default": "llama-3.2-1b", "choices": tuple(cases.LEAF_SETS)},
    optimizer={"nargs": "+", "default": OPTIMIZERS, "choices": tuple(cases.OPTIMIZERS)},
)
def launches(args: argparse.Namespace) -> Iterator[Rows]:
    on, like = absent_gpu.mesh(), cases.LEAF_SETS[args.leaf_set]()
    for optimizer in args.optimizer:
        made = in_jax.make("lowmem.step", args.leaf_set, optimizer)
        params = jax.tree.map(lambda x, t=made.dtype: jax.ShapeDtypeStruct(x.shape, t), like)
        state = jax.eval_shape(made.init, params)
        text = absent_gpu.program(on, made.step, params, state, params, donated=(1, 2))
        found = [(times, times * size) for times, _, size in absent_gpu.kernels(text)]
        times, moved = map(sum, zip(*found, strict=True))
        each = moved / cases.parameters(args.leaf_set)
        values = {"launches": (times, ""), "moved_bytes_per_param": (each, "B")}
        case, device = f"{args.leaf_set}/{optimizer}", records.H100_NEVER_RUN
        yield records.records_of("launches", case, "lowmem.step", values, device=device)
