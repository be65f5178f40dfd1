"""The planner against the peaks of recorded runs."""

import pytest

from benchmarks import records
from benchmarks.suites.plan import MODELS
from optax_lowmem import plan


@pytest.mark.parametrize(("mode", "flag"), [("resident", ""), ("release", "release=True ")])
def test_a_recorded_run_of_8b(mode, flag):
    """8B in bf16, one row of 2,048 tokens, each layer recomputed: within 5 %."""
    case = f"llama-8b clip=0.0 {flag}steps=12/flash_adamw"
    rows = records.select(records.all_records(), case=case, metric="peak_bytes")
    sizes = plan.decoder(MODELS["8B"])
    (found,) = (m for m in plan.plan_decoder(sizes, "flash_adamw", 0, 2048).modes if m.name == mode)
    assert rows
    for row in rows:
        assert found.total_bytes(1) == pytest.approx(row["value"], rel=0.05)
