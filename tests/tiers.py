"""Rows of a table that every run tests, those that wait for the full tier, and its samples."""

import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

SAMPLES = 8  # CI runs one of them: `--sample`


def sample_of(node_id: str) -> int:
    """The sample of the full tier that a test belongs to; the same on every machine."""
    return zlib.crc32(node_id.encode()) % SAMPLES


def rows(every: Iterable[Any], default: Sequence[Any]) -> list[Any]:
    """The parameters `every`; those that are not in `default` belong to the full tier."""
    found = []
    for row in every:
        values = row if isinstance(row, tuple) else (row,)
        found.append(pytest.param(*values, marks=() if row in default else pytest.mark.full))
    return found


# Pallas' interpreter takes seconds to compile: the full tier has it where a test has this.
triton_often = pytest.mark.parametrize(
    "backend", rows(["interpret", "triton"], ["triton"]), indirect=True
)


def in_turn(*tables: Iterable[Any]) -> list[Any]:
    """The product of the tables; the default tier has each value of each table at least once."""
    lists = [list(table) for table in tables]
    turns = range(max(map(len, lists)))
    default = [tuple(table[i % len(table)] for table in lists) for i in turns]
    return rows(itertools.product(*lists), default)
