"""Tests of the warnings that a test run treats as errors."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
QUICK = "tests/oracle/test_oracle_split.py"


def pytest_in(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        env={**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_plugin_that_warns_as_it_starts_stops_nothing(tmp_path):
    """Neither the process that it starts in nor a worker of xdist."""
    (tmp_path / "warning_plugin.py").write_text(
        "import pytest\n\n\ndef pytest_configure(config):\n"
        "    config.issue_config_time_warning(pytest.PytestWarning('of a plugin'), 2)\n"
    )
    done = pytest_in(tmp_path, "-p", "warning_plugin", "-n", "1", QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of a plugin" in done.stdout


def test_a_warning_in_a_test_is_an_error(tmp_path):
    (tmp_path / "test_warns.py").write_text(
        "import warnings\n\n\ndef test_warns():\n    warnings.warn('of a test')\n"
    )
    done = pytest_in(tmp_path, "-c", "pyproject.toml", "-p", "tests.conftest", str(tmp_path))
    assert done.returncode == 1 and "UserWarning: of a test" in done.stdout, done.stdout
