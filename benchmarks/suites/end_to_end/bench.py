"""A whole training step of the Llama example, and the loss of its head alone: speed and memory.

The variants are command lines of examples/train_llama.py, or the example with products of other
JAX libraries (`end_to_end.in_jax`). Peers in torch (`end_to_end.in_torch`) run before, each in a
process of its own. Both need their packages.

    python -m benchmarks.run end_to_end --loss 0 --only default fp8-unrolled optax.adamw qwix-fp8 \
        --steps 200 --text installed --record  # the losses after 200 steps too
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import train_llama
from _gpt.data import TEXTS
from _gpt.model import mean_loss
from _llama import choose, train
from _llama.config import PRESETS

from benchmarks import records, timing
from benchmarks.suites.end_to_end import in_jax, in_torch, tables
from benchmarks.suites.fit.bench import stepped
from optax_lowmem import layers

PEERS = [name + more for name in in_torch.NAMES for more in ("", in_torch.CHECKPOINTING)]
PEER_SECONDS = 240
PLAIN, RANDOM = "default", "random"
IN_16 = "--activations fp8 --batch 128 --sequence 1024 --accumulate 16"
HALF_A_MILLION = "--batch 512 --sequence 1024 --accumulate 64"  # tokens in a step
# name -> flags of the example
VARIANTS = {
    PLAIN: "",
    "lean-accumulated": f"--activations lean {HALF_A_MILLION}",
    "fp8-accumulated-16": IN_16,
    "fp8-accumulated-16-anew": IN_16,
    "fp8-accumulated": f"--activations fp8 {HALF_A_MILLION}",
    "optax.adamw": "--optimizer optax.adamw",
    "switchback-fp8": "--linear switchback-fp8",
    "fp8-unrolled": "--activations fp8 --unroll 99",
} | {name: f"--linear {name}" for name in in_jax.NAMES}
DEFAULT = [name for name in VARIANTS if name not in in_jax.NAMES]
ANEW = "-anew"  # each micro-batch quantizes the weights, also where memory is left for codes
UNITS = {"tokens_per_s": "tokens/s", "mfu": "of the peak", "compile_s": "s", "device_ms": "ms",
         "planned_bytes": "bytes", "peak_bytes": "bytes", "temporary_bytes": "bytes",
         "train_loss": "nats"}  # fmt: skip
MEASURED = ("tokens_per_s", "planned_bytes", "mfu", "train_loss")
HOW = ("remat", "attention", "activations", "head", "unroll", "stacked", "quantize_once")


def parse_example(args: argparse.Namespace, flags: str) -> argparse.Namespace:
    common = f"--preset {args.preset} --data-parallel 1 --text {args.text} --steps {args.steps}"
    return train_llama.parse_arguments(f"{common} {args.flags} {flags}".split())


def rows_of(case: str, impl: str, found: dict[str, float], **more: Any) -> records.Rows:
    values = {metric: (found[metric], unit) for metric, unit in UNITS.items() if metric in found}
    return records.records_of("end_to_end", case, impl, values, **more)


def case_of(args: argparse.Namespace) -> str:
    return f"llama-{args.preset}" + (f", {args.text} text" if args.text != RANDOM else "")


def peer(name: str, args: argparse.Namespace) -> records.Rows:
    """The records of a process of its own; raises what it prints last where it fails."""
    preset, given = PRESETS[args.preset], parse_example(args, "")
    batch, sequence = given.batch or preset.batch, given.sequence or preset.sequence
    done = subprocess.run(
        [sys.executable, "-m", in_torch.__name__, name, args.preset, str(batch), str(sequence)],
        capture_output=True, text=True, timeout=PEER_SECONDS,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["no message"])[-1])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if peak := choose.peak_flops(jax.local_devices()[0].device_kind):
        found["mfu"] = found["tokens_per_s"] * preset.shape.flops_per_token(sequence) / peak
    return rows_of(case_of(args), name, found, versions=in_torch.versions())


def variant(name: str, args: argparse.Namespace) -> records.Rows:
    how = {}
    if name in in_jax.NAMES:
        in_jax.register(name)
        how["versions"] = in_torch.versions(in_jax.PACKAGES)
    own = train_llama.make_settings(parse_example(args, VARIANTS[name]))
    if name.endswith(ANEW):
        own = dataclasses.replace(own, quantize_once=False)
    program, begin = train.make_program(own), time.perf_counter()
    seconds = program.compiled and time.perf_counter() - begin
    measured = stepped(program, args.steps)
    found = {metric: measured[metric] for metric in MEASURED if metric in measured}
    how |= {name: getattr(own, name) for name in HOW}
    return rows_of(case_of(args), name, found | {"compile_s": seconds}, **how)


def full_loss(hidden: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.einsum("tw,vw->tv", hidden, head, preferred_element_type=jnp.float32)
    return mean_loss(logits, labels)


def loss_rows(name: str, args: argparse.Namespace) -> records.Rows:
    tokens, width, vocab = map(int, args.loss.split("x"))
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    head = (jax.random.normal(keys[1], (vocab, width)) * width**-0.5).astype(jnp.bfloat16)
    given = hidden, head, jax.random.randint(keys[2], (tokens,), 0, vocab)
    chunks = functools.partial(layers.linear_cross_entropy, vocab_axis=0)
    loss = full_loss
    if name.startswith("chunks"):
        loss = functools.partial(chunks, chunk_tokens=int(name.split()[-1]))
    kinds, rows = {"loss and gradients": jax.value_and_grad(loss, (0, 1)), "loss alone": loss}, []
    for case, function in kinds.items():
        program = jax.jit(function).lower(*given).compile()
        size = program.memory_analysis().temp_size_in_bytes
        values = {"temporary_bytes": size, "device_ms": timing.call_ms(program, *given)}
        rows += rows_of(case, name, values, shape=args.loss)
    return rows


@records.suite(
    preset={"choices": PRESETS, "default": "1b", "help": "of the example (default: 1b)"},
    text={"choices": (RANDOM, *TEXTS), "default": RANDOM, "help": "tokens (default: random)"},
    flags={"default": "", "help": "more of the example's, for all"},
    only={"nargs": "*", "choices": VARIANTS, "default": DEFAULT, "metavar": "NAME",
          "help": f"of {', '.join(VARIANTS)} (default: those without other libraries)"},
    peers={"nargs": "*", "default": [], "metavar": "NAME", "choices": PEERS,
           "help": f"of {', '.join(PEERS)} (default: none)"},
    steps={"type": int, "default": 12, "help": "of each timing (default: 12)"},
    loss={"default": "16384x2048x128256", "metavar": "TxWxV",
          "help": "of the loss alone: tokens, width, vocabulary; 0: none (default: 1b's)"},
)  # fmt: skip
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")
    losses = tables.LOSSES if args.loss != "0" else ()
    # peers first: JAX takes most of a GPU's memory
    plain = None
    for measure, names in ((peer, args.peers), (loss_rows, losses), (variant, args.only)):
        for name in names:
            try:
                rows = measure(name, args)
                for row in records.select(rows, metric="tokens_per_s"):
                    plain = row["value"] if name == PLAIN else plain
                    row |= {"ratio_to_default": row["value"] / plain} if plain else {}
                yield rows
            except (
                ImportError, ValueError, jax.errors.JaxRuntimeError, subprocess.TimeoutExpired
            ) as error:  # fmt: skip
                print(f"{name}: {type(error).__name__}: {str(error)[:150]!r}", flush=True)
