"""Parameters that a pattern selects."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable

import jax

from .model import Llama, leaf_path


def frozen_by(pattern: str, model: Llama) -> Callable[[str], bool]:
    """Return whether a path, such as `layers/0/mlp/up_proj/kernel`, is of a frozen parameter.

    Args:
      pattern: regular expression that is searched in paths.
      model: whose parameters have the paths.

    Raises:
      ValueError: if the pattern is none, or matches no parameter, or all of them.
    """
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise ValueError(f"--freeze {pattern!r} is no regular expression: {error}") from None
    apart = dataclasses.replace(model, stacked=False, lora=None)
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(apart.weights, jax.random.key(0)))
    paths = [leaf_path(keys) for keys, _ in leaves]
    matched = [path for path in paths if search(path)]
    if not matched:
        names = [*{name: None for path in paths for name in path.split("/")}, *paths]
        near = ", ".join(difflib.get_close_matches(pattern, names, 3)) or ", ".join(paths[:3])
        raise ValueError(f"--freeze {pattern!r} matches no parameter; near it are: {near}")
    if len(matched) == len(paths):
        raise ValueError(f"--freeze {pattern!r} matches every parameter: nothing would be trained")
    return lambda path: search(path) is not None
