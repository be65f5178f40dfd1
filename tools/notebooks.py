"""Runs the notebooks alone in an empty folder, and fills the cells that other files decide.

`python -m tools.notebooks` runs them at full size and stores what they print and draw; with names,
those alone. `--fill` only rewrites the filled cells: how to install, by the project's address
(tools/address.py); the style of figures (benchmarks/style.py); what is recorded, as
benchmarks/excerpts.py makes it. With --check it fails where one is out of date.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import excerpts
from tools.address import BRANCH, address, settings

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
QUICK = "OPTAX_LOWMEM_QUICK"  # 1 in the environment: the sizes that tests run
# in the code of a notebook -> the extra whose requirements it needs
_USES = {r"^\s*(?:import|from) flax\b": "flax", r"\blowmem\.checkpoint\b": "checkpoint"}
_DRAWING = "matplotlib"  # of the extra `examples`
_BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
_STYLE = ROOT / "benchmarks/style.py"
_RUN = "from nbclient.cli import main; main()"
_INSTALL = """\
INSTALL = "{what}"  # for pip: a wheel's path or address, a name on an index, or git+https://...
try:
    import optax_lowmem as lowmem
except ImportError:
    if not INSTALL:
        raise ImportError(
            "optax_lowmem is on no index yet. Build a wheel in a clone (make wheel), upload it, "
            "and set INSTALL to its path."
        ) from None
    %pip install -q "$INSTALL" {needs}
    import optax_lowmem as lowmem"""


def paths(names: list[str] | None = None) -> list[Path]:
    """Return the notebooks of these names, or all."""
    found = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    return [found[name] for name in names or found]


def read(path: Path) -> dict[str, Any]:
    """Return a notebook."""
    return json.loads(path.read_text(encoding="utf-8"))


def text(book: dict[str, Any]) -> str:
    """Return a notebook as it is stored."""
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def source(cell: dict[str, Any]) -> str:
    """Return the text of a cell."""
    return "".join(cell["source"])


def needs(book: dict[str, Any]) -> list[str]:
    """Return what a notebook requires beside the package and its dependencies."""
    cells = [cell for cell in book["cells"] if "install" not in cell["metadata"].get("tags", ())]
    code = "\n".join(source(cell) for cell in cells if cell["cell_type"] == "code")
    extras = settings()["project"]["optional-dependencies"]
    drawing = [one for one in extras["examples"] if one.startswith(_DRAWING)]
    used = [extras[extra] for use, extra in _USES.items() if re.search(use, code, re.MULTILINE)]
    return sum(used, drawing)


def install(where: str, needed: list[str]) -> str:
    """Return the first cell of code."""
    what = f"optax-lowmem @ git+{where}" if where else ""
    return _INSTALL.format(what=what, needs=" ".join(f'"{one}"' for one in needed))


def badge(name: str, where: str) -> str:
    """Return the line that opens a notebook elsewhere, none without an address or off GitHub."""
    host, _, repository = where.removeprefix("https://").partition("/")
    if host != "github.com":
        return ""
    colab = f"https://colab.research.google.com/github/{repository}"
    return f"[![Open in Colab]({_BADGE})]({colab}/blob/{BRANCH}/notebooks/{name}.ipynb)\n\n"


def style() -> str:
    """Return the cell that sets the style of figures: benchmarks/style.py without its docstring."""
    return _STYLE.read_text(encoding="utf-8").partition('"""\n\n')[2].rstrip()


def filled(book: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return a notebook with its filled cells written: `install`, `style` and excerpts by tag."""
    book = json.loads(json.dumps(book))
    first = book["cells"][0]
    prose = source(first)
    prose = prose[prose.index("# ") :]
    first["source"] = (badge(name, where) + prose).splitlines(keepends=True)
    for cell in book["cells"]:
        for tag in cell["metadata"].get("tags", ()):
            new = {"install": lambda: install(where, needs(book)), "style": style}.get(tag)
            if tag.startswith("records:"):
                new = excerpts.EXCERPTS[tag.removeprefix("records:")]
            if new:
                cell["source"] = new().splitlines(keepends=True)
    return book


def bare(environment: dict[str, str], quick: bool) -> dict[str, str]:
    """Return an environment in which only what is installed can be imported."""
    kept = {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "MPLBACKEND", QUICK)}
    return kept | ({QUICK: "1"} if quick else {})


def executed(book: Path, python: str = sys.executable, quick: bool = False) -> dict[str, Any]:
    """Run a notebook by `python`, alone in a new folder; return it with its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(book, folder))
        done = subprocess.run(
            [python, "-c", _RUN, copy.name, "--inplace", "--timeout=900"],
            cwd=folder, env=bare(dict(os.environ), quick), capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{book.name} failed:\n{done.stderr[-6000:]}")
        return read(copy)


def stored(book: dict[str, Any]) -> dict[str, Any]:
    """Return a run notebook without what differs from run to run by itself."""
    for cell in book["cells"]:
        cell["metadata"].pop("execution", None)
    book["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return book


def main() -> None:
    """Fills or runs notebooks, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of notebooks; default: all")
    parser.add_argument("--fill", action="store_true", help="only write the filled cells")
    parser.add_argument("--check", action="store_true", help="fail where one is out of date")
    args, stale = parser.parse_args(), []
    for path in paths(args.names):
        new = text(filled(read(path), path.stem, address()))
        stale += [path.name] if new != path.read_text(encoding="utf-8") else []
        if args.check:
            continue
        path.write_text(new, encoding="utf-8")
        if not args.fill:
            began = time.perf_counter()
            path.write_text(text(stored(executed(path))), encoding="utf-8")
            print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)
    if args.check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m tools.notebooks --fill")


if __name__ == "__main__":
    main()
