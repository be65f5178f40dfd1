"""The step's kernel compiled for each TPU without one: in place, and each byte moved once."""

import re

import pytest

from benchmarks.suites.tpu import cases
from benchmarks.suites.tpu.program import Program

pytestmark = pytest.mark.tpu


@pytest.mark.parametrize("chip", cases.CHIPS)
def test_a_step_compiles(chip):
    """One kernel, without collectives; its temporaries are numbers, of 16 KB each."""
    of_step = chip, "2048x8192", "flash_adamw"
    program = cases.compile_case(*of_step)
    memory, text = program.memory_analysis(), program.as_text()
    found = Program(text)
    ideal, rewritten = cases.ideal_bytes(*of_step)
    assert found.kernels() == 1
    assert not re.search("all-gather|all-reduce|reduce-scatter|all-to-all|collective-", text)
    assert memory.alias_size_in_bytes >= rewritten
    assert 0.999 * ideal <= found.traffic() <= 1.05 * ideal
    assert memory.temp_size_in_bytes <= 1 << 20
