"""Fixtures and hooks of every test: JAX's settings, the tiers, and the guard of a GPU run.

A test belongs to one tier: `gpu`, `tpu` and `full` by their markers, `repo` by its folder
(tests/repo), the default one otherwise. What is marked both `tpu` and `full` is of `make tpu-test`.
"""

import gc
import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.compilation import QUICK_FLAGS

# Most of a test's time is compiling small programs, and most of that LLVM's optimization of them.
# Before JAX is imported, which reads the flags once; those of a user come last and win.
if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ["XLA_FLAGS"] = " ".join([QUICK_FLAGS, os.environ.get("XLA_FLAGS", "")]).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

from optax_lowmem._src.arrays import compiled  # noqa: E402
from optax_lowmem._src.kernels import platform as kernel_platform  # noqa: E402
from optax_lowmem._src.kernels.gpu_kernel import BACKENDS  # noqa: E402
from tests.tiers import SAMPLES, rows, sample_of  # noqa: E402

# Both before any backend starts. The devices are for the sharding tests; on a GPU machine they
# are the CPU's and disturb nothing. A silent broadcast between ranks is a bug in an optimizer.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

REPO_TIER = Path(__file__).parent / "repo"
TPU_TIER = Path(__file__).parent / "tpu"

# tests that ran of the tiers that a machine may not be able to run
_ran = {"gpu": 0, "tpu": 0}


@pytest.fixture(params=["interpret", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a backend of `gpu_kernel` that runs here: Pallas interpreted; Triton, on NumPy."""
    if request.param == "triton":
        from tests import triton_on_numpy

        triton_on_numpy.install(monkeypatch)
    return request.param


@pytest.fixture(params=BACKENDS)
def gpu_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return either backend, on a GPU; with `triton` Pallas has no Triton lowering."""
    monkeypatch.setattr(kernel_platform, "has_pallas_triton", lambda: request.param == "pallas")
    return request.param


@pytest.fixture(params=rows([90, 80], [90]), ids=["hopper", "ampere"])
def compiled_kernels(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Any]]:
    """Have generated Triton compiled instead of launched; the kernels are in the list."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tools import triton_compiler

    jax.clear_caches()  # of what was traced otherwise
    with triton_compiler.compiling(tmp_path, request.param) as kernels:
        yield kernels
    jax.clear_caches()


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch platform detection so that code is traced as on a machine with one GPU."""
    monkeypatch.setattr(kernel_platform, "no_gpu_reason", lambda: None)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    # no program that was compiled for the machine as it is
    monkeypatch.setattr(compiled, "is_eager", lambda leaves: False)


@pytest.fixture
def on_hopper(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `on_a_gpu`, with a Hopper GPU."""
    monkeypatch.setattr(kernel_platform, "not_hopper_reason", lambda: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        type=int,
        choices=range(SAMPLES),
        help=f"of the tests marked `full`, run this one of {SAMPLES} samples (default: all)",
    )


def pytest_report_header(config: pytest.Config) -> str:
    names = ("jax", "optax", "flax")
    versions = [f"{name} {version(name)}" for name in names if importlib.util.find_spec(name)]
    header = ", ".join([f"python {platform.python_version()}", *versions])
    sample = config.getoption("sample")
    return header if sample is None else f"{header}, sample {sample} of {SAMPLES} of the full tier"


def pytest_sessionstart(session: pytest.Session) -> None:
    # not in pyproject.toml: there a plugin that warns as it starts would stop the whole run
    session.config.getini("filterwarnings").insert(0, "error")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the benchmarks and examples unimported in a run that leaves out all of their tests."""
    wanted = config.getoption("markexpr") or ""
    without = all(f"not {tier}" in wanted for tier in ("repo", "full"))
    if without and collection_path == REPO_TIER:
        return True
    return True if "not tpu" in wanted and collection_path == TPU_TIER else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of tests/repo, and leave out what `--sample` does not select."""
    sample = config.getoption("sample")
    selected, left_out = [], []
    for item in items:
        full = item.get_closest_marker("full")
        if REPO_TIER in item.path.parents and not full:
            item.add_marker("repo")
        out = full and sample is not None and sample_of(item.nodeid) != sample
        (left_out if out else selected).append(item)
    items[:] = selected
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU; JAX's default backend here is {jax.default_backend()}")
    if item.get_closest_marker("tpu") and importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu: `make tpu-test-quick` installs it (the extra tpu-test)")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Take what is alive after a file, mostly JAX's caches, out of what later collections walk."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect(1)
        gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for tier in _ran:
        if report.when == "call" and tier in report.keywords and not report.skipped:
            _ran[tier] += 1


def _asked_for_in_vain(config: pytest.Config) -> list[str]:
    """The tiers that a run asks for by name and of which no test ran."""
    wanted = config.getoption("markexpr") or ""
    asked = [tier for tier in _ran if re.search(rf"(?<!not )\b{tier}\b", wanted)]
    return [tier for tier in asked if not _ran[tier]]


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")  # xdist's workers see a part of the run
    if is_worker or session.config.option.collectonly:
        return
    if _asked_for_in_vain(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for tier in () if config.option.collectonly else _asked_for_in_vain(config):
        terminalreporter.section(f"no {tier.upper()} test ran", red=True)
        terminalreporter.line(f"-m {tier} was asked for, so this run fails; see the reasons above.")
