"""Kernels compiled for GPUs that are not here, and the report that a volunteer posts."""

import pytest

from benchmarks.suites import other_gpus, report


@pytest.mark.parametrize("capability", [80, 120])
@pytest.mark.parametrize("name", ["step/flash_adamw", "noise-sample"])
def test_a_kernel_compiles_without_spills(name, capability):
    pytest.importorskip("triton", reason="Triton is not installed")
    found = other_gpus.compiled(name, capability)
    assert found
    for registers, spills, shared in found:
        assert 16 <= registers <= 128 and spills == 0 and shared <= 48 * 1024


def test_the_report_is_one_block(capsys):
    report.main(["--agree", "flash_adamw", "--time"])
    first, *lines, last, ask = capsys.readouterr().out.splitlines()
    assert (first, last) == ("```text", "```") and "post" in ask
    (line,) = [line for line in lines if line.startswith("flash_adamw")]
    assert "0.0000% of stored bytes differ" in line and "xla updates" in line
