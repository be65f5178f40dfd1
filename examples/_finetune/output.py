"""The folder that finetune.py writes: what run it has, its log, and the plot of its losses."""

import argparse
import contextlib
import json
import logging
import math
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _gpt.figure import BLUE, GREY, STYLE, plt

from optax_lowmem import checkpoint

RUN, LOG, PLOT, BOARD = "run.json", "log.jsonl", "loss.png", "tensorboard"
CHECKPOINTS, MODEL, ADAPTER = "checkpoints", "model", "adapter"
# what a resumed run may change
_FREE = ("offload", "resume", "until", "save_every", "print_every", "micro_batch", "budget",
         "out", "prompt", "tokens", "temperature", "implementation", "dtype",
         "skip_nonfinite")  # fmt: skip


def begin(args: argparse.Namespace) -> tuple[int, int | None]:
    """Return the step to go on from and the micro-batch of the run that the folder has.

    Raises:
      ValueError: if the folder has another run or other files.
    """
    out = args.out
    replaced = [out / name for name in (MODEL, ADAPTER)]
    if args.model.resolve() in [path.resolve() for path in (out, *replaced)]:
        raise ValueError(f"--out {out} would replace the model {args.model}: choose another --out")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: choose another --out")
    files = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if files and RUN not in files:
        some = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
        raise ValueError(f"--out {out} has other files ({some}): choose another --out")
    step = checkpoint.latest_step(out / CHECKPOINTS) if CHECKPOINTS in files else None
    if step is None:
        finished = [path for path in replaced if path.exists()]
        if finished:
            raise ValueError(f"{finished[0]} is the result of another run: choose another --out")
        return 0, None
    if not args.resume:
        raise ValueError(f"{out} has a run at step {step}: add --resume, or choose another --out")
    saved = json.loads((out / RUN).read_text("utf-8"))
    for name, value in _described(args).items():
        if saved.get(name) != value:
            raise ValueError(
                f"{out} has a run with {name} {saved.get(name)}, not {value}: resume it with the "
                "flags that it was begun with"
            )
    return step, saved.get("micro_batch")


def _described(args: argparse.Namespace) -> dict[str, str]:
    """Return the arguments that a resumed run must have; of files, their contents too."""
    described = {name: str(value) for name, value in vars(args).items() if name not in _FREE}
    for name in ("data", "validation"):
        if file := getattr(args, name):
            described[name] += f" (CRC-32 {zlib.crc32(file.read_bytes()):08x})"
    return described


def write_run(args: argparse.Namespace, micro_batch: int) -> None:
    """Describe a new run in its folder."""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / LOG).unlink(missing_ok=True)
    described = _described(args) | {"micro_batch": micro_batch}
    (args.out / RUN).write_text(json.dumps(described, indent=1), "utf-8")


def log(out: Path, **row: Any) -> None:
    """Append a line to the log; numbers that are not finite are null."""
    row = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    with (out / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")


def read_log(out: Path, until: float = math.inf) -> list[dict[str, Any]]:
    """Return the lines of the log up to a step; a line that a kill cut short is left out."""
    rows = []
    for line in (out / LOG).read_text("utf-8").split("\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if row["step"] <= until]


def cut_log(out: Path, step: int) -> int:
    """Remove the lines of what is done again after a step; return the number of steps skipped."""
    rows = [row for row in read_log(out, step) if row["step"] < step or "answer" not in row]
    (out / LOG).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return sum("skipped" in row for row in rows)


@contextlib.contextmanager
def one_error(what: str) -> Iterator[None]:
    """Raise one OSError where Orbax logs that of each thread, and TensorStore of each callback."""
    hook, sys.excepthook = sys.excepthook, lambda *error: None
    logging.disable(logging.ERROR)
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # the last: a closed event loop
        logging.getLogger("asyncio").disabled = True  # reports each failed write that is freed
        why = str(error).partition(" [")[0].rpartition('": ')[2]
        raise OSError(f"{what}: {why}") from None  # callbacks may follow
    finally:
        logging.disable(logging.NOTSET)
    sys.excepthook = hook


def draw(out: Path, optimizer: str) -> None:
    """Plot the losses of the log, and write them for TensorBoard if that is installed."""
    rows = read_log(out)
    of = {
        name: [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        for name in ("loss", "validation_loss")
    }
    kind = "Held-out" if of["validation_loss"] else "Training"
    (_, first), *_, (steps, last) = (of["validation_loss"] or of["loss"]) * 2
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
        axes.plot(*zip(*of["loss"], strict=True), color=GREY, lw=1, label="training")
        axes.plot(*zip(*of["validation_loss"], strict=True), color=BLUE, marker="o", ms=4,
                  label="held out")  # fmt: skip
        axes.set(xlabel="step", title="loss, nats per token")
        axes.grid(axis="y")
        axes.legend(labelcolor="linecolor")
        figure.suptitle(f"{kind} loss {first:.3f} → {last:.3f} in {steps} steps of {optimizer}",
                        x=0.01, ha="left", fontsize=12, fontweight="bold")  # fmt: skip
        figure.savefig(out / PLOT, dpi=150, facecolor="white")
        plt.close(figure)
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        return
    shutil.rmtree(out / BOARD, ignore_errors=True)
    with SummaryWriter(str(out / BOARD)) as writer:
        for row in rows:
            for name, value in row.items():
                if name != "step" and isinstance(value, float):
                    writer.add_scalar(name, value, row["step"])


def contents(out: Path) -> str:
    """Return a line for each thing that a run has written; the last is the model."""
    known = {
        LOG: "losses, rates and times of all steps", PLOT: "the losses",
        CHECKPOINTS: "for --resume", ADAPTER: "the adapters, for peft",
        MODEL: "the model, for transformers",
    }  # fmt: skip
    return "\n".join(f"{out / n}: {what}" for n, what in known.items() if (out / n).exists())
