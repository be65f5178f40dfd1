"""A whole training step of the Llama example, and the loss of its head alone: speed and memory.

    python -m benchmarks.run end_to_end --record                  # on a GPU: minutes
    python -m benchmarks.run end_to_end --only default --peers torch-liger torch-compile
    python -m benchmarks.run end_to_end --only default --flags "--remat full --unroll 1"
    python -m benchmarks.run end_to_end --preset tiny --steps 3 --loss 256x64x32   # anywhere

The variants are command lines of examples/train_llama.py. All but the first are compiled before
they are timed. Peers (`end_to_end.in_torch`) run before, each in a process of its own, where their
packages are installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import train_llama
from _gpt.model import mean_loss
from _llama import choose, train
from _llama.config import PRESETS

from benchmarks import records, timing
from benchmarks.suites.end_to_end import in_torch as end_to_end_torch
from benchmarks.suites.end_to_end.in_torch import CHECKPOINTING
from benchmarks.suites.fit.bench import stepped
from optax_lowmem import layers

PEERS = [name + more for name in end_to_end_torch.NAMES for more in ("", CHECKPOINTING)]
PEER_SECONDS = 240
IN_16 = "--activations fp8 --batch 128 --sequence 1024 --accumulate 16"
HALF_A_MILLION = "--batch 512 --sequence 1024 --accumulate 64"  # tokens in a step
# name -> flags of the example
VARIANTS = {
    "default": "",
    "lean-accumulated": f"--activations lean {HALF_A_MILLION}",
    "fp8-accumulated-16": IN_16,
    "fp8-accumulated-16-anew": IN_16,
    "fp8-accumulated": f"--activations fp8 {HALF_A_MILLION}",
    "optax.adamw": "--optimizer optax.adamw",
    "switchback-fp8": "--linear switchback-fp8",
    "fp8-unrolled": "--activations fp8 --unroll 99",
}
ANEW = "-anew"  # each micro-batch quantizes the weights, also where memory is left for codes
UNITS = {"tokens_per_s": "tokens/s", "mfu": "of the peak", "compile_s": "s", "device_ms": "ms",
         "planned_bytes": "bytes", "peak_bytes": "bytes", "temporary_bytes": "bytes"}  # fmt: skip
say = functools.partial(print, flush=True)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = records.command_line(__doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="1b", help="of the example (default: 1b)")
    add("--flags", default="", help="more of the example's, for all")
    add("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS), metavar="NAME",
        help=f"of {', '.join(VARIANTS)} (default: all)")  # fmt: skip
    add("--peers", nargs="*", default=[], metavar="NAME", choices=PEERS,
        help=f"of {', '.join(PEERS)} (default: none)")  # fmt: skip
    add("--steps", type=int, default=12, help="of each timing (default: 12)")
    add("--jobs", type=int, default=4, help="programs compiled at once (default: 4)")
    add("--loss", default="16384x2048x128256", metavar="TxWxV",
        help="of the loss alone: tokens, width, vocabulary; 0: none (default: 1b's)")  # fmt: skip
    add("--limit", type=float, default=330, metavar="S",
        help="start nothing after this (default: %(default)s s)")  # fmt: skip
    return parser.parse_args(arguments)


class Bench:
    """Measures, and keeps what it found for the records and the table at the end."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.begin = args, time.perf_counter()
        self.case = f"llama-{args.preset}"
        self.rows: records.Rows = []

    @property
    def late(self) -> bool:
        return time.perf_counter() - self.begin > self.args.limit

    def store(self, case: str, impl: str, found: dict[str, float], **more: Any) -> None:
        values = {metric: (value, UNITS.get(metric, metric)) for metric, value in found.items()}
        rows = records.records_of("end_to_end", case, impl, values, **more)
        records.show(rows)
        records.keep(rows, self.args.record)
        self.rows += rows

    def failed(self, case: str, impl: str, error: Exception) -> None:
        say(f"{case:<24}{impl:<26}{type(error).__name__}: {str(error)[:150]!r}")

    def peer(self, name: str, found: dict[str, float] | str) -> None:
        if isinstance(found, str):
            say(f"{self.case:<24}{name:<26}{found}")
            return
        peak = choose.peak_flops(jax.local_devices()[0].device_kind)
        if peak:
            shape, (_, sequence) = PRESETS[self.args.preset].shape, size_of(self.args)
            found["mfu"] = found["tokens_per_s"] * shape.flops_per_token(sequence) / peak
        self.store(self.case, name, found, versions=end_to_end_torch.versions())


