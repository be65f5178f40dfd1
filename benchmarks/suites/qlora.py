"""Adapters of an 8B and of a 32B, with the frozen matrices in NF4 or in bf16, on one GPU.

Each run is a step of examples/finetune.py with random weights, in a process of its own. Where it is
to fit on a small card, another process allocates the rest of the GPU.

    python -m benchmarks.run qlora --record
    JAX_PLATFORMS=cpu python -m benchmarks.run qlora --here --only tiny    # the same code on a CPU
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import ROOT, records, small_gpu
from benchmarks.records import Rows
from benchmarks.render import GIB, Rendered, Table, cell
from benchmarks.suites.offload import BESIDE, device_gib
from benchmarks.suites.plan import MODELS, SEQUENCE, Case, make
from optax_lowmem.layers import nf4

_PARTS = 16
_STEPS = 3  # at least; the first is not timed
SHAPES = MODELS | {
    "tiny": MODELS["8B"] | {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256,
                            "num_attention_heads": 4, "head_dim": 144, "num_key_value_heads": 2,
                            "vocab_size": 512},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """A run; `free`: the GiB that JAX may use of the GPU, as on a small card; 0: all."""

    model: str
    mode: str
    rows: int
    free: float = 0
    sequence: int = SEQUENCE
    seconds: float = 12  # of the steps that are timed


RUNS = {
    "8b-8gb": Run("8B", "qlora", 1, 7.4),
    "8b-bf16": Run("8B", "lora", 16),
    "8b-nf4": Run("8B", "qlora", 16),
    "32b-24gb": Run("32B", "qlora", 1, 22.2),
    "tiny": Run("tiny", "qlora", 2, 0, 64, 1),
}
NAMES = {"lora": "LoRA, base in bf16", "qlora": "QLoRA, base in NF4"}


def random_weights(like: Any, key: jax.Array) -> Any:
    """Weights of these shapes, normally distributed, but for norms; no more than a part is in f32.

    A part is the matrix of one layer, or a sixteenth of a table's rows.
    """
    from _llama.model import is_in_4_bits, leaf_path

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, kind: tuple[tuple[int, ...], bool]) -> Any:
        shape, in_4_bits = kind
        stack = shape if len(shape) > 2 else (_PARTS, shape[0] // _PARTS, *shape[1:])

        def part(key: jax.Array) -> Any:
            w = 0.02 * jax.random.normal(key, stack[1:], jnp.bfloat16)
            return nf4.quantize(w) if in_4_bits else w

        drawn = lax.map(part, jax.random.split(key, stack[0]))
        return drawn if in_4_bits else drawn.reshape(shape)

    def leaf(keys: tuple[Any, ...], like: Any) -> Any:
        if leaf_path(keys).endswith("scale"):  # norms
            return jnp.ones(like.shape, like.dtype)
        own = jax.random.fold_in(key, zlib.crc32(leaf_path(keys).encode()))
        return jax.block_until_ready(draw(own, (like.shape, is_in_4_bits(like))))

    return jax.tree_util.tree_map_with_path(leaf, like, is_leaf=is_in_4_bits)


def measured(run: Run) -> dict[str, tuple[float, str]]:
    """Take the steps of a run; return its metrics."""
    case = Case(SHAPES[run.model], run.rows, run.sequence, run.mode)
    step, start, _ = make(case)
    like = jax.eval_shape(start)
    begin = time.perf_counter()
    take_step = jax.jit(step, donate_argnums=(0, 2)).lower(*like).compile()
    metrics = {"compile_s": (time.perf_counter() - begin, "s")}
    adapters, base, state, batch = start(random_weights(like[1], jax.random.key(0)))
    metrics["base_bytes"] = (sum(x.nbytes for x in jax.tree.leaves(base)), "B")
    print(f"compiled in {metrics['compile_s'][0]:.0f} s, steps begin", flush=True)
    times: list[float] = []
    while len(times) < _STEPS or (sum(times) < run.seconds and len(times) < 100):
        begin = time.perf_counter()
        adapters, state, loss, _ = take_step(adapters, base, state, batch)
        assert math.isfinite(float(loss))
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[1:])
    metrics |= {
        "step_ms": (1e3 * seconds, "ms"),
        "tokens_per_s": (run.rows * run.sequence / seconds, "tokens/s"),
    }
    if stats := jax.local_devices()[0].memory_stats():
        metrics["peak_bytes"] = (stats["peak_bytes_in_use"], "B")
    return metrics


@records.suite(
    only={"nargs": "+", "choices": RUNS, "help": "some of the runs (all but tiny)"},
    rows={"type": int, "help": "rows of a batch, instead of each run's"},
    here={"action": "store_true", "help": "in this process, with the memory that it has"},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    names = args.only or [name for name in RUNS if name != "tiny"]
    if args.here:
        for name in names:
            run = dataclasses.replace(RUNS[name], rows=args.rows or RUNS[name].rows)
            case = f"{run.model}, {run.rows} x {run.sequence} tokens"
            if run.free:
                case += f", {run.free:g} GiB"
            yield records.records_of("qlora", case, run.mode, measured(run))
        return
    whole, more = device_gib(), ["--rows", str(args.rows)] if args.rows else []
    more += ["--record", *([] if args.record is True else [args.record])] if args.record else []
    for name in names:
        free, env = RUNS[name].free, dict(os.environ)
        bounded = contextlib.nullcontext()
        if free and whole:
            env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{free / whole:.4f}"
            bounded = small_gpu.leaving(free + BESIDE)
        command = [sys.executable, "-m", "benchmarks.run", "qlora", "--here", "--only", name, *more]
        print(f"== {name}", flush=True)
        with bounded:
            if subprocess.run(command, cwd=ROOT, env=env, check=False).returncode:
                print(f"{name} failed", flush=True)


def table(rows: Rows) -> Table:
    """Each run: its base, its peak and its speed."""
    body, used = [], []
    found = records.grouped(records.select(rows, bench="qlora"), "case", "impl", "metric")
    for case, impls in found.items():
        for impl, of in impls.items():
            body.append([
                f"{case}, {NAMES[impl]}", cell(of.get("base_bytes"), "{:.2f}", GIB),
                cell(of.get("peak_bytes"), "{:.2f}", GIB),
                cell(of.get("tokens_per_s"), "{:,.0f}"),
            ])  # fmt: skip
            used += of.values()
    return ["", "base, GiB", "peak, GiB", "tokens/s"], body, used


TABLES = {"qlora": Rendered(table, "qlora")}
