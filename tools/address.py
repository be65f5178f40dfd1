"""Fills what depends on the project's address: install lines, badges, and the README of an index.

The address is `[tool.optax-lowmem] address` in pyproject.toml, empty while there is none.
`python -m tools.address https://github.com/owner/name` sets it, and rewrites the pages and the
install cells of notebooks; without an argument it rewrites them by the one that is set. With
--check it fails where a page is out of date.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/quickstart.md")
BRANCH = "main"
_MARKED = re.compile(r"(<!-- address:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE)


def settings() -> dict:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def address() -> str:
    """Return where the project is, without a slash at its end; empty if it is nowhere yet."""
    return settings()["tool"]["optax-lowmem"]["address"].rstrip("/")


def install(where: str) -> str:
    """Return how to install the package."""
    if where:
        return f'```\npip install "optax-lowmem @ git+{where}"\n```\n'
    return (
        "The package is not on PyPI yet. Install it from a clone of this repository, or build a "
        "wheel there:\n\n"
        "```\n"
        "pip install '.[flax,checkpoint]'  # in the clone; without extras: pip install .\n"
        'make wheel && pip install "$(ls dist/*.whl)[flax,checkpoint]"  # the wheel\n'
        "```\n"
    )


def badges(where: str) -> str:
    """Return the badges, none without an address."""
    if not where:
        return ""
    shields, license = "https://img.shields.io/badge", f"{where}/blob/{BRANCH}/LICENSE"
    tests = f"{where}/actions/workflows/tests.yml"
    return (
        f"[![tests]({tests}/badge.svg)]({tests})\n"
        f"[![Python 3.11 or later]({shields}/python-3.11%2B-blue)]({where})\n"
        f"[![License: Apache-2.0]({shields}/license-Apache--2.0-green)]({license})\n"
    )


BLOCKS = {"install": install, "badges": badges}


def filled(text: str, where: str) -> str:
    """Return a page with its blocks written for an address."""
    return _MARKED.sub(lambda m: m[1] + BLOCKS[m[2]](where) + m[3], text)


def outside(text: str, where: str, folder: str = "") -> str:
    """Return a page whose relative links hold where its repository is not around it.

    Without an address pictures become their description, and links their text.
    """

    def link(found: re.Match) -> str:
        picture, words, target = found.groups()
        path, _, anchor = target.partition("#")
        path = _normal(f"{folder}/{path}" if folder else path)
        if not where:
            return f"*{words}*" if picture else words
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({where}/{kind}/{BRANCH}/{path}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, text)


def _normal(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def readme(where: str) -> str:
    """Return the README as a package index shows it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return _COMMENT.sub("", outside(filled(text, where), where))


def urls(where: str) -> dict[str, str]:
    """Return the package's addresses."""
    if not where:
        return {}
    blob = f"{where}/blob/{BRANCH}"
    return {
        "Homepage": where,
        "Source": where,
        "Documentation": f"{where}/tree/{BRANCH}/docs",
        "Changelog": f"{blob}/CHANGELOG.md",
        "Issues": f"{where}/issues",
    }


def moved(text: str, where: str) -> str:
    """Return pyproject.toml with another address."""
    return re.sub(r'(?m)^address = ".*"$', lambda _: f'address = "{where.rstrip("/")}"', text)


def main() -> None:
    """Sets the address where one is given, and rewrites the pages; --check only looks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where", nargs="?", help="the new address")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    check, stale = args.check, []
    if args.where is not None:
        project = ROOT / "pyproject.toml"
        project.write_text(moved(project.read_text("utf-8"), args.where), encoding="utf-8")
        fill = [sys.executable, "-m", "tools.notebooks", "--fill"]
        subprocess.run(fill, cwd=ROOT, check=True)
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        new = filled(text, address())
        stale += [name] if new != text else []
        if not check:
            (ROOT / name).write_text(new, encoding="utf-8")
    if check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m tools.address")


if __name__ == "__main__":
    main()
