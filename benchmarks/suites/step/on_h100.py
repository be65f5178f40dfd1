"""Steps compiled for an H100 that is not there: instructions, launches and bytes that they move.

python -m benchmarks.run instructions --record                     # Triton
JAX_PLATFORMS=cpu python -m benchmarks.run launches --record       # jax[cuda12]

Nothing is run or timed. Instructions are per element of the generated kernel of one leaf of 4096 x
4096: machine code up to its last EXIT, as `cuobjdump` lists it, over the elements of a thread. What
a purpose takes is what goes where it is left out. `benchmarks.absent_gpu` says what launches are
counted; a step may take the place of weights and state.
"""

from __future__ import annotations

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
from jax.sharding import Mesh

import optax_lowmem as lowmem
from benchmarks import absent_gpu, records
from benchmarks.peers import cases, in_jax
from benchmarks.records import Rows
from optax_lowmem import Storage
from optax_lowmem._src.core import compiled, platform

SHAPE, WARP = (4096, 4096), 32
NEAREST: dict[str, Any] = {"rounding": "nearest"}
UNSPLIT: dict[str, Any] = NEAREST | {"master_weight_bits": None}
# name -> the step: from the first to `LEAST` each has one thing less than the one before
LEAST = "v in f32"
STEPS: dict[str, optax.GradientTransformation] = {
    "flash_adamw": lowmem.flash_adamw(1e-3, weight_decay=0.1),
    "codes to nearest": lowmem.flash_adamw(1e-3, weight_decay=0.1, storage=Storage(**NEAREST)),
    "weights to nearest": lowmem.flash_adamw(
        1e-3, weight_decay=0.1, storage=Storage(**NEAREST, master_rounding="nearest")
    ),
    "no corrections": lowmem.flash_adamw(1e-3, weight_decay=0.1, storage=Storage(**UNSPLIT)),
    "v in f32": lowmem.flash_adamw(1e-3, weight_decay=0.1, storage=Storage(nu=None, **UNSPLIT)),
    "flash_lion": lowmem.flash_lion(1e-3, weight_decay=0.1),
    "flash_sgd": lowmem.flash_sgd(1e-3, momentum=0.9),
    "coat_adamw": lowmem.coat_adamw(1e-3, weight_decay=0.1),
    "4-bit moments": lowmem.flash_adamw(1e-3, weight_decay=0.1, storage=Storage.four_bit()),
}
LEAF_SET = "llama-3.2-1b"  # of launches
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
        listing = subprocess.run(
            [program, "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    names = [found[1] for found in map(_LINE.search, listing.splitlines()) if found]
    last = max(i for i, name in enumerate(names) if name == "EXIT")  # then padding
    return collections.Counter(name for name in names[: last + 1] if name != "NOP")


def of_step(tx: optax.GradientTransformation, kernels: list[Any]) -> tuple[float, Any]:
    """Instructions per element of the one kernel of a step, and how often each stands in it."""
    weights = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    params, state = jax.eval_shape(lambda w: lowmem.init(tx, w, jnp.bfloat16), weights)

    def step(grads: Any, state: Any, params: Any) -> Any:
        return lowmem.step(tx, grads, state, params, implementation="triton")

    jax.clear_caches()
    del kernels[:]
    jax.eval_shape(step, params, state, params)
    (kernel,) = kernels
    found = listed(kernel.asm["cubin"])
    tile = max(int(a) * int(b) for a, b in _TILE.findall(kernel.asm["ttir"]))
    return found.total() / (tile / (WARP * kernel.metadata.num_warps)), found


@records.suite()
def instructions(args: argparse.Namespace) -> Iterator[Rows]:
    del args
    from tools import triton_compiler

    patches = (
        mock.patch.object(platform, "no_device_reason", lambda: None),
        mock.patch.object(platform, "has_pallas_triton", lambda: False),
        mock.patch.object(platform, "has_jax_triton", lambda: True),
        mock.patch.object(jax, "device_count", lambda: 1),
        mock.patch.object(compiled, "is_eager", lambda leaves: False),
    )
    with tempfile.TemporaryDirectory() as cache, contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        kernels = stack.enter_context(triton_compiler.compiling(Path(cache)))
        for name, tx in STEPS.items():
            value, names = of_step(tx, kernels)
            yield [records.record(
                "instructions", "step", name, "per_element", value, "",
                device=records.H100_NEVER_RUN, names=dict(names.most_common(12)),
            )]  # fmt: skip
    jax.clear_caches()


def count(on: Mesh, leaf_set: str, optimizer: str) -> tuple[int, int]:
    """Launches of a step, and the bytes that they move, on the device of a mesh."""
    made = in_jax.make("lowmem.step", leaf_set, optimizer)
    like = cases.LEAF_SETS[leaf_set]()
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, made.dtype), like)
    state = jax.eval_shape(made.init, params)
    text = absent_gpu.program(on, made.step, params, state, params, donated=(1, 2))
    found = [(times, times * size) for times, _, size in absent_gpu.kernels(text)]
    launches, moved = map(sum, zip(*found, strict=True))
    return launches, moved


@records.suite(
    leaf_set={"default": LEAF_SET, "choices": tuple(cases.LEAF_SETS)},
    optimizer={"nargs": "+", "default": OPTIMIZERS, "choices": tuple(cases.OPTIMIZERS)},
)
def launches(args: argparse.Namespace) -> Iterator[Rows]:
    on = absent_gpu.mesh()
    size, device = cases.parameters(args.leaf_set), records.H100_NEVER_RUN
    for optimizer in args.optimizer:
        times, moved = count(on, args.leaf_set, optimizer)
        values = {"launches": (times, ""), "moved_bytes_per_param": (moved / size, "B")}
        case = f"{args.leaf_set}/{optimizer}"
        yield records.records_of("launches", case, "lowmem.step", values, device=device)
