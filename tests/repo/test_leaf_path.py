"""Functions and files of the library that one leaf crosses: no more of them than there were."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
# functions, files and changes from one file to another, at most: lower them where code gets simpler
LIMITS = {"build": (11, 4, 6), "init": (99, 19, 156), "step": (238, 30, 249)}


@pytest.fixture(scope="module")
def counts():
    """Those of a fresh process, since what is cached is not called again."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.repo.leaf_path"],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("stage", LIMITS)
def test_a_leaf_crosses_no_more_than_it_did(stage, counts):
    assert all(count > 0 for count in counts[stage])
    assert all(n <= most for n, most in zip(counts[stage], LIMITS[stage], strict=True)), (
        f"{stage}: {counts[stage]} functions, files and changes of file, at most {LIMITS[stage]}: "
        "python -m tests.repo.leaf_path --list shows them"
    )
