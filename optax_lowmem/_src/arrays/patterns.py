"""Glob patterns on the paths of parameters, such as `"*norm*"`."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence


def checked(what: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return patterns as a tuple; raises unless they are a sequence of strings, not one string.

    `what` names the argument in errors, and ends in its name.
    """
    if isinstance(patterns, str):
        raise TypeError(
            f"{what} is a tuple of patterns, got the string {patterns!r}: write "
            f"{what.split('.')[-1]}=({patterns!r},)"
        )
    patterns = tuple(patterns)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{what} is a tuple of patterns, got {patterns!r}")
    return patterns


def unmatched(name: str, pattern: str, paths: Sequence[str]) -> str | None:
    """Return an error message, with the nearest paths, for a pattern that matches none, or None."""
    if fnmatch.filter(paths, pattern):
        return None
    nearest = difflib.get_close_matches(pattern.replace("*", ""), paths, 3, cutoff=0)
    return f"{name} matches no leaf; the nearest are: {', '.join(nearest) or 'none'}"


def matching(what: str, patterns: Iterable[str], paths: Sequence[str]) -> set[str]:
    """Return the paths that match any pattern; raises for a pattern that matches none."""
    patterns = checked(what, patterns)
    for pattern in patterns:
        if error := unmatched(f"the pattern {pattern!r} of {what}", pattern, paths):
            raise ValueError(error)
    return {path for path in paths if any(fnmatch.fnmatchcase(path, glob) for glob in patterns)}
