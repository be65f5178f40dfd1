"""A whole training step of the Llama example, and the loss of its head alone: speed and memory.

    python -m benchmarks.run end_to_end --record                  # on a GPU: minutes
    python -m benchmarks.run end_to_end --only default fp8 --peers torch-liger torch-compile
    python -m benchmarks.run end_to_end --only default scan-full --profile default
    python -m benchmarks.run end_to_end --preset tiny --steps 3 --loss 256x64x32   # anywhere

The variants are command lines of examples/train_llama.py, with what a few of them change beside.
All but the first are compiled before they are timed. Peers (`end_to_end_torch`) run before, each in
a process of its own, where their packages are installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import train_llama  # noqa: E402
from _gpt.model import mean_loss  # noqa: E402
from _llama import choose, model, train  # noqa: E402
from _llama.config import DOTS, PRESETS  # noqa: E402

from benchmarks import records
from benchmarks.suites.end_to_end import in_torch as end_to_end_torch
from benchmarks.suites.end_to_end.in_torch import CHECKPOINTING
from optax_lowmem import layers
from optax_lowmem._src.losses import cross_entropy

GIB = 2.0**30
PEERS = [name + more for name in end_to_end_torch.NAMES for more in ("", CHECKPOINTING)]
PEER_SECONDS = 240
say = functools.partial(print, flush=True)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to take the step.

    Attributes:
      flags: of the example.
      chunk_tokens: of the loss, about; None: its default.
      products_alone: whether `dots` computes the attention anew too.
      merges: whether XLA may find that what is computed anew is there already, as it does in
        unrolled layers that nothing keeps it from.
      anew: whether each micro-batch quantizes the weights, also where memory is left for codes.
      options: of the compiler.
    """

    flags: str = ""
    chunk_tokens: int | None = None
    products_alone: bool = False
    merges: bool = False
    anew: bool = False
    options: tuple[tuple[str, str], ...] = ()


STANDARD = "--activations standard --remat dots"
IN_16 = "--activations fp8 --batch 128 --sequence 1024 --accumulate 16"
HALF_A_MILLION = "--batch 512 --sequence 1024 --accumulate 64"  # tokens in a step
LT = (("xla_gpu_enable_cublaslt", "True"),)
CUBLAS = (("xla_gpu_enable_triton_gemm", "False"),)
SLICES = (("xla_gpu_enable_dynamic_slice_fusion", "True"),)
VARIANTS = {
    "default": Variant(),
    "lean": Variant("--activations lean --remat none --unroll 1"),
    "lean-unrolled": Variant("--activations lean --remat none --unroll 99"),
    "lean-unroll-4": Variant("--activations lean --remat none --unroll 4"),
    "lean-unrolled-lt": Variant("--activations lean --remat none --unroll 99", options=LT),
    "lean-unrolled-cublas": Variant("--activations lean --remat none --unroll 99", options=CUBLAS),
    "lean-full": Variant("--activations lean --remat full --unroll 1"),
    "lean-full-unrolled": Variant("--activations lean --remat full --unroll 99"),
    "standard": Variant(f"{STANDARD} --unroll 1"),
    "products-alone": Variant(f"{STANDARD} --unroll 1", products_alone=True),
    "chunk-512": Variant(chunk_tokens=512),
    "chunk-2048": Variant(chunk_tokens=2048),
    "slice-fusion": Variant(options=SLICES),
    "unroll-2": Variant(f"{STANDARD} --unroll 2"),
    "unroll-4": Variant(f"{STANDARD} --unroll 4"),
    "unrolled": Variant(f"{STANDARD} --unroll 99"),
    "unrolled-merged": Variant(f"{STANDARD} --unroll 99", merges=True),
    "unrolled-products-alone": Variant(f"{STANDARD} --unroll 99", products_alone=True),
    "unrolled-none": Variant("--activations standard --remat none --unroll 99"),
    "scan-none": Variant("--activations standard --remat none --unroll 1"),
    "scan-full": Variant("--activations standard --remat full --unroll 1"),
    "lean-accumulated": Variant(f"--activations lean {HALF_A_MILLION}"),
    "fp8-accumulated-16": Variant(IN_16),
    "fp8-accumulated-16-anew": Variant(IN_16, anew=True),
    "fp8-accumulated": Variant(f"--activations fp8 {HALF_A_MILLION}"),
    "optax.adamw": Variant("--optimizer optax.adamw"),
    "switchback-fp8": Variant("--linear switchback-fp8"),
    "fp8": Variant("--activations fp8 --unroll 1"),
    "fp8-unrolled": Variant("--activations fp8 --unroll 99"),
    "fp8-unrolled-head": Variant("--activations fp8 --unroll 99 --head fp8"),
    "fp8-unrolled-head-gradients": Variant("--activations fp8 --unroll 99 --head fp8-gradients"),
}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    add("--profile", nargs="*", choices=VARIANTS, default=[], metavar="NAME",
        help="print where the device's time goes, by operation")  # fmt: skip
    add("--most", type=int, default=30, help="operations of a profile (default: 30)")
    add("--limit", type=float, default=330, metavar="S",
        help="start nothing after this (default: %(default)s s)")  # fmt: skip
    add("--record", nargs="?", const=True, type=Path, metavar="FILE",
        help="append to FILE, or to benchmarks/results")  # fmt: skip
    return parser.parse_args(arguments)


