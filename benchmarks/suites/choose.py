"""Which optimizer: bytes of state, time of a step, loss, and what fits; nothing is allocated."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks import model_shapes, records
from benchmarks.claims import Missing
from benchmarks.claims.findings import F32, Pair, Trained, beside, count
from benchmarks.records import Rows, last
from benchmarks.render import GIB, Table, alone, source
from benchmarks.suites.digits import Together
from benchmarks.suites.frameworks import frameworks
from benchmarks.suites.front import GPU, front

FOUR_BITS = lowmem.Storage.four_bit(nu=None, group_size=32)
ROUNDED = lowmem.Storage(master_weight_bits=None, master_rounding="stochastic")
MATRIX = {"w": jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)}
OPTIMIZERS = {name: one.make for name, one in lowmem.OPTIMIZERS.items()} | {
    "flash_adamw, no master weights": lambda lr: lowmem.flash_adamw(lr, storage=ROUNDED),
    "flash_factored_adamw, 4-bit m": lambda lr: lowmem.flash_factored_adamw(lr, storage=FOUR_BITS),
}


@dataclass(frozen=True)
class Choice:
    """A row: what it replaces, its names, and the records of its loss and of its step."""

    instead: str
    names: tuple[str, ...]
    says: str = ""  # in place of the names
    loss: Callable[[Rows], Pair] | None = None
    step: str = ""  # case of the records of a step
    impl: str = "lowmem.step"
    plain_step: str = ""  # case of the replaced optimizer's step, if not `step`


def adam(name: str) -> Callable[[Rows], Pair]:
    return lambda rows: beside(rows, "gpt-42m/adam", "adamw", name)


GPUS = {GPU: "", "NVIDIA H200": " (H200)"}  # device of a step's records -> what a cell says of it
CHOICES = (
    Choice("`optax.adamw`, `adam`", ("flash_adamw", "flash_adam"),
           "**`flash_adamw`**, `flash_adam`: start here", adam("flash_adamw"), "adamw"),
    Choice("AdamW with fewer loss spikes", ("stable_adamw",), "", adam("stable_adamw"),
           "stable_adamw", plain_step="adamw"),
    Choice("AdamW, states in FP8", ("coat_adamw",), "", adam("coat_adamw"), "coat_adamw"),
    Choice("AdamW, no master weights", ("flash_adamw, no master weights",),
           '`flash_adamw` with `Storage(master_weight_bits=None, master_rounding="stochastic")`',
           adam("flash_adamw-bf16-rounded"), "adamw", "lowmem.step-bf16"),
    Choice("AdamW, less state", ("flash_factored_adamw",), "", adam("flash_factored_adamw"),
           "flash_factored_adamw"),
    Choice("AdamW, least state", ("flash_factored_adamw, 4-bit m",),
           "`flash_factored_adamw` with `Storage.four_bit(nu=None, group_size=32)`",
           adam("flash_factored_adamw-four-bit-stochastic-32"), "flash_factored_adamw",
           "lowmem.step-4bit"),
    Choice("AdamW, one second moment per block", ("flash_adam_mini",), "",
           adam("flash_adam_mini"), "flash_adam_mini"),
    Choice("AdamW, as in Q-Adam-mini", ("q_adam_mini",), "", adam("q_adam_mini"),
           "q_adam_mini"),
    Choice("`optax.lion`", ("flash_lion",), "",
           lambda rows: beside(rows, "gpt-42m/lion", "lion", "flash_lion"), "lion"),
    Choice("`optax.sgd`", ("flash_sgd",), "", Together().pair, "sgd"),
    Choice("`optax.contrib.muon`", ("flash_muon",), "",
           Trained("gpt-42m batch=8/flash_muon").pair, "flash_muon"),
)  # fmt: skip
SIZES = {"1B": model_shapes.llama_3_2_1b, "3B": model_shapes.llama_3_2_3b,
         "8B": model_shapes.llama_3_1_8b}  # fmt: skip
# what is held, as the table says it -> the optimizer, and bytes of a weight and of a gradient
HELD: dict[str, tuple[Callable[[float], optax.GradientTransformation], Any, int]] = {
    "`optax.adamw`, f32": (optax.adamw, jnp.float32, 4),
    "`flash_adamw`": (lowmem.flash_adamw, jnp.bfloat16, 2),
    "`flash_adamw`, gradient release": (lowmem.flash_adamw, jnp.bfloat16, 0),
    "`flash_factored_adamw`": (lowmem.flash_factored_adamw, jnp.bfloat16, 2),
    "`flash_factored_adamw`, 4-bit m": (OPTIMIZERS["flash_factored_adamw, 4-bit m"],
                                        jnp.bfloat16, 2),
}  # fmt: skip


def states() -> Rows:
    rows = []
    for name, make in OPTIMIZERS.items():
        report = lowmem.memory.report(make(1e-3), MATRIX)
        each = {"state": (report.state_bytes / report.parameters, "bytes/parameter")}
        rows += records.records_of("choose", "matrix-8192", name, each)
    return rows


def sizes() -> Rows:
    rows = []
    for (what, (make, dtype, gradient)), (size, shapes) in (
        (held, one) for held in HELD.items() for one in SIZES.items()
    ):
        report = lowmem.memory.report(make(1e-3), shapes(dtype))
        held = report.params_bytes + report.state_bytes + gradient * report.parameters
        rows += records.records_of("choose", f"held-{size}", what, {"gib": (held / GIB, "GiB")})
    return rows


@records.suite()
def main(args: argparse.Namespace) -> Iterator[Rows]:
    yield states()
    yield sizes()


def _time(rows: Rows, choice: Choice) -> tuple[str, Rows]:
    """Return the ratio of two steps on the first GPU that has both, and their records."""
    pair = (choice.plain_step or choice.step, F32), (choice.step, choice.impl)
    for gpu, where in GPUS.items():
        both = [last(rows, bench="step", device=gpu, case=f"llama-3.2-1b/{case}",
                     metric="device_ms", impl=impl) for case, impl in pair]  # fmt: skip
        used = [row for row in both if row]
        if len(used) == 2:
            return f"{used[1]['value'] / used[0]['value']:.2f}{where}", used
    return "", []


def optimizers(rows: Rows) -> Table:
    body, used = [], []
    for one in CHOICES:
        own = [last(rows, bench="choose", case="matrix-8192", impl=name) for name in one.names]
        if None in own:
            continue
        state = ", ".join(dict.fromkeys(f"{row['value']:.2f}" for row in own if row))
        use = one.says or ", ".join(f"`{name}`" for name in one.names)
        time, timed = _time(rows, one)
        loss, trained = "not measured", []
        if one.loss:
            try:
                pair = one.loss(rows)
            except Missing:
                pass
            else:
                loss, trained = f"{pair.interval}; {count(len(pair.plain))}", pair.rows
        body.append([one.instead, use, state, loss, time])
        used += [*filter(None, own), *timed, *trained]
    head = ["you want", "use", "state, bytes per parameter",
            "final loss against f32, 90 % interval", "step time (optax in f32: 1)"]  # fmt: skip
    return head, body, used


def held(rows: Rows) -> Table:
    body, used = [], []
    for what in HELD:
        own = [last(rows, bench="choose", case=f"held-{size}", impl=what) for size in SIZES]
        if None not in own:
            body.append([what, *(f"{row['value']:.1f}" for row in own if row)])
            used += filter(None, own)
    return ["GiB of weights, state and gradients", *SIZES], body, used


# implementations of AdamW's step, with what they store, in bytes per parameter
FLASHOPTIM = 2 + 1 + 2 * (1 + 2 / 32)  # weight, correction, moments with FP16 scales
PEERS = {
    "`flash_adamw`": ("lowmem.step", "24 bits", 2 + 1 + (1 + 2 / 32) + (1 + 4 / 32)),
    "`optax.adamw`": (F32, "f32", 4 + 8),
    "`optax.adamw`, bf16 weights and state": ("optax-bf16", "none", 2 + 4),
    "flashoptim-jax": ("flashoptim-jax", "24 bits", FLASHOPTIM),
    "flashoptim (PyTorch)": ("flashoptim", "24 bits", FLASHOPTIM),
    "`torch.optim.AdamW(fused=True)`": ("torch-fused", "f32", 4 + 8),
    "bitsandbytes `AdamW8bit`, bf16 weights": ("bitsandbytes", "none", 2 + 2 * (1 + 4 / 256)),
}


def peers(rows: Rows) -> Table:
    body, used = [], []
    for name, (impl, masters, held) in PEERS.items():
        row = last(rows, bench="step", device=GPU, case="llama-3.2-1b/adamw", metric="device_ms",
                   impl=impl)  # fmt: skip
        if row:
            body.append([name, masters, f"{held:.2f}", f"{row['value']:.1f} ms"])
            used.append(row)
    head = ["implementation of AdamW", "master weights", "bytes per parameter, weights and state",
            "time of a step, Llama-3.2-1B"]  # fmt: skip
    return head, body, used


def sources(rows: Rows) -> str:
    tables = front, frameworks, optimizers, held, peers
    used = [row for make in tables for row in make(records.newest(rows))[-1]]
    return source(used).lstrip()


TABLES = {make.__name__: alone(make) for make in (front, optimizers, held, peers)} | {
    "optimizers_sources": sources
}