def parse_example(args: argparse.Namespace, flags: str) -> argparse.Namespace:
    common = f"--preset {args.preset} --data 1 --text random --steps {args.steps} {args.flags}"
    return train_llama.parse_arguments(f"{common} {flags}".split())


def size_of(args: argparse.Namespace) -> tuple[int, int]:
    """Sequences of a batch and their tokens."""
    preset, given = PRESETS[args.preset], parse_example(args, "")
    return given.batch or preset.batch, given.sequence or preset.sequence


def peer(name: str, args: argparse.Namespace) -> dict[str, float] | str:
    """The measurements of a process of its own, or the last line of its error."""
    command = [sys.executable, "-m", end_to_end_torch.__name__, name, args.preset]
    command += map(str, size_of(args))
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PEER_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"not ended in {PEER_SECONDS} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])


def lowered(args: argparse.Namespace, name: str, flags: str | None = None) -> tuple[Any, Any]:
    """A variant's program and its traced step."""
    flags = VARIANTS[name] if flags is None else flags
    own = train_llama.make_settings(parse_example(args, flags))
    if name.endswith(ANEW):
        own = dataclasses.replace(own, quantize_once=False)
    program = train.make_program(own)
    return program, program.step.lower(*program.like, program.tokens)


def compiled(step: Any) -> tuple[Any, float]:
    begin = time.perf_counter()
    return step.compile(), time.perf_counter() - begin


def compile_all(bench: Bench, names: list[str]) -> dict[str, tuple[Any, float]]:
    """Of each name, the program and the seconds of compiling it; less those that fail."""
    found = {}
    with ThreadPoolExecutor(bench.args.jobs) as pool:
        programs, tasks = {}, {}
        for name in names:
            programs[name], step = lowered(bench.args, name)
            tasks[name] = pool.submit(compiled, step)
        for name, task in tasks.items():
            try:
                programs[name].__dict__["compiled"], compile_s = task.result()
                say(f"compiled {name} in {compile_s:.0f} s")
                found[name] = programs[name], compile_s
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                bench.failed(bench.case, name, error)
    return found


def time_all(bench: Bench, programs: dict[str, tuple[Any, float]]) -> None:
    for name, (program, compile_s) in programs.items():
        if bench.late:
            return
        try:
            measured = stepped(program, bench.args.steps)
        except jax.errors.JaxRuntimeError as error:
            bench.failed(bench.case, name, error)
            continue
        kept = ("tokens_per_s", "planned_bytes", "mfu", "train_loss")
        found = {metric: measured[metric] for metric in kept if metric in measured}
        names = ("remat", "attention", "activations", "head", "unroll", "stacked", "quantize_once")
        how = {name: getattr(program.settings, name) for name in names}
        bench.store(bench.case, name, found | {"compile_s": compile_s}, **how)


def full_loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.einsum("tw,vw->tv", hidden, head, preferred_element_type=jnp.float32)
    return mean_loss(logits, labels)


def loss_of(bench: Bench) -> None:
    """Temporaries and times of the loss and its two gradients."""
    tokens, width, vocab = map(int, bench.args.loss.split("x"))
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    head = (jax.random.normal(keys[1], (vocab, width)) * width**-0.5).astype(jnp.bfloat16)
    args = hidden, head, jax.random.randint(keys[2], (tokens,), 0, vocab)
    whole = functools.partial(layers.linear_cross_entropy, vocab_axis=0)
    losses = {"all logits": full_loss} | {
        f"chunks of {size}": functools.partial(whole, chunk_tokens=size)
        for size in (512, 1024, 2048, 4096)
    }
    for label, loss in losses.items():
        kinds = {"loss and gradients": jax.value_and_grad(loss, (0, 1)), "loss alone": loss}
        for case, function in kinds.items():
            if bench.late:
                return
            try:
                program = jax.jit(function).lower(*args).compile()
                size = program.memory_analysis().temp_size_in_bytes
                found = {"temporary_bytes": size, "device_ms": timing.call_ms(program, *args)}
                bench.store(case, label, found, shape=bench.args.loss)
            except jax.errors.JaxRuntimeError as error:
                bench.failed(case, label, error)


def main(arguments: list[str] | None = None) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")
    args = parse_arguments(arguments)
    peers = {name: peer(name, args) for name in args.peers}  # JAX takes most of a GPU's memory
    bench = Bench(args)
    for name, found in peers.items():
        bench.peer(name, found)
    if args.loss != "0":
        loss_of(bench)
    # the first variant, whose choice of kernels serves all; then the others, compiled together
    for names in (args.only[:1], args.only[1:]):
        time_all(bench, compile_all(bench, names))
    say(f"\n{records.device()}, jax {jax.__version__}")
    records.show(bench.rows)
