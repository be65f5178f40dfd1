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
        changed = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            made: Any = field.default_factory
            # `MISSING`, the default of a field without one, equals no value
            default = field.default if made is dataclasses.MISSING else made()
            if field.repr and getattr(self, field.name) != default:
                changed.append(f"{field.name}={getattr(self, field.name)!r}")
        return f"{type(self).__name__}({', '.join(changed)})"
