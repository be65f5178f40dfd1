"""Leaves chosen by glob patterns on their paths, as in `Policy`."""

import fnmatch
from collections.abc import Sequence
from typing import Any


def chosen(named: Sequence[tuple[str, Any]], patterns: Sequence[str]) -> list[tuple[str, Any]]:
    """The (path, leaf) pairs that some pattern matches, in order.

    Args:
      named: (path, leaf) pairs.
      patterns: globs such as `"*embed*"`.

    Raises:
      TypeError: for a string instead of a sequence of them.
      ValueError: for a pattern that no path matches.
    """
    if isinstance(patterns, str):
        raise TypeError(
            f"leaves is a tuple of patterns, got the string {patterns!r}: write "
            f"leaves=({patterns!r},)"
        )
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path, _ in named):
            names = ", ".join(path for path, _ in named[:5])
            raise ValueError(
                f"no leaf matches the pattern {pattern!r}: the leaves are {names or 'none'}"
                + (", ..." if len(named) > 5 else "")
            )
    return [
        (path, leaf)
        for path, leaf in named
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    ]
