"""The hook of the build: README and addresses of the package, from tools/address.py."""

import importlib.util
from pathlib import Path
from types import ModuleType

from hatchling.metadata.plugin.interface import MetadataHookInterface


def _address() -> ModuleType:
    # by its path: a build does not have the repository among its modules
    spec = importlib.util.spec_from_file_location("address", Path(__file__).with_name("address.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Hook(MetadataHookInterface):
    """Fills `readme` and `urls`, which pyproject.toml leaves dynamic."""

    def update(self, metadata: dict) -> None:
        """Write them into the metadata."""
        address = _address()
        where = address.address()
        metadata["readme"] = {"content-type": "text/markdown", "text": address.readme(where)}
        metadata["urls"] = address.urls(where)
