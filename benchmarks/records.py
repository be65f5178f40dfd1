"""Records of measurements: one JSON object a line in benchmarks/results/<device>.jsonl."""

import argparse
import datetime
import functools
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

Rows = list[dict[str, Any]]

RESULTS = Path(__file__).parent / "results"
# the device of what is compiled for a GPU on a machine without one
H100_NEVER_RUN = "NVIDIA H100 80GB HBM3 (compiled for, never run)"


def commit() -> str:
    """The commit of this checkout, with a plus where the tree differs from it.

    COMMIT in the environment speaks for a copy without its repository.
    """
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    words = ["git", "describe", "--always", "--abbrev=10", "--dirty=+"]
    try:
        return subprocess.check_output(
            words, cwd=RESULTS.parent, text=True, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device() -> str:
    """Kind of the device that jax uses, with the cores of a CPU."""
    first = jax.devices()[0]
    if first.platform != "cpu":
        return first.device_kind
    # what this process may use, where the system says it
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu-{cores}-cores"


def record(
    bench: str, case: str, impl: str, metric: str, value: float, unit: str, **more: Any
) -> dict[str, Any]:
    """One measurement with where, when and at which commit it was made."""
    own = {"bench": bench, "case": case, "impl": impl, "metric": metric, "value": value}
    where = {"unit": unit, "device": device(), "jax": jax.__version__, "commit": commit()}
    return own | where | {"date": datetime.date.today().isoformat()} | more


def suite(**options: dict[str, Any]) -> Callable[[Callable[..., Iterable[Rows]]], Any]:
    """Make a benchmark's `main`, with options by name, of what yields its records."""

    def made(measure: Callable[..., Iterable[Rows]]) -> Callable[..., None]:
        @functools.wraps(measure)
        def main(arguments: Sequence[str] | None = None) -> None:
            parser = command_line(measure.__globals__["__doc__"])
            for name, how in options.items():
                parser.add_argument(f"--{name.replace('_', '-')}", **how)
            args = parser.parse_args(arguments)
            for rows in measure(args):
                show(rows)
                keep(rows, args.record)

        return main

    return made


def records_of(
    bench: str, case: str, impl: str, values: Mapping[str, tuple[float, Any]], **more: Any
) -> Rows:
    """Return a record of each metric: metric -> its value and unit."""
    return [record(bench, case, impl, metric, *one, **more) for metric, one in values.items()]


def append(rows: Rows, path: Path | None = None) -> Path:
    """Appends records to a file, by default that of their device, which is one."""
    if path is None:
        of = rows[0]["device"] if rows else device()
        name = re.sub(r"[^a-z0-9]+", "-", of.lower()).strip("-")
        path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option that every benchmark has: `--record`, for `keep`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", nargs="?", const=True, metavar="FILE",
                        help="append records to FILE; default: that of the device in "
                        "benchmarks/results")  # fmt: skip
    return parser


def keep(rows: Rows, to: bool | str | Path | None) -> Path | None:
    """Appends records where `--record` asks for it, and says where; return the file."""
    if not to or not rows:
        return None
    path = append(rows, None if to is True else Path(to))
    print(f"recorded in {path}", flush=True)
    return path


def show(rows: Rows) -> None:
    for row in rows:
        names = f"{row['case']:<44} {row['impl']:<30} {row['metric']:<24}"
        print(f"{names} {row['value']:>12.6g} {row['unit'] or ''}", flush=True)


# unit of older records -> unit of new ones
RENAMED_UNITS = {
    "bytes a parameter": "bytes per parameter",
    "bytes a sampled parameter": "bytes per sampled parameter",
}


def load(path: Path) -> Rows:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    for row in rows:
        if (unit := row.get("unit")) in RENAMED_UNITS:
            row["unit"] = RENAMED_UNITS[unit]
    return rows


def all_records() -> Rows:
    return [row for path in sorted(RESULTS.glob("*.jsonl")) for row in load(path)]


def on_gpus(rows: Rows) -> Rows:
    return [row for row in rows if not row["device"].startswith(("cpu", "TPU"))]


def by_gpu(rows: Rows) -> dict[str, Rows]:
    """GPU, by its short name -> the records of its runs."""
    found: dict[str, Rows] = {}
    for row in on_gpus(rows):
        found.setdefault(gpu_name(row), []).append(row)
    return found


def gpu_name(row: dict[str, Any]) -> str:
    """Return the short name of a record's GPU, such as H100."""
    return str(row["device"].removeprefix("NVIDIA ").split()[0])


def select(rows: Rows, **wanted: Any) -> Rows:
    return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]


def last(rows: Rows, **wanted: Any) -> dict[str, Any] | None:
    """The record stored last of those that match."""
    return (select(rows, **wanted) or [None])[-1]


def grouped(rows: Rows, *keys: str) -> dict[Any, Any]:
    """Nested dicts by the fields `keys` of records, in stored order; the last record of each."""
    found: dict[Any, Any] = {}
    for row in rows:
        at = found
        for key in keys[:-1]:
            at = at.setdefault(row[key], {})
        at[row[keys[-1]]] = row
    return found


def alike(rows: Rows, *keys: str) -> Rows:
    """The records with these fields as the last one has them; default: its device and jax."""
    wanted = {key: rows[-1][key] for key in keys or ("device", "jax")} if rows else {}
    return select(rows, **wanted)


IDENTITY = ("bench", "device", "case", "impl", "metric", "seed", "jax")  # of a measurement


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the records of one measurement have in common."""
    return tuple(row.get(key) for key in IDENTITY)


def newest(rows: Rows, **wanted: Any) -> Rows:
    """Return the last record of each measurement, of those that match."""
    return list({identity(row): row for row in select(rows, **wanted)}.values())
