"""Rows of a table that every run tests, and those that wait for the full tier."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def rows(every: Iterable[Any], default: Sequence[Any]) -> list[Any]:
    """The parameters `every`; those that are not in `default` belong to the full tier."""
    found = []
    for row in every:
        values = row if isinstance(row, tuple) else (row,)
        found.append(pytest.param(*values, marks=() if row in default else pytest.mark.full))
    return found


def in_turn(*tables: Iterable[Any]) -> list[Any]:
    """The product of the tables; the default tier has each value of each table at least once."""
    lists = [list(table) for table in tables]
    turns = range(max(map(len, lists)))
    default = [tuple(table[i % len(table)] for table in lists) for i in turns]
    return rows(itertools.product(*lists), default)
