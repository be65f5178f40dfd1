"""What every test shares: JAX settings, the gpu marker, and the guard of a GPU run."""

import gc
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from optax_lowmem.kernels import platform as kernel_platform

# Both before any backend starts. The devices are for the sharding tests; on a GPU machine they
# are the CPU's and disturb nothing. A silent broadcast between ranks is a bug in an optimizer.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

REPO_TIER = Path(__file__).parent / "repo"

_gpu_tests_run = 0


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps() -> Iterator[None]:
    """Forgets compiled programs when they are many.

    Each takes memory maps, of which Linux gives a process 65,530; XLA's compiler crashes without.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced is for a machine with one GPU."""
    monkeypatch.setattr(kernel_platform, "no_device_reason", lambda: None)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def pytest_report_header() -> str:
    return f"python {platform.python_version()}, jax {jax.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REPO_TIER in item.path.parents:
            item.add_marker("repo")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU; JAX's default backend here is {jax.default_backend()}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _gpu_tests_run
    if report.when == "call" and "gpu" in report.keywords and not report.skipped:
        _gpu_tests_run += 1


def _asks_for_gpu(config: pytest.Config) -> bool:
    return bool(re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr") or ""))


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")  # xdist's workers see a part of the run
    if is_worker or session.config.option.collectonly:
        return
    if _asks_for_gpu(session.config) and not _gpu_tests_run:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if _asks_for_gpu(config) and not _gpu_tests_run and not config.option.collectonly:
        terminalreporter.section("no GPU test ran", red=True)
        terminalreporter.line("-m gpu was asked for, so this run fails; see the reasons above.")
