"""The records of measurements, without which a source distribution has no tests of this tier."""

import json

import pytest

from benchmarks import records

NEEDED = {"bench", "case", "impl", "metric", "value", "unit", "device", "jax", "commit"}


def test_every_record_says_what_and_where():
    files = sorted(records.RESULTS.glob("*.jsonl"))
    if not files:
        pytest.skip("no records here: a source distribution; the repo tier runs in a clone")
    for file in files:
        for line in file.read_text("utf-8").splitlines():
            assert json.loads(line).keys() >= NEEDED, f"{file.name}: {line[:200]}"
