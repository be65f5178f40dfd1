"""Steps compiled for TPUs without one: traffic, temporaries, aliasing and collectives."""

import functools

import pytest

from benchmarks.suites.tpu import cases, chips
from benchmarks.suites.tpu.program import Program
from tests.tiers import rows
from tests.tpu import bounds

pytestmark = pytest.mark.tpu

CHIPS = list(chips.CHIPS)
# what every run of CI compiles: two optimizers, two shapes, both chips, one mesh
IN_CI = [
    (chip, case, impl)
    for chip in CHIPS
    for case in ("2048x8192", "8192x2048")
    for impl in ("flash_adamw", "flash_lion")
] + [("v5e", "2048x8192/2x2", "flash_adamw"), ("v6e", "2048x8192", "flash_adamw-xla")]
EVERY = [
    (chip, case, impl)
    for chip in CHIPS
    for case in cases.LEAVES
    for impl in cases.IMPLEMENTATIONS
    if impl != cases.BASE
]


@functools.cache
def compiled(chip, case, impl):
    return cases.compile_case(chip, case, impl)[0]


@pytest.mark.parametrize(("chip", "case", "impl"), rows(EVERY, IN_CI))
def test_a_step_is_in_place_and_moves_little(chip, case, impl):
    """All of the state and the weights is aliased; no leaf leaves its chip, only means of them."""
    program = compiled(chip, case, impl)
    memory, found = program.memory_analysis(), Program(program.as_text())
    ideal, rewritten = cases.ideal_bytes(chip, case, impl)
    limit = bounds.of_step(case, impl)
    assert memory.alias_size_in_bytes >= rewritten
    means = case.endswith(cases.ON_FOUR) and cases.prepares(impl)
    collectives = {"all-reduce"} if means else set()
    # rows and columns are in one array, whose parts are not those of the leaf
    of_vectors = {"all-gather", "collective-permute"} if means and "factored" in impl else set()
    assert collectives <= found.collectives().keys() <= collectives | of_vectors
    assert found.traffic() >= 0.999 * ideal  # or the program is not understood
    assert found.traffic() <= limit.traffic * (ideal + cases.read_twice(chip, case, impl))
    assert memory.temp_size_in_bytes <= limit.temporaries
    if bounds.KERNEL and not impl.endswith(cases.XLA):
        assert found.kernels() > 0


def test_columns_that_repeat_after_the_heads(monkeypatch):
    """A projection's kernel of Flax, whose largest axes are the first and the last."""
    monkeypatch.setitem(cases.LEAVES, "heads", {"kernel": (4096, 32, 128)})
    of_step = "v5e", "heads", "flash_factored_adamw"
    found = Program(cases.compile_case(*of_step)[0].as_text())
    assert found.kernels() == 1
    assert found.traffic() <= 1.05 * (cases.ideal_bytes(*of_step)[0] + cases.read_twice(*of_step))


@pytest.mark.parametrize("chip", CHIPS)
def test_the_base_moves_each_byte_once(chip):
    """The base of the ratios, `optax.adamw` in f32, fused by XLA into one pass."""
    program = compiled(chip, "2048x8192", cases.BASE)
    ideal, rewritten = cases.ideal_bytes(chip, "2048x8192", cases.BASE)
    assert rewritten >= 12 * 2048 * 8192
    assert Program(program.as_text()).traffic() == pytest.approx(ideal, rel=1e-3)
    assert program.memory_analysis().temp_size_in_bytes == 0
