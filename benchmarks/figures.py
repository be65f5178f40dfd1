"""Draws the pictures of docs/ from the records: `python -m benchmarks.figures [NAME ...]`."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported
from benchmarks import ROOT, render  # noqa: E402

FOLDER = ROOT / "docs/figures"
# modules below benchmarks.suites that have `FIGURES`: name of a picture -> what draws it
SUITES = (
    "activations.figures", "adam_mini.figures", "end_to_end.figures", "finetune",
    "flashoptim.figures", "formats.figures", "gaussws.figures", "pairs.figures", "release",
    "spikes", "switchback.figures",
)  # fmt: skip

FIGURES: dict[str, Callable[[], Any]] = {}
for suite in SUITES:
    FIGURES |= importlib.import_module(f"benchmarks.suites.{suite}").FIGURES


def main() -> None:
    """Draws the named pictures, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    for name in parser.parse_args().names or FIGURES:
        print(render.save(FIGURES[name](), FOLDER / f"{name}.png"))


if __name__ == "__main__":
    main()