class Bench:
    """Measures, and keeps what it found for the records and the table."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.begin = args, time.perf_counter()
        self.table: list[str] = []

    @property
    def late(self) -> bool:
        return time.perf_counter() - self.begin > self.args.limit

    def store(self, case: str, impl: str, values: dict[str, float], **more: Any) -> None:
        """Records numbers, and makes a line of them."""
        units = {"ms": "ms", "s": "s", "bytes": "bytes"}
        rows = []
        for metric, value in values.items():
            unit = next((u for end, u in units.items() if metric.endswith(f"_{end}")), metric)
            unit = {"tokens_per_s": "tokens/s", "mfu": "of the peak"}.get(metric, unit)
            rows.append(records.record("end_to_end", case, impl, metric, value, unit, **more))
        if self.args.record:
            records.append(rows, None if self.args.record is True else self.args.record)
        shown = {
            name.replace("_bytes", "_GiB"): value / GIB if name.endswith("_bytes") else value
            for name, value in values.items()
        }
        numbers = "  ".join(
            f"{name} {value:,.{0 if value >= 1000 else 3}f}" for name, value in shown.items()
        )
        self.table.append(f"{case:<24}{impl:<26}{numbers}")
        say(self.table[-1])

    def peer(self, name: str, found: dict[str, float] | str) -> None:
        case = f"llama-{self.args.preset}"
        if isinstance(found, str):
            self.said(case, name, found)
            return
        given = parse_example(self.args, "")
        preset = PRESETS[self.args.preset]
        peak = choose.peak_flops(jax.local_devices()[0].device_kind)
        if peak:
            flops = preset.shape.flops_per_token(given.sequence or preset.sequence)
            found["mfu"] = found["tokens_per_s"] * flops / peak
        self.store(case, name, found, versions=end_to_end_torch.versions())

    def failed(self, case: str, impl: str, error: Exception) -> None:
        self.said(case, impl, f"{type(error).__name__}: {str(error)[:150]!r}")

    def said(self, case: str, impl: str, words: str) -> None:
        self.table.append(f"{case:<24}{impl:<26}{words}")
        say(self.table[-1])


# ---- peers ---------------------------------------------------------------------------------------


def peer(name: str, args: argparse.Namespace) -> dict[str, float] | str:
    """The measurements of a process of its own, or the last line of its error."""
    preset = PRESETS[args.preset]
    given = parse_example(args, "")
    command = [sys.executable, "-m", end_to_end_torch.__name__, name, args.preset]
    command += [str(given.batch or preset.batch), str(given.sequence or preset.sequence)]
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


# ---- steps ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def changed(variant: Variant, vocab: int) -> Iterator[None]:
    """While a variant is traced."""
    with contextlib.ExitStack() as stack:
        if variant.chunk_tokens:
            size = variant.chunk_tokens * vocab
            stack.enter_context(mock.patch.object(cross_entropy, "_CHUNK_LOGITS", size))
        if variant.products_alone:
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            stack.enter_context(mock.patch.dict(model._POLICIES, {DOTS: policy}))
        if variant.merges:
            checkpoint = jax.checkpoint

            def merging(body: Any, *, prevent_cse: bool, **more: Any) -> Any:
                return checkpoint(body, prevent_cse=False, **more)

            stack.enter_context(mock.patch.object(jax, "checkpoint", merging))
        yield


def parse_example(args: argparse.Namespace, flags: str) -> argparse.Namespace:
    """The example's command line."""
    common = f"--preset {args.preset} --data 1 --text random --steps {args.steps} {args.flags}"
    return train_llama.parse_arguments(f"{common} {flags}".split())


