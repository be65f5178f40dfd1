"""Pages of the site that are made from notebooks/ and examples/: Markdown, and their pictures."""

import ast
import base64
import functools
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDED = {"style": "The style of the figures", "records": "Recorded numbers"}  # by tag
# script -> a picture of docs/figures that it draws
EXAMPLES = {"train_gpt": "demo", "train_llama": None, "finetune": None}


def fenced(text: str, language: str) -> str:
    """Return a block of code or output."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def folded(title: str, body: str) -> str:
    """Return a part that a reader opens."""
    return f'<details markdown="1"><summary>{title}</summary>\n\n{body}\n</details>\n'


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, with what it printed, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source + "\n")
            continue
        tags = [tag.partition(":")[0] for tag in cell["metadata"].get("tags", ())]
        title = next((FOLDED[tag] for tag in tags if tag in FOLDED), None)
        code = fenced(source, "python")
        parts.append(folded(title, code) if title else code)
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Picture {len(pictures)} of this notebook]({name})\n")
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(fenced(text, "text"))
    return "\n".join(parts), pictures


def example(path: Path, picture: str | None) -> str:
    """Return a script of examples/ as Markdown: what it says of itself, a picture, its source."""
    source = path.read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source)) or ""
    drawn = f"\n![What the script draws](../figures/{picture}.png)\n" if picture else ""
    return f"# {path.name}\n\n{doc}\n{drawn}\n{fenced(source, 'python')}"


@functools.cache
def pages() -> dict[str, str | bytes]:
    """Return the content of each generated file of the site, by its path."""
    found: dict[str, str | bytes] = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = notebook(path)
        found[f"notebooks/{path.stem}.md"] = text
        found |= {f"notebooks/{name}": data for name, data in pictures.items()}
    for name, picture in EXAMPLES.items():
        path = ROOT / "examples" / f"{name}.py"
        if path.exists():
            found[f"examples/{name}.md"] = example(path, picture)
    return found


def on_files(files: Any, *, config: Any, **others: Any) -> Any:
    """Add the generated files (a hook of MkDocs)."""
    from mkdocs.structure.files import File

    for name, content in pages().items():
        files.append(File.generated(config, name, content=content))
    return files
