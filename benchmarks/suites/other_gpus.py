"""Every GPU kernel compiled for GPUs that are not here: most registers, spills, shared memory.

JAX_PLATFORMS=cpu python -m benchmarks.run other_gpus --record

Generated Triton, which has the instructions of what Pallas lowers, compiled by Triton and its
ptxas for each compute capability. Nothing is run.
"""

import argparse
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from benchmarks import records
from benchmarks.records import Rows
from benchmarks.render import Rendered, Table
from benchmarks.suites import kernels
from optax_lowmem._src.kernels import platform

GPUS = {80: "A100", 86: "RTX 30, A10", 89: "RTX 40, L4", 90: "H100, H200", 100: "B200",
        120: "RTX 50"}  # fmt: skip
NEVER_RUN = "NVIDIA GPUs (compiled for, never run)"
SHAPE = (64, 512)
_USED = re.compile(
    r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S
)
_PTXAS = "ptxas-blackwell"  # the newer of the two that come with Triton


def usage(kernel: Any, folder: Path) -> tuple[int, int, int]:
    """Return a compiled kernel's registers, and bytes of spills and of shared memory."""
    import triton

    ptx = folder / "kernel.ptx"
    ptx.write_text(kernel.asm["ptx"])
    (arch,) = re.findall(r"\.target (sm_\w+)", kernel.asm["ptx"])
    program = Path(triton.__file__).parent / "backends/nvidia/bin" / _PTXAS
    command = [program, "-v", f"-arch={arch}", ptx, "-o", folder / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = _USED.search(done.stderr + done.stdout)
    assert found, done.stderr + done.stdout
    stores, loads, registers = map(int, found.groups())
    return registers, stores + loads, kernel.metadata.shared


def step(name: str) -> kernels.Made:
    """Return a step of an optimizer by generated Triton."""
    make = lowmem.OPTIMIZERS[name.split("/")[0]].make
    tx = make(1e-3, storage=lowmem.Storage(**kernels.STEPS[name]))
    params = {"w": jnp.ones(SHAPE, jnp.bfloat16)}

    def run(params: Any, state: Any, backend: str) -> Any:
        return lowmem.step(tx, params, state, params, implementation=backend)

    return run, (params, tx.init(params))


def cases() -> dict[str, Callable[[], kernels.Made]]:
    found = kernels.cases(*SHAPE)
    return found | {f"step/{name}": functools.partial(step, name) for name in kernels.STEPS}


def compiled(name: str, capability: int) -> list[tuple[int, int, int]]:
    """Return the usage of each kernel of a case."""
    from tools import triton_compiler

    run, given = cases()[name]()
    jax.clear_caches()  # of what was traced for another GPU
    with (
        tempfile.TemporaryDirectory() as folder,
        triton_compiler.compiling(Path(folder), capability) as made,
        mock.patch.object(platform, "no_gpu_reason", lambda: None),
        mock.patch.object(platform, "has_jax_triton", lambda: True),
        mock.patch.object(jax, "device_count", lambda: 1),
    ):
        jax.eval_shape(functools.partial(run, backend="triton"), *given)
        return [usage(kernel, Path(folder)) for kernel in made]


@records.suite(
    case={"nargs": "+", "metavar": "CASE", "help": "some of the kernels; default: all"},
    capability={"nargs": "+", "type": int, "choices": tuple(GPUS), "default": tuple(GPUS)},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    names = args.case or list(cases())
    for capability in args.capability:
        of = {name: tuple(map(max, zip(*compiled(name, capability), strict=True)))
              for name in names}  # fmt: skip
        registers, spills, shared = map(max, zip(*of.values(), strict=True))
        most = max(of, key=lambda name: of[name])
        more = {"device": NEVER_RUN, "spills": spills, "shared": shared, "most": most}
        where, values = (f"{len(of)} kernels", f"sm_{capability}"), {"registers": (registers, "")}
        yield records.records_of("other_gpus", *where, values, **more)


def table(rows: Rows) -> Table:
    """A line for each compute capability: the largest values of all kernels."""
    found = records.select(rows, bench="other_gpus")
    names = {f"sm_{capability}": gpu for capability, gpu in GPUS.items()}
    body = [[f"{row['impl']} ({names[row['impl']]})", row["case"].split()[0],
             f"{row['value']} (`{row['most']}`)", str(row["spills"]), f"{row['shared']:,}"]
            for row in found]  # fmt: skip
    head = ["compute capability", "kernels", "most registers per thread", "bytes of spills",
            "most bytes of shared memory"]  # fmt: skip
    return head, body, found


TABLES = {"other_gpus": Rendered(table, "other_gpus")}
