"""Tests of what many leaves of one shape compile to on a CPU."""

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem


def compiled(count):
    tx = lowmem.flash_adamw(1e-3)
    like = {f"w{i}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(count)}
    params, state = jax.eval_shape(lambda p: lowmem.init(tx, p), like)
    step = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))
    return step.lower(params, state, params).compile()


def test_equal_leaves_need_no_arrays_of_their_own():
    count = 30
    program = compiled(count)
    # words of one leaf, 4 bytes an element, and 200 bytes of scalars for each
    assert program.memory_analysis().temp_size_in_bytes < 4 * 64 * 64 * 3 + 400 * count


def test_loops_of_equal_leaves_are_the_same_whatever_their_number():
    """A constant inside (a leaf's number or key) would make each another kernel to compile."""
    program = compiled(3)
    text = program.as_text()
    assert "conditional(" not in text
    assert text.count('inlineable="false"') > 3
    assert "slice={[1:2]}" not in text and "slice={[2:3]}" not in text
