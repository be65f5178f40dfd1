"""SmolLM2 fine-tuned on docstrings: all weights in f32 and in bf16, LoRA, and QLoRA.

Each run is one of examples/finetune.py in a process of its own. The texts are the docstrings of
installed packages, as answers to questions about their functions; every 50th is held out.

    python -m benchmarks.run finetune --model smollm2 --impl flash_adamw --seed 0 1 2 --record
"""

import argparse
import ast
import importlib.metadata
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT, records
from benchmarks.records import Rows
from benchmarks.render import GIB, Rendered, Table

BASE, OURS, LORA, QLORA = "optax.adamw", "flash_adamw", "lora", "qlora"
MATRICES = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
# name -> what differs
RUNS = {
    BASE: "--optimizer optax.adamw --lr 1e-4",
    OURS: "--optimizer flash_adamw --lr 1e-4",
    LORA: f"--optimizer flash_adamw --lr 1e-3 --lora {MATRICES} --rank 16",
}
RUNS[QLORA] = f"{RUNS[LORA]} --base nf4"
NAMES = {
    BASE: "`optax.adamw`, f32",
    OURS: "`flash_adamw`, bf16",
    LORA: "LoRA, rank 16",
    QLORA: "QLoRA, rank 16",
}
PACKAGES = ("jax", "networkx", "numpy", "scipy", "sklearn", "torch")
HELD_OUT = 50  # one of so many docstrings
SHORTEST = 200  # characters
PROMPT = "In Python, what is math.gcd?"


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """The public classes and functions of a package's sources, which are not imported."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None
    root = Path(found.origin).parent

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name[0] != "_":
                yield f"{name}.{child.name}", ast.get_docstring(child) or ""
                yield from visit(child, f"{name}.{child.name}")

    for file in sorted(root.rglob("*.py")):
        parts = [package, *file.relative_to(root).with_suffix("").parts]
        if not any(part.startswith("test") for part in parts):
            module = ".".join(part for part in parts if part[0] != "_")
            yield from visit(ast.parse(file.read_text("utf-8")), module)


def version(package: str) -> str:
    """The version of what a package is imported as."""
    return importlib.metadata.version({"sklearn": "scikit-learn"}.get(package, package))


def write_texts(folder: Path, packages: Sequence[str]) -> dict[str, int]:
    """Writes chats, of each docstring one: train.jsonl and held_out.jsonl; count them by package.

    Packages are those that are installed, with their versions: "numpy 2.5.2".
    """
    texts: dict[str, str] = {}  # docstring -> name
    counts = {}
    for package in packages:
        before = len(texts)
        for name, text in docstrings(package):
            if len(text) >= SHORTEST:
                texts.setdefault(text, name)
        counts[f"{package} {version(package)}"] = len(texts) - before
    chats = [
        [
            {"role": "user", "content": f"In Python, what is {name}?"},
            {"role": "assistant", "content": text},
        ]
        for text, name in texts.items()
    ]
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats]
    held_out = lines[::HELD_OUT]
    del lines[::HELD_OUT]
    (folder / "train.jsonl").write_text("".join(lines), "utf-8")
    (folder / "held_out.jsonl").write_text("".join(held_out), "utf-8")
    return counts


def run(args: argparse.Namespace, texts: Path, impl: str, seed: int) -> Rows:
    """The log of a run of the example."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, str(ROOT / "examples/finetune.py"), "--model", str(args.model),
            "--data", str(texts / "train.jsonl"), "--validation", str(texts / "held_out.jsonl"),
            "--out", out, "--seed", str(seed), "--steps", str(args.steps), "--prompt", PROMPT,
            "--sequence", str(args.sequence), "--batch", str(args.batch),
            "--micro-batch", str(args.batch), *RUNS[impl].split(),
        ]  # fmt: skip
        command += ["--lr", str(args.lr)] if args.lr else []
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise SystemExit(code)
        lines = Path(out, "log.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def summary(log: Rows, case: str, impl: str, **about: Any) -> Rows:
    """The records of a run's log; that of the loss has the curve and the generated texts."""
    steps = [row for row in log if "loss" in row]
    curve = [(row["step"], row["validation_loss"]) for row in log if "validation_loss" in row]
    values: dict[str, tuple[float, str]] = {
        "val_loss": (curve[-1][1], "nats"),
        "tokens_per_s": (statistics.median(row["tokens_per_s"] for row in steps), "tokens/s"),
    }
    if steps[-1]["peak_bytes"] is not None:
        values["peak_bytes"] = steps[-1]["peak_bytes"], "B"
    loss, *rest = records.records_of("finetune", case, impl, values, **about)
    answers = [row["answer"] for row in log if "answer" in row]
    return [loss | {"curve": curve, "prompt": PROMPT, "answers": answers}, *rest]


_OPTIONS: dict[str, dict[str, Any]] = {
    "model": dict(type=Path, required=True, metavar="FOLDER", help="of Hugging Face"),
    "impl": dict(nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME",
                 help=f"{', '.join(RUNS)} (all)"),
    "seed": dict(type=int, nargs="+", default=[0, 1, 2], metavar="N", help="(0 1 2)"),
    "lr": dict(type=float, help="instead of each run's"),
    "steps": dict(type=int, default=500, help="(500)"),
    "sequence": dict(type=int, default=1024, help="(1024)"),
    "batch": dict(type=int, default=8, help="(8)"),
    "packages": dict(nargs="+", default=PACKAGES, metavar="NAME", help=f"({' '.join(PACKAGES)})"),
}  # fmt: skip


@records.suite(**_OPTIONS)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    # this process names the device in the records, and leaves its memory to the runs
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    case = f"{args.model.name}, {args.steps} steps of {args.batch} x {args.sequence} tokens"
    with tempfile.TemporaryDirectory() as folder:
        counts = write_texts(Path(folder), args.packages)
        for impl, seed in itertools.product(args.impl, args.seed):
            print(f"== {impl}, seed {seed}", flush=True)
            log = run(args, Path(folder), impl, seed)
            name = f"{impl} lr={args.lr:g}" if args.lr else impl
            yield summary(log, case, name, seed=seed, docstrings=counts)


def by_impl(rows: Rows) -> dict[str, dict[str, dict[int, dict[str, Any]]]]:
    """Implementation, the baseline first -> metric -> seed -> record, of the last device."""
    found = records.alike(records.select(rows, bench="finetune"), "device", "jax", "case")
    of = records.grouped(found, "impl", "metric", "seed")
    order = [*RUNS, *sorted(of.keys() - RUNS)]
    return {impl: of[impl] for impl in order if impl in of}


def spread(values: Iterable[float], form: str = "{:.4f}") -> str:
    """The mean and the standard deviation."""
    values = list(values)
    mean = form.format(statistics.mean(values))
    if len(values) < 2:
        return mean
    return f"{mean} ± {form.format(statistics.stdev(values)).removeprefix('+')}"


def losses(of: dict[str, dict[int, dict[str, Any]]]) -> dict[int, float]:
    """Seed -> held-out loss at the end."""
    return {seed: row["value"] for seed, row in of.get("val_loss", {}).items()}


def label(impl: str) -> str:
    """Return the name of a run in tables."""
    name, _, rate = impl.partition(" lr=")
    return NAMES[name] + (f", rate {rate}" if rate else "")


def table(rows: Rows) -> Table:
    """Each implementation: its held-out loss and that over the baseline's, its speed and peak."""
    head = ["", "seeds", "held-out loss", "over `optax.adamw` of the same seed", "tokens/s",
            "peak, GiB"]  # fmt: skip
    body, used, found = [], [], by_impl(rows)
    for impl, of in found.items():
        base = impl.replace(OURS, BASE) if impl.startswith(OURS) else BASE  # at the same rate
        plain, ours = losses(found.get(base, {})), losses(of)
        pairs = [loss - plain[seed] for seed, loss in ours.items() if seed in plain]
        speeds, peaks = ([row["value"] for row in of.get(metric, {}).values()]
                         for metric in ("tokens_per_s", "peak_bytes"))  # fmt: skip
        body.append([
            label(impl), str(len(ours)), spread(ours.values()),
            spread(pairs, "{:+.4f}") if pairs and BASE not in impl else "",
            f"{statistics.median(speeds):,.0f}" if speeds else "",
            f"{max(peaks) / GIB:.1f}" if peaks else "",
        ])  # fmt: skip
        used += [row for one in of.values() for row in one.values()]
    return head, body, used


def texts(rows: Rows) -> Table:
    """How the first seed's answers begin before training, and after it."""
    body, used = [], []
    for impl, of in by_impl(rows).items():
        first = of["val_loss"].get(0)
        if first and impl in RUNS:
            before, after = (textwrap.shorten(text, 90, placeholder=" ...")
                             for text in first["answers"])  # fmt: skip
            body += [] if body else [["before", before]]
            body.append([label(impl), after])
            used.append(first)
    prompt = used[0]["prompt"] if used else PROMPT
    body = [[name, text.replace("|", "\\|")] for name, text in body]
    return ["", f'"{prompt}"'], body, used


def draw() -> Any:
    from benchmarks import style
    from benchmarks.style import plt

    found = by_impl(records.newest(records.all_records()))
    if BASE not in found:
        raise SystemExit("no records: run finetune first")
    figure, (axes, over) = plt.subplots(1, 2, figsize=(8, 3.2))
    curves = {
        impl: {seed: dict(row["curve"]) for seed, row in found[impl]["val_loss"].items()}
        for impl in RUNS
        if impl in found
    }
    colors = dict(zip(RUNS, (style.BLACK, style.VERMILION, style.BLUE, style.GREEN), strict=True))
    for impl, of in curves.items():
        steps = list(next(iter(of.values())))
        means = [statistics.mean(one[step] for one in of.values()) for step in steps]
        how = {"ls": "--"} if impl == OURS else {}
        axes.plot(steps, means, color=colors[impl], label=NAMES[impl].replace("`", ""), **how)
        for seed, one in of.items():
            if impl == OURS and seed in curves[BASE]:
                more = [1e3 * (one[step] - curves[BASE][seed][step]) for step in steps]
                over.plot(steps, more, color=colors[impl], label=f"seed {seed}", lw=1)
    over.axhline(0, color=style.BLACK, lw=1)
    axes.set(xlabel="step", title="held-out loss, nats per token; mean of seeds")
    over.set(xlabel="step", title="flash_adamw over optax.adamw, 0.001 nats")
    axes.legend()
    style.name_lines(over)
    ends = [statistics.mean(losses(found[impl]).values()) for impl in (BASE, OURS)]
    style.headline(figure, f"SmolLM2 fine-tuned in bf16 ends at {ends[1]:.4f}, in f32 at "
                   f"{ends[0]:.4f}")  # fmt: skip
    return figure


FIGURES = {"finetune": draw}
TABLES = {
    "finetune": Rendered(table, "finetune --model smollm2"),
    "finetune_texts": Rendered(texts, "finetune --model smollm2"),
}