def lowered(args: argparse.Namespace, variant: Variant) -> tuple[Any, Any]:
    """A variant's program and its traced step."""
    own = train_llama.make_settings(parse_example(args, variant.flags))
    if variant.anew:
        own = dataclasses.replace(own, quantize_once=False)
    with changed(variant, own.shape.vocab):
        program = train.make_program(own)
        return program, program.step.lower(*program.like, program.tokens)


def compiled(variant: Variant, step: Any) -> tuple[Any, float]:
    """The step, and the seconds of compiling it."""
    begin = time.perf_counter()
    return step.compile(dict(variant.options)), time.perf_counter() - begin


def timed(program: Any, steps: int) -> tuple[dict[str, float], train.Run]:
    """Steps of a compiled program."""
    settings = program.settings
    _, batches = train.make_batches(settings, Path("demo_output"))
    run = train.Run(*program.start(), 0, [], [])
    for _ in train.advance(run, program, batches, steps):
        pass
    found = train.measured(run, settings, program)
    kept = ("tokens_per_s", "planned_bytes", "mfu", "train_loss")
    return {name: found[name] for name in kept if name in found}, run


def steps_of(bench: Bench) -> None:
    """The first variant, whose choice of kernels serves all; then the others, compiled together."""
    first, *others = bench.args.only
    time_all(bench, compile_all(bench, [first]))
    if others:
        time_all(bench, compile_all(bench, others))


def compile_all(bench: Bench, names: list[str]) -> dict[str, tuple[Any, float]]:
    """Of each name, the program and the seconds of compiling it; less those that fail."""
    found = {}
    with ThreadPoolExecutor(bench.args.jobs) as pool:
        programs, tasks = {}, {}
        for name in names:
            programs[name], step = lowered(bench.args, VARIANTS[name])
            tasks[name] = pool.submit(compiled, VARIANTS[name], step)
        for name, task in tasks.items():
            try:
                programs[name].__dict__["compiled"], compile_s = task.result()
                say(f"compiled {name} in {compile_s:.0f} s")
                found[name] = programs[name], compile_s
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                bench.failed(f"llama-{bench.args.preset}", name, error)
    return found


def time_all(bench: Bench, programs: dict[str, tuple[Any, float]]) -> None:
    """One by one, while there is time."""
    for name, (program, compile_s) in programs.items():
        if bench.late:
            return
        try:
            found, run = timed(program, bench.args.steps)
        except jax.errors.JaxRuntimeError as error:
            bench.failed(f"llama-{bench.args.preset}", name, error)
            continue
        own = program.settings
        names = ("remat", "attention", "activations", "head", "unroll", "stacked", "quantize_once")
        how = {name: getattr(own, name) for name in names}
        found |= {"compile_s": compile_s}
        bench.store(f"llama-{bench.args.preset}", name, found, **how)
        if name in bench.args.profile:
            profile(name, program, run, bench.args.most)


