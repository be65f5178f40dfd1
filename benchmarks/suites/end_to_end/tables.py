"""Whole training steps beside torch's: the tables, from end_to_end's records."""

from typing import Any

from benchmarks.records import Rows, alike, grouped, on_gpus, select
from benchmarks.render import GIB, Rendered, Table, cell

MODELS = {
    "llama-1b": ("Llama-3.2-1B", "8 x 2048"),
    "llama-3b": ("Llama-3.2-3B", "4 x 2048"),
    "llama-8b": ("Llama-3.1-8B", "4 x 2048"),
}  # case of a record -> model, tokens of a step
ACCUMULATED = {
    "fp8-accumulated-16": "16 x 8 x 1024",
    "fp8-accumulated-16-anew": "16 x 8 x 1024",
    "fp8-accumulated": "64 x 8 x 1024",
    "lean-accumulated": "64 x 8 x 1024",
}  # likewise of its micro-batches
# impl of a record -> what it is, in the table's order
PROGRAMS = {
    "default": "ours, bf16: without flags",
    "fp8-unrolled": "ours, `--activations fp8`",
    "fp8-unrolled-head": "ours, `--activations fp8 --head fp8`",
    "fp8-unrolled-head-gradients": "ours, `--activations fp8 --head fp8-gradients`",
    "switchback-fp8": "ours, `--linear switchback-fp8`",
    "fp8-accumulated-16": "ours, `--activations fp8 --accumulate 16`",
    "fp8-accumulated-16-anew": "the same, weights quantized in each micro-batch",
    "fp8-accumulated": "ours, `--activations fp8 --accumulate 64`",
    "lean-accumulated": "ours, bf16, `--accumulate 64`",
    "optax.adamw": "the same model with `optax.adamw` and f32 weights",
    "qwix-fp8": "Qwix's FP8",
    "qwix-fp8-tensor": "Qwix's FP8, scales per tensor",
    "qwix-int8": "Qwix's int8",
    "qwix-int8-tensor": "Qwix's int8, scales per tensor",
    "flax-fp8": "Flax's FP8 operations, scales of step 1",
    "torch-liger": "torch, Liger kernels, flashoptim",
    "torch-liger-ckpt": "torch, Liger kernels, flashoptim, checkpointing",
    "torch-compile": "torch.compile, flashoptim",
    "torch-compile-ckpt": "torch.compile, flashoptim, checkpointing",
    "torch-float8": "torch.compile, torchao float8, flashoptim",
    "torch-float8-ckpt": "torch.compile, torchao float8, flashoptim, checkpointing",
}
TRAINED = "llama-1b, installed text"  # case of runs of 200 steps
LOSSES = ("all logits", "chunks of 512", "chunks of 1024", "chunks of 2048", "chunks of 4096")


def steps(rows: Rows) -> dict[str, dict[str, dict[str, dict]]]:
    """Model -> program -> metric -> record, of the device measured last for each model."""
    found = {}
    for case in MODELS:
        own = select(on_gpus(rows), bench="end_to_end", case=case)
        here = alike([row for row in own if row["impl"] in PROGRAMS], "device")
        of = grouped(here, "impl", "metric")
        found[case] = {name: of[name] for name in PROGRAMS if name in of}
    return {case: own for case, own in found.items() if own}


def peak(of: dict[str, dict]) -> dict[str, Any]:
    """The record of the peak of memory: torch's allocations, or the plan of our compiler."""
    return of.get("peak_bytes") or of["planned_bytes"]


def programs(rows: Rows) -> Table:
    """A line for each program: tokens a second, share of the chip's FLOP/s, and peak of memory."""
    found, body, used = steps(rows), [], []
    for name, says in PROGRAMS.items():
        if name.endswith("-ckpt"):
            continue
        cells = []
        for own in found.values():
            with_checkpoints = name not in own
            of = own.get(f"{name}-ckpt" if with_checkpoints else name, {})
            words = (cell(of["tokens_per_s"], "{:,.0f}"), cell(of["mfu"], "{:.0%}"),
                     cell(peak(of), "{:.1f} GiB", GIB)) if of else ()  # fmt: skip
            cells.append(", ".join([*words, *["checkpointing"] * bool(of and with_checkpoints)]))
            used += of.values()
        tokens = f", {ACCUMULATED[name]}" if name in ACCUMULATED else ""
        body += [[says + tokens, *cells]] if any(cells) else []
    return ["program", *(", ".join(MODELS[case]) for case in found)], body, used


def others(rows: Rows) -> Table:
    """Products of other JAX libraries: speed beside ours in bf16 of the same run, and the loss."""
    every = select(on_gpus(rows), bench="end_to_end", case=TRAINED)
    found, body, used = grouped(every, "impl", "metric"), [], []
    for name in filter(found.get, PROGRAMS):
        of = found[name]
        speed = of["tokens_per_s"]
        body.append([PROGRAMS[name], cell(speed, "{:,.0f}"), f"{speed['ratio_to_default']:.2f}",
                     cell(peak(of), "{:.1f}", GIB), cell(of["compile_s"], "{:.0f}"),
                     cell(of["train_loss"], "{:.3f}")])  # fmt: skip
        used += of.values()
    head = ["program", "tokens/s", "of bf16 in the same run", "peak, GiB", "compilation, s",
            "training loss after 200 steps"]  # fmt: skip
    return head, body, used


def losses(rows: Rows) -> Table:
    """The loss of the linear head with its gradients."""
    every = select(on_gpus(rows), bench="end_to_end", case="loss and gradients")
    found, body, used = grouped(every, "impl", "metric"), [], []
    for name in filter(found.get, LOSSES):
        of = found[name]
        body.append([name, cell(of["device_ms"], "{:.1f}"),
                     cell(of["temporary_bytes"], "{:.2f}", GIB)])  # fmt: skip
        used += [of["device_ms"], of["temporary_bytes"]]
    head = ["16,384 tokens, 128,256 x 2048", "loss and gradients, ms", "temporaries, GiB"]
    return head, body, used


TABLES = {
    "end_to_end": Rendered(programs, "end_to_end"),
    "end_to_end_others": Rendered(others, "end_to_end"),
    "end_to_end_loss": Rendered(losses, "end_to_end"),
}
