"""Sets the version everywhere: `python -m tools.release 1.2.3`, before the tag v1.2.3.

The version stands in the files of `PLACES`, and the changes of
`[Unreleased]` in CHANGELOG.md become its own. `--check v1.2.3` fails unless all agree.
"""

import argparse
import datetime
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMBER = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
# file -> what stands around the version
PLACES = {
    "pyproject.toml": (r'(?m)^(version = ")', '"'),
    "CITATION.cff": (r"(?m)^(version: )", ""),
    "docs/citation.md": (r"(version = \{)", r"\}"),
    "tools/conda_recipe.yaml": (r'(?m)^(  version: ")', '"'),
}
_UNRELEASED = "## [Unreleased]\n"


def versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version that each file has; that of CHANGELOG.md is its newest released one."""
    found = {}
    for name, (before, after) in PLACES.items():
        (match,) = re.finditer(f"{before}({NUMBER}){after}", (root / name).read_text("utf-8"))
        found[name] = match[2]
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.search(rf"^## \[({NUMBER})\]", changes, re.MULTILINE)
    return found | {"CHANGELOG.md": released[1] if released else "none"}


def prepare(version: str, root: Path = ROOT) -> None:
    """Write a version into every file, and date its changes."""
    for name, (before, after) in PLACES.items():
        path = root / name
        text = path.read_text(encoding="utf-8")
        new = re.sub(f"{before}{NUMBER}(?={after})", rf"\g<1>{version}", text)
        path.write_text(new, encoding="utf-8")
    path = root / "CHANGELOG.md"
    changes = path.read_text(encoding="utf-8")
    if changes.count(_UNRELEASED) != 1 or f"## [{version}]" in changes:
        raise SystemExit(f"CHANGELOG.md has no [Unreleased], or has [{version}] already")
    head = f"{_UNRELEASED}\n## [{version}] - {datetime.date.today().isoformat()}\n"
    path.write_text(changes.replace(_UNRELEASED, head), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Set a version, or check a tag."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="1.2.3, or a tag v1.2.3")
    parser.add_argument("--check", action="store_true", help="fail where a file has another")
    args = parser.parse_args(arguments)
    version = args.version.removeprefix("v")
    if not re.fullmatch(NUMBER, version):
        raise SystemExit(f"{args.version} is no version such as 1.2.3 or 1.2.3rc1")
    if not args.check:
        prepare(version)
    other = {name: found for name, found in versions().items() if found != version}
    if other:
        raise SystemExit(f"not {version}: {other}; run python -m tools.release {version}")


if __name__ == "__main__":
    main()
