"""Glob patterns on the paths of parameters, such as `"*norm*"`."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence


def checked(what: str, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return patterns as a tuple.

    Args:
      what: the argument that they are, which ends in its name.
      patterns: a sequence of strings.

    Raises:
      TypeError: for anything else, such as one string.
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
    """Return an error message for a pattern that matches no path, or None.

    Args:
      name: how to call the pattern.
      pattern: a glob.
      paths: paths of parameters; the message has the nearest.
    """
    if fnmatch.filter(paths, pattern):
        return None
    nearest = difflib.get_close_matches(pattern.replace("*", ""), paths, 3, cutoff=0)
    return f"{name} matches no leaf; the nearest are: {', '.join(nearest) or 'none'}"


def matching(what: str, patterns: Iterable[str], paths: Sequence[str]) -> set[str]:
    """Return the paths that match any pattern.

    Args:
      what: the argument that the patterns are.
      patterns: globs.
      paths: paths of parameters.

    Raises:
      TypeError: unless the patterns are a sequence of strings.
      ValueError: for a pattern that matches no path.
    """
    patterns = checked(what, patterns)
    for pattern in patterns:
        if error := unmatched(f"the pattern {pattern!r} of {what}", pattern, paths):
            raise ValueError(error)
    return {path for path in paths if any(fnmatch.fnmatchcase(path, glob) for glob in patterns)}
