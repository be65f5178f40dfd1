"""The GaussWS oracle by hand."""

import numpy as np
import pytest

from . import gaussws


def test_probabilities():
    assert sum(gaussws.PROBABILITIES.values()) == 1
    assert 1 / gaussws.PROBABILITIES[2] == pytest.approx(682.7, abs=0.05)
    assert 1 / gaussws.PROBABILITIES[-1] == pytest.approx(7.1, abs=0.05)
    assert gaussws.PROBABILITIES[0] == pytest.approx(0.716, abs=5e-4)


def test_sample_by_hand():
    w = np.zeros((33, 40))
    w[0, 0], w[1, 33], w[32, 1] = -4.0, 1.0, 2.0  # block (1, 1) is all zeros
    r, bits = np.ones_like(w), np.array([[3.0, 2.0], [1.0, 5.0]])
    found = gaussws.sample(w, bits, r)
    assert found[0, 0] == -4 + 1 and found[5, 5] == 1
    assert found[1, 33] == 1.5 and found[0, 39] == 0.5
    assert found[32, 1] == 4 and found[32, 39] == 0
    of_w, of_bits = gaussws.gradients(w, bits, r, np.full_like(w, 0.5))
    assert (of_w == 0.5).all()
    np.testing.assert_allclose(of_bits, -np.log(2) * np.array([[512.0, 128 * 0.5], [2 * 16, 0]]))


def test_gradients_are_those_of_equation_1():
    """Finite differences with the maxima held fixed."""
    rng = np.random.default_rng(0)
    w, g = rng.normal(size=(2, 40, 33)), rng.normal(size=(2, 40, 33))
    r = rng.integers(-2, 3, size=w.shape)
    bits, held = rng.uniform(2, 8, gaussws.block_shape(w.shape)), gaussws.maxima(w)
    of_w, of_bits = gaussws.gradients(w, bits, r, g)
    eps = 1e-6
    for index in [(0, 0, 0), (1, 1, 1), (1, 0, 1)]:
        step = np.zeros_like(bits)
        step[index] = eps
        up, down = (gaussws.sample(w, bits + s, r, held) for s in (step, -step))
        assert of_bits[index] == pytest.approx(((up - down) * g).sum() / (2 * eps), rel=1e-7)
    for index in [(0, 3, 7), (1, 39, 32)]:
        step = np.zeros_like(w)
        step[index] = eps
        up, down = (gaussws.sample(w + s, bits, r, held) for s in (step, -step))
        assert of_w[index] == pytest.approx(((up - down) * g).sum() / (2 * eps), rel=1e-6)


def test_formats_by_hand():
    assert gaussws.numbers(1, 3, 1.5).tolist() == [0, 0.125, 0.25, 0.375, 0.5, 0.75, 1, 1.5]  # E2M1
    assert gaussws.numbers(3, 15, 1.75)[-1] * 256 == 448
    x = np.array([[4.0, 5.0, 7.9, -0.24, 0.26, 0.25, 0.75]])  # E2M1 as it is: the maximum is in 4-8
    assert gaussws.cast(x, 1, 3, 1.5).tolist() == [[4, 4, 6, 0, 0.5, 0, 1]]
    assert [gaussws.safe(b) for b in (3, 6, 12)] == [(2, 3, 1), (3, 6, 4), (4, 12, 10)]


def test_loss():
    assert gaussws.loss([np.array([6.0, 3.0]), np.array([[4.0]])], 4.0, 0.5) == 0.5
    assert gaussws.bitwidth(0.25, 6.0, 2.0) == 3
