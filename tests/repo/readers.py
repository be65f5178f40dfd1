"""Environments that have what a notebook's first cell installs, and nothing else.

They are made of links to the packages that are installed here: of the requirements that pip would
follow, and of what runs a notebook. So nothing is downloaded.
"""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import notebooks

PACKAGE = "optax-lowmem"
RUNNER = ("ipykernel", "nbclient", "nbformat")  # Colab and Jupyter have them


def lines(notebook: Path) -> list[str]:
    """Return the lines of a notebook's first cell of code."""
    cells = notebooks.read(notebook)["cells"]
    first = next(cell for cell in cells if cell["cell_type"] == "code")
    return notebooks.source(first).splitlines()


def required(*names: str) -> set[str]:
    """Return the distributions that pip would install for requirements, by their metadata here."""
    seen, left = set(), [Requirement(name) for name in names]
    while left:
        one = left.pop()
        key = canonicalize_name(one.name), frozenset(one.extras)
        if key in seen:
            continue
        seen.add(key)
        for text in importlib.metadata.requires(one.name) or ():
            inner = Requirement(text)
            extras = one.extras or {""}
            if not inner.marker or any(inner.marker.evaluate({"extra": e}) for e in extras):
                left.append(inner)
    return {name for name, _ in seen}


def link(distributions: set[str], site: Path) -> None:
    """Link the files of distributions into a folder, those of shared packages one by one."""
    owners = defaultdict(set)
    for found in importlib.metadata.distributions():
        name = canonicalize_name(found.metadata["Name"])
        for top in {file.parts[0] for file in found.files or ()}:
            owners[top].add(name)
    for name in distributions:
        found = importlib.metadata.distribution(name)
        for file in found.files or ():
            top = file.parts[0]
            if top == "..":  # a script
                continue
            one = Path(top) if len(owners[top]) == 1 else Path(file)
            if top != "__pycache__" and not (site / one).exists():
                (site / one).parent.mkdir(parents=True, exist_ok=True)
                os.symlink(found.locate_file(one), site / one)


def environment(folder: Path, wheel: Path, needed: tuple[str, ...]) -> Path:
    """Return an interpreter that has the wheel, and what it, `needed` and `RUNNER` require."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    base = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", base))
    link(required(PACKAGE, *needed, *RUNNER) - {PACKAGE}, site)
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    return folder / "bin/python"
