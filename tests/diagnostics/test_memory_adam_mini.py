"""Bytes of the Adam-mini family: Q-Adam-mini's Tables 3 and 4, and 16-bit weights with f32 v."""

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from benchmarks.claims import q_adam_mini as paper
from benchmarks.model_shapes import llama_3_2_1b
from tests.tiers import in_turn

GROUP = 256
SCALARS = 32  # bytes: count, seed, and placeholders of what a leaf does not have
OF_VALUES_WHOLE = lowmem.blocks.Structure(heads=paper.HEADS, rules=paper.VALUE_WHOLE)
RIGHT = lowmem.blocks.Structure(heads=paper.HEADS)
LLAMA_3_2 = lowmem.blocks.Structure(heads=32, kv_heads=8)


def kernel(rows: int, columns: int) -> dict:
    shape = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    return {"mlp": {"up_proj": {"kernel": shape}}}


@pytest.mark.parametrize("shape", [(2048, 5461), (4096, 1024), (256, 8192)])
def test_table_3(shape):
    """Codes, a word of scale for 256 neighbours, and of Adam-mini's v one value a neuron."""
    rows, columns = shape
    size, words = rows * columns, rows * -(-columns // GROUP)
    expected = {
        optax.adamw: 8 * size,
        lowmem.adam_mini: 4 * size + 4 * columns,
        lowmem.q_adam_mini: size + 4 * words + 4 * columns,
    }
    for make, bytes_ in expected.items():
        found = lowmem.memory.report(make(1e-3), kernel(rows, columns))
        assert 0 <= found.state_bytes - bytes_ <= SCALARS, make
        assert found.params_bytes == 4 * size


def test_table_3_of_8_bit_adamw():
    """Two codes per parameter; a word of m and at most an f32 of v for 256 neighbours."""
    rows, columns = 1024, 4096
    size, words = rows * columns, rows * columns // GROUP
    found = lowmem.memory.report(lowmem.q_adamw(1e-3), kernel(rows, columns))
    assert found.by_slot["mu"] == found.by_slot["nu"] == size
    assert 2 * size + 4 * words < found.state_bytes <= 2 * size + 8 * words + SCALARS


def test_an_eighth_of_adamw():
    """Of a whole model in f32, small leaves included."""
    params = paper.model("Llama-1B")
    sizes = [
        lowmem.memory.report(tx, params).state_bytes
        for tx in (optax.adamw(1e-3), lowmem.q_adam_mini(1e-3, blocks=RIGHT))
    ]
    assert 7.8 < sizes[0] / sizes[1] < 8


@pytest.mark.parametrize(
    "size, make",
    in_turn(paper.TABLE_4, [lowmem.adam_mini, lowmem.q_adam_mini, lowmem.flash_adam_mini]),
)
def test_table_4(size, make):
    """v of the optimizer's own state; with the right blocks it is more."""
    params = paper.model(size)
    whole, right = (
        lowmem.memory.report(make(1e-3, blocks=blocks), params).by_slot["nu"] / 2**20
        for blocks in (OF_VALUES_WHOLE, RIGHT)
    )
    assert round(whole, 1) == paper.TABLE_4[size][0]
    assert (whole, right) == pytest.approx(paper.v_mean_mib(size), abs=1e-4)
    assert 1.1 * whole < right < 1.15 * whole


def test_flash_adam_mini_takes_four_bytes():
    """Weight, correction and m of Llama-3.2-1B; AdamW in f32 takes 12."""
    tx = lowmem.flash_adam_mini(1e-3, blocks=LLAMA_3_2)
    found = lowmem.memory.report(tx, llama_3_2_1b(jnp.bfloat16))
    assert found.parameters == 1235814400
    assert 4.06 < found.bytes_per_param <= 4.1
    assert found.by_slot["nu"] < 0.01 * found.parameters
    weights, correction = found.params_bytes, found.by_slot["correction"]
    assert (weights, correction) == (2 * found.parameters, found.parameters)


def test_q_adam_mini_with_16_bit_weights():
    """3 bytes of weight and correction, 1.02 of state."""
    tx = lowmem.q_adam_mini(1e-3, blocks=LLAMA_3_2)
    assert 4.01 < lowmem.memory.report(tx, llama_3_2_1b(jnp.bfloat16)).bytes_per_param < 4.03
