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
from collections.abc import Iterator
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
MEASURED = ("tokens_per_s", "planned_bytes", "mfu", "train_loss")
HOW = ("remat", "attention", "activations", "head", "unroll", "stacked", "quantize_once")
say = functools.partial(print, flush=True)


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


def lowered(args: argparse.Namespace, name: str) -> tuple[Any, Any]:
    """A variant's program and its traced step."""
    own = train_llama.make_settings(parse_example(args, VARIANTS[name]))
    if name.endswith(ANEW):
        own = dataclasses.replace(own, quantize_once=False)
    program = train.make_program(own)
    return program, program.step.lower(*program.like, program.tokens)


def compiled(step: Any) -> tuple[Any, float]:
    begin = time.perf_counter()
    return step.compile(), time.perf_counter() - begin


def failed(name: str, error: Any) -> None:
    say(f"{name:<26}{type(error).__name__}: {str(error)[:150]!r}")


def programs(args: argparse.Namespace, names: list[str]) -> Iterator[tuple[str, Any, float]]:
    """Compile variants side by side; yield each program with the seconds that it took."""
    with ThreadPoolExecutor(args.jobs) as pool:
        made = {name: lowered(args, name) for name in names}
        tasks = {name: pool.submit(compiled, step) for name, (_, step) in made.items()}
        for name in names:
            try:
                program = made[name][0]
                program.__dict__["compiled"], seconds = tasks[name].result()
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                failed(name, error)
            else:
                yield name, program, seconds


def rows_of(args: argparse.Namespace, name: str, program: Any, compile_s: float) -> records.Rows:
    """Time a variant."""
    try:
        measured = stepped(program, args.steps)
    except jax.errors.JaxRuntimeError as error:
        failed(name, error)
        return []
    found = {metric: measured[metric] for metric in MEASURED if metric in measured}
    how = {name: getattr(program.settings, name) for name in HOW}
    return made(f"llama-{args.preset}", name, found | {"compile_s": compile_s}, **how)


def made(case: str, impl: str, found: dict[str, float], **more: Any) -> records.Rows:
    values = {metric: (value, UNITS.get(metric, metric)) for metric, value in found.items()}
    return records.records_of("end_to_end", case, impl, values, **more)


def of_peer(args: argparse.Namespace, name: str, found: dict[str, float] | str) -> records.Rows:
    if isinstance(found, str):
        say(f"{name:<26}{found}")
        return []
    if peak := choose.peak_flops(jax.local_devices()[0].device_kind):
        shape, (_, sequence) = PRESETS[args.preset].shape, size_of(args)
        found["mfu"] = found["tokens_per_s"] * shape.flops_per_token(sequence) / peak
    return made(f"llama-{args.preset}", name, found, versions=end_to_end_torch.versions())


def full_loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.einsum("tw,vw->tv", hidden, head, preferred_element_type=jnp.float32)
    return mean_loss(logits, labels)


def losses(shape: str) -> Iterator[records.Rows]:
    """Temporaries and times of the loss and its two gradients."""
    tokens, width, vocab = map(int, shape.split("x"))
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    head = (jax.random.normal(keys[1], (vocab, width)) * width**-0.5).astype(jnp.bfloat16)
    args = hidden, head, jax.random.randint(keys[2], (tokens,), 0, vocab)
    whole = functools.partial(layers.linear_cross_entropy, vocab_axis=0)
    found = {"all logits": full_loss} | {
        f"chunks of {size}": functools.partial(whole, chunk_tokens=size)
        for size in (512, 1024, 2048, 4096)
    }
    for label, loss in found.items():
        kinds = {"loss and gradients": jax.value_and_grad(loss, (0, 1)), "loss alone": loss}
        for case, function in kinds.items():
            try:
                program = jax.jit(function).lower(*args).compile()
                size = program.memory_analysis().temp_size_in_bytes
                values = {"temporary_bytes": size, "device_ms": timing.call_ms(program, *args)}
                yield made(case, label, values, shape=shape)
            except jax.errors.JaxRuntimeError as error:
                failed(label, error)


@records.suite(
    preset={"choices": PRESETS, "default": "1b", "help": "of the example (default: 1b)"},
    flags={"default": "", "help": "more of the example's, for all"},
    only={"nargs": "*", "choices": VARIANTS, "default": list(VARIANTS), "metavar": "NAME",
          "help": f"of {', '.join(VARIANTS)} (default: all)"},
    peers={"nargs": "*", "default": [], "metavar": "NAME", "choices": PEERS,
           "help": f"of {', '.join(PEERS)} (default: none)"},
    steps={"type": int, "default": 12, "help": "of each timing (default: 12)"},
    jobs={"type": int, "default": 4, "help": "programs compiled at once (default: 4)"},
    loss={"default": "16384x2048x128256", "metavar": "TxWxV",
          "help": "of the loss alone: tokens, width, vocabulary; 0: none (default: 1b's)"},
    limit={"type": float, "default": 330, "metavar": "S",
           "help": "start nothing after this (default: %(default)s s)"},
)  # fmt: skip
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")
    begin = time.perf_counter()
    peers = {name: peer(name, args) for name in args.peers}  # JAX takes most of a GPU's memory
    for name, found in peers.items():
        yield of_peer(args, name, found)
    if args.loss != "0":
        yield from losses(args.loss)
    # the first variant, whose choice of kernels serves all; then the others, compiled together
    for names in (args.only[:1], args.only[1:]):
        for one in list(programs(args, names)):  # timed when nothing compiles
            if time.perf_counter() - begin < args.limit:
                yield rows_of(args, *one)
