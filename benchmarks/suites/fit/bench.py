"""The largest batch of a Llama that fits on one GPU, by optimizer and activations (COAT, Table 8).

What fits is read from the compiler's plan of a step: nothing is allocated to find it. Then a few
steps are timed, at a batch that all can run and at each one's largest.
"""

import argparse
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import train_llama
from _gpt.arguments import is_out_of_memory
from _gpt.train import planned_bytes
from _llama import train
from _llama.choose import activations as kept_by_default
from _llama.config import LEAN, PRESETS

from benchmarks import records
from benchmarks.render import GIB
from benchmarks.suites.fit import tables as fit_tables
from benchmarks.suites.fit.tables import ALL
from benchmarks.timing import QUICK, on_gpu

# name -> flags of examples/train_llama.py
CONFIGURATIONS = {
    "optax.adamw": "--optimizer optax.adamw",
    "flash_adamw": "--optimizer flash_adamw",
    "coat_adamw": "--optimizer coat_adamw",
    "coat_adamw+fp8": "--optimizer coat_adamw --activations fp8",
    "flash_adamw+fp8": "--optimizer flash_adamw --activations fp8",
    # weights stored alike: with optax.adamw, and with the next one
    fit_tables.COAT_STATES_F32: "--optimizer coat_adamw --f32-weights",
    fit_tables.COAT_F32: "--optimizer coat_adamw --f32-weights --activations fp8",
    fit_tables.SPLIT: "--optimizer split_adamw",
}
Fit = dict[str, float]  # of one: max_batch (0: none), own_bytes, planned_bytes, sequence_bytes
SHARE = 0.98  # of what JAX may take: what lies in pieces cannot be used whole
say = functools.partial(print, flush=True)


def settings_of(args: argparse.Namespace, name: str, batch: int) -> Any:
    flags = f"--preset {args.preset} --sequence {args.sequence} --batch {batch} --data 1"
    flags += f" --text random --attention {'cudnn' if on_gpu() else 'xla'} --no-remat"
    flags += f" --steps {max(1, args.steps)} {CONFIGURATIONS[name]}"
    return train_llama.make_settings(train_llama.parse_arguments(flags.split()))


def plan(args: argparse.Namespace, name: str, batch: int) -> int:
    program = train.make_program(settings_of(args, name, batch))
    lowered = program.step.lower(*program.like, program.tokens)
    found = planned_bytes(lowered.compile(QUICK if on_gpu() else None))
    say(f"{name:<18} batch {batch:>4}: {found / GIB:9.3f} GiB planned")
    return found


def largest(of: Callable[[int], int], limit: float, most: int) -> tuple[int, dict[int, int]]:
    """The largest batch within a limit (0: none), and the bytes of each one looked at.

    Bytes grow nearly in proportion, so the next one looked at is where a line reaches the limit;
    and now and then the middle of what is left, for plans that do not.
    """
    found: dict[int, int] = {}
    low, high, guess = 0, most + 1, 1
    while high - low > 1:
        found[guess] = of(guess)
        low, high = (guess, high) if found[guess] <= limit else (low, guess)
        if len(found) == 1:
            guess = 2
        elif len(found) > 4 and len(found) % 2:
            guess = (low + high) // 2
        else:
            a, b = sorted(found, key=lambda batch: abs(batch - low))[:2]
            slope = max(1.0, (found[b] - found[a]) / (b - a))
            guess = low + int((limit - found.get(low, limit)) / slope)
        guess = min(max(guess, low + 1), high - 1)
    return low, found


def stepped(program: Any, steps: int) -> dict[str, Any]:
    """The example's measurements of steps of its compiled program."""
    _, batches = train.make_batches(program.settings, Path("demo_output"))
    run = train.Run(*program.start(), 0, [], [])
    for _ in train.advance(run, program, batches, steps):
        pass
    return train.measured(run, program.settings, program)