def profile(name: str, program: Any, run: train.Run, most: int) -> None:
    """Print the time of two steps by kernel, and the longest gaps between kernels."""
    _, batches = train.make_batches(program.settings, Path("demo_output"))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in train.advance(run, program, batches, run.step + 2):
                pass
        files = list(Path(folder).rglob("*.trace.json.gz"))
        events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"] if files else []
    devices = {
        e["pid"] for e in events
        if e.get("name") == "process_name" and "/device:" in str(e.get("args", {}).get("name"))
    }  # fmt: skip
    lines = {
        (e["pid"], e["tid"]) for e in events
        if e.get("name") == "thread_name" and "Stream" in str(e.get("args", {}).get("name"))
    }  # fmt: skip
    spent: Counter[str] = Counter()
    spans = []
    for e in events:
        if e.get("ph") == "X" and e["pid"] in devices and (e["pid"], e["tid"]) in lines:
            of = e.get("args", {}).get("hlo_op", "")
            spent[f"{e['name'].split('<')[0][:60]} | {of}"] += e["dur"] / 2e3
            spans.append((e["ts"], e["ts"] + e["dur"], of))
    whole, waits = sum(spent.values()), gaps(spans)
    idle = sum(ms for ms, _ in waits) / 2
    say(f"-- {name}: {whole:.1f} ms of kernels a step, {idle:.1f} ms between them")
    for kernel, ms in spent.most_common(most):
        say(f"{ms:9.2f} ms {ms / max(whole, 1e-9):6.1%}  {kernel}")
    for ms, where in sorted(waits, reverse=True)[:8]:
        say(f"{ms:9.2f} ms idle  {where}")


def gaps(spans: list[tuple[float, float, str]]) -> list[tuple[float, str]]:
    """Milliseconds in which nothing runs, and between which operations, of (begin, end, name) in
    microseconds."""
    found, until, last = [], math.inf, ""
    for begin, end, name in sorted(spans):
        if begin > until:
            found.append(((begin - until) / 1e3, f"{last} .. {name}"))
        if end > until or until == math.inf:
            until, last = end, name
    return found


# ---- the loss alone ------------------------------------------------------------------------------


def full_loss(hidden: jax.Array, head: jax.Array, labels: jax.Array, **_: Any) -> jax.Array:
    """From all logits at once."""
    logits = jnp.einsum("tw,vw->tv", hidden, head, preferred_element_type=jnp.float32)
    return mean_loss(logits, labels)


def loss_of(bench: Bench) -> None:
    """Temporaries and times of the loss and its two gradients."""
    tokens, width, vocab = map(int, bench.args.loss.split("x"))
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    head = (jax.random.normal(keys[1], (vocab, width)) * width**-0.5).astype(jnp.bfloat16)
    labels = jax.random.randint(keys[2], (tokens,), 0, vocab)
    for chunk in (None, 512, 1024, 2048, 4096, 0):
        if bench.late:
            break
        own = functools.partial(layers.linear_cross_entropy, vocab_axis=0, chunk_tokens=chunk)
        of_loss = full_loss if chunk == 0 else own
        label = {None: "default chunks", 0: "all logits"}.get(chunk, f"chunks of {chunk}")
        try:
            for kind, function in (
                ("and gradients", jax.value_and_grad(of_loss, (0, 1))),
                ("alone", of_loss),
            ):
                program = jax.jit(function).lower(hidden, head, labels).compile()
                temporaries = program.memory_analysis().temp_size_in_bytes
                values = {
                    "temporary_bytes": temporaries,
                    "device_ms": _ms(program, hidden, head, labels),
                }
                if kind != "alone":
                    values["loss"] = float(program(hidden, head, labels)[0])
                bench.store(f"loss {kind}", label, values, shape=bench.args.loss)
        except jax.errors.JaxRuntimeError as error:
            bench.failed("loss", label, error)


def _ms(program: Any, *args: Any, calls: int = 5, repeats: int = 3) -> float:
    """Of one call, from calls that wait for the device at their end alone."""
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            found = program(*args)
        jax.block_until_ready(found)
        times.append(1e3 * (time.perf_counter() - begin) / calls)
    return statistics.median(times)


def main(arguments: list[str] | None = None) -> None:
    """Measures what the command line asks for."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")
    args = parse_arguments(arguments)
    peers = {name: peer(name, args) for name in args.peers}  # JAX takes most of a GPU's memory
    bench = Bench(args)
    for name, found in peers.items():
        bench.peer(name, found)
    if args.loss != "0":
        loss_of(bench)
    if args.only:
        steps_of(bench)
    say(f"\n{records.device()}, jax {jax.__version__}")
    say("\n".join(bench.table))


if __name__ == "__main__":
    main()
