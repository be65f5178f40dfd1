"""Hooks of the site: links that leave docs/, which on a site lead to the project's address."""

import re
from typing import Any

from tools import address

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


def on_page_markdown(markdown: str, *, page: Any, **others: Any) -> str:
    """Rewrite the links of a page before it is converted (a hook of MkDocs)."""
    folder = page.file.src_uri.rpartition("/")[0]
    return leaving(markdown, folder, address.address())


def on_config(config: Any, **others: Any) -> Any:
    """Give the site the address, where there is one (a hook of MkDocs)."""
    where = address.address()
    if where:
        config.repo_url, config.edit_uri = where, f"edit/{address.BRANCH}/docs/"
    return config
