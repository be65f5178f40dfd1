"""Hooks of the site: links that leave docs/, and the layout of pages of results."""

import re
from typing import Any

from tools import address, rendered
from tools.rendered import on_files

__all__ = ["on_config", "on_files", "on_page_content", "on_page_markdown"]

RESULTS = "results/"  # evidence, with wide tables
# a page or a folder -> what it counts for in search, beside 1 of other user pages
BOOSTS = {"choose.md": 3, RESULTS: 0.2, "examples/": 0.4, "internals/": 0.4, "notebooks/": 0.4,
          "api/": 0.7}  # fmt: skip
_RENDERED = re.compile(r"((?:\.\./)+)(notebooks|examples)/(\w+)\.(?:ipynb|py)\)")
_LEAVES = re.compile(r"(!?)\[([^\]]*)\]\(((?:\.\./)+[^)\s]*)\)")


def leaving(text: str, folder: str, where: str) -> str:
    """Return a page of docs/`folder` whose links out of docs/ lead to an address, or nowhere."""
    depth = len([part for part in folder.split("/") if part])

    def link(found: re.Match) -> str:
        ups = found[3].count("../")
        if ups <= depth:
            return found[0]
        return address.outside(found[0], where, f"docs/{folder}" if folder else "docs")

    return _LEAVES.sub(link, text)


def inside(text: str, folder: str) -> str:
    """Return a page of docs/`folder` whose links to notebooks and examples lead to their pages."""
    up = "../" * len([part for part in folder.split("/") if part])

    def link(found: re.Match) -> str:
        kind, name = found[2], found[3]
        page = f"{kind}/{name}.md"
        return f"{up}{page})" if found[1] == f"../{up}" and page in rendered.pages() else found[0]

    return _RENDERED.sub(link, text)


def on_page_markdown(markdown: str, *, page: Any, **others: Any) -> str:
    """Rewrite the links of a page before it is converted (a hook of MkDocs)."""
    folder = page.file.src_uri.rpartition("/")[0]
    boost = BOOSTS.get(page.file.src_uri) or BOOSTS.get(f"{folder}/")
    if boost:
        page.meta["search"] = {"boost": boost}
    if f"{folder}/" == RESULTS:
        page.meta["hide"] = ["toc"]
    return leaving(inside(markdown, folder), folder, address.address())


def on_page_content(html: str, *, page: Any, **others: Any) -> str:
    """Mark a page of results for the style sheet, and its tables as no text to search."""
    if not page.file.src_uri.startswith(RESULTS):
        return html
    html = html.replace("<table>", "<table data-search-exclude>")
    return f'<div class="evidence">\n{html}\n</div>'


def on_config(config: Any, **others: Any) -> Any:
    """Give the site the address, where there is one (a hook of MkDocs)."""
    where = address.address()
    if where:
        config.repo_url, config.edit_uri = where, f"edit/{address.BRANCH}/docs/"
    return config