def peak() -> int:
    """The most bytes that there have been on the device; 0 where nobody counts."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def timed(program: Any) -> dict[str, float] | None:
    """Tokens a second and bytes of a few steps; the peak is its own if it is a new one.

    None where there is no memory for them.
    """
    before = peak()
    try:
        rate = stepped(program, program.settings.steps)["tokens_per_s"]
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    numbers = {"tokens_per_s": rate, "planned_bytes": planned_bytes(program.compiled)}
    return numbers | ({"peak_bytes": peak()} if peak() > before else {})


def fit(args: argparse.Namespace, limit: float, name: str) -> Fit:
    """Return the largest batch that fits, and the bytes of plans."""
    batch, planned = largest(functools.partial(plan, args, name), limit, args.most)
    own = train.make_program(settings_of(args, name, 1)).device_bytes
    first, last = min(planned), max(planned)
    each = (planned[last] - planned[first]) / max(1, last - first)
    return {"max_batch": batch, "own_bytes": own, "planned_bytes": planned[batch or 1],
            "sequence_bytes": each}  # fmt: skip


Found = Iterator[tuple[str, str, dict[str, float]]]  # what follows a case, configuration, values


def timings(args: argparse.Namespace, fits: dict[str, Fit]) -> Found:
    """Time each at the batch that all can run and at its largest.

    Smaller programs come first, so that peaks are new.
    """
    batches = {name: int(of["max_batch"]) for name, of in fits.items() if of["max_batch"]}
    if not batches:
        return
    common = min(batches.values())
    yield "", ALL, {"common_batch": common}

    def size(one: tuple[str, int]) -> float:
        return fits[one[0]]["own_bytes"] + one[1] * fits[one[0]]["sequence_bytes"]

    wanted = sorted({(name, b) for name, b in batches.items() for b in (common, b)}, key=size)
    programs = [train.make_program(settings_of(args, *one)) for one in wanted]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda program: program.compiled, programs))
    for (name, batch), program in zip(wanted, programs, strict=True):
        numbers = timed(program)
        if numbers is None and batch > common:  # its kernels, now chosen, want more: one less
            batch -= 1
            yield "", name, {"max_batch": batch}
            numbers = timed(train.make_program(settings_of(args, name, batch)))
        if numbers is None:
            say(f"{name} at batch {batch}: out of memory")
        else:
            yield f"-b{batch}", name, numbers


@records.suite(
    preset={"choices": PRESETS, "default": "3b", "help": "of the example (default: 3b)"},
    sequence={"type": int, "default": 2048, "help": "tokens (default: 2048)"},
    only={"nargs": "+", "choices": CONFIGURATIONS, "default": list(CONFIGURATIONS),
          "metavar": "NAME", "help": f"of {', '.join(CONFIGURATIONS)} (default: all)"},
    memory={"type": float, "metavar": "GIB", "help": "of a device; default: what JAX may take"},
    most={"type": int, "default": 1024, "help": "batch (default: 1024)"},
    steps={"type": int, "default": 8, "help": "of each timing; 0: plans alone (default: 8)"},
    jobs={"type": int, "default": 5, "help": "programs compiled at once (default: 5)"},
)  # fmt: skip
def main(args: argparse.Namespace) -> Iterator[records.Rows]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")  # as the example
    has = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    has = has if args.memory is None else args.memory * GIB
    if has is None:
        raise SystemExit("this device does not say what memory it has: pass --memory GIB")
    # what layers without FP8 keep, which the example chooses
    kept = kept_by_default(settings_of(args, fit_tables.BASE, 1))
    case = f"llama-{args.preset}-s{args.sequence}{'-lean' if kept == LEAN else ''}"

    def rows_of(more: str, impl: str, values: dict[str, float]) -> records.Rows:
        units = {"tokens_per_s": "tokens/s", "max_batch": "sequences", "common_batch": "sequences"}
        found = {metric: (value, units.get(metric, "bytes")) for metric, value in values.items()}
        return records.records_of("fit", case + more, impl, found, limit_bytes=has, remat=False)

    with ThreadPoolExecutor(args.jobs) as pool:
        found = pool.map(functools.partial(fit, args, SHARE * has), args.only)
        fits = dict(zip(args.only, found, strict=True))
    yield from (rows_of("", name, of) for name, of in fits.items())
    if args.steps:
        yield from (rows_of(*one) for one in timings(args, fits))
