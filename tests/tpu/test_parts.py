"""The library's other programs compiled for TPUs without one: traffic and temporaries."""

import jax
import pytest

from benchmarks.suites.tpu import chips, parts
from benchmarks.suites.tpu.program import Program
from tests.tiers import rows
from tests.tpu import bounds

pytestmark = pytest.mark.tpu

CASES = [(chip, *case) for chip in chips.CHIPS for case in bounds.OF_PARTS]
IN_CI = [
    (chip, *case)
    for chip in chips.CHIPS
    for case in (("gaussws/2048x8192", "sample"), ("fp8_flow/8192x2048x8192", "gated_product"))
]


@pytest.mark.parametrize(("chip", "case", "impl"), rows(CASES, IN_CI))
def test_a_part_moves_little(chip, case, impl):
    """At most twice what it must, in blocks of rows that stay on the chip."""
    program, _ = parts.compile_part(chip, case, impl)
    found, ideal = Program(program.as_text()), parts.ideal_bytes(case, impl)
    limit = bounds.OF_PARTS[case, impl]
    assert 0.999 * ideal <= found.traffic() <= limit.traffic * ideal
    assert program.memory_analysis().temp_size_in_bytes <= limit.temporaries


@pytest.mark.parametrize("chip", rows(chips.CHIPS, []))
def test_gradients_of_sampled_weights_are_exported(chip):
    """By the same path, from a host that has no TPU."""
    from optax_lowmem import gaussws

    mesh = chips.mesh(chip)
    w, bits = chips.replicated(
        mesh,
        tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((2048, 8192), (64, 256))),
    )

    def loss(w, bits):
        return gaussws.sample(w, bits, 0).astype("float32").sum()

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=["tpu"])(w, bits)
    assert exported.platforms == ("tpu",) and "while" in exported.mlir_module()
