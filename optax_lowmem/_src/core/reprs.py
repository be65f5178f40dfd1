"""A short repr for dataclasses with many defaults."""

import dataclasses
from typing import Any


class ShowsChanges:
    """Base of dataclasses whose repr shows only the fields that differ from their defaults."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Set the short repr of a subclass before `dataclass`, which keeps an existing one."""
        super().__init_subclass__(**more)
        if "__repr__" not in vars(cls):
            cls.__repr__ = ShowsChanges.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Return `Class(field=value, ...)`."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields
            if f.repr and getattr(self, f.name) != _default(f)
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


def _default(field: Any) -> Any:
    """Return the default of a field; `MISSING`, which equals no value, if it has none."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()
