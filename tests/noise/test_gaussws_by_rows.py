"""Noise on weights in blocks of rows, XLA's on a TPU: the bits of the whole, but in sums."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lowmem import gaussws
from optax_lowmem._src.noise import kernels
from optax_lowmem._src.noise.distributions import NOISES
from optax_lowmem._src.noise.formats import format_of
from tests import blocks_of_rows, tolerances
from tests.tiers import rows

KEY = jnp.uint32(7)
SHAPES = {"a matrix": (96, 70), "matrices": (2, 3, 64, 64)}


def weights(shape):
    return jax.random.normal(jax.random.key(0), shape)


def alike(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


SAMPLES = list(itertools.product(SHAPES, NOISES, ("bfloat16", "mxfp4"), (False, True)))
IN_SHORT = [("matrices", "gaussws", "bfloat16", True), ("a matrix", "box-muller", "mxfp4", False)]


@pytest.mark.parametrize(("shape", "noise", "compute", "split"), rows(SAMPLES, IN_SHORT))
def test_sampled_weights(shape, noise, compute, split, monkeypatch):
    w = weights(SHAPES[shape])
    correction = jnp.arange(w.size, dtype=jnp.int8).reshape(w.shape) if split else None
    factor = jnp.full(kernels.block_shape(w.shape), 0.125)

    def sample(w, factor):
        own = w.astype(jnp.bfloat16) if split else w
        to = format_of(compute)
        return kernels.sample(own, correction, factor, KEY, NOISES[noise], to, jnp.bfloat16)

    whole, in_blocks = blocks_of_rows.both(monkeypatch, sample, w, factor, elements=4096)
    if noise != "diffq":
        return alike(whole, in_blocks)
    # R is no power of two, and a multiply-add of another compilation rounds once
    (sampled, scale), (own, own_scale) = whole, in_blocks
    alike(scale, own_scale)
    assert np.mean(np.asarray(sampled != own)) <= tolerances.EAGER_JIT_SHARE


@pytest.mark.parametrize(
    ("shape", "noise"), rows(itertools.product(SHAPES, NOISES), [("matrices", "diffq")])
)
def test_noise_and_its_sums(shape, noise, monkeypatch):
    g = weights(SHAPES[shape]).astype(jnp.bfloat16)

    def both(g):
        r = gaussws.draw(KEY, g.shape, noise=noise)
        return r, kernels.noise_sums(g, KEY, NOISES[noise])

    (r, sums), (own_r, own_sums) = blocks_of_rows.both(monkeypatch, both, g, elements=4096)
    alike(r, own_r)
    size = kernels.sums(jnp.abs(g.astype(jnp.float32) * r))
    assert np.all(np.abs(own_sums - sums) <= 2 * tolerances.BITS_GRADIENT * size)


def test_gradients(monkeypatch):
    def loss(w, bits):
        return jnp.sum(gaussws.sample(w, bits, KEY).astype(jnp.float32) ** 2)

    w = weights((96, 64))
    gradients = jax.grad(loss, argnums=(0, 1))
    whole, in_blocks = blocks_of_rows.both(
        monkeypatch, gradients, w, jnp.full((3, 2), 4.0), elements=2048
    )
    alike(whole[0], in_blocks[0])
    assert np.any(in_blocks[1] != 0)
    np.testing.assert_allclose(in_blocks[1], whole[1], rtol=1e-5)
