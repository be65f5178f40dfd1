"""The SwitchBack oracle by hand."""

import numpy as np
import pytest

from . import switchback

X = np.array([[1.27, -0.635, 0.01], [0.0, 0.0, 0.0]])  # codes 127, -63.5 -> -64, 1
W = np.array([[2.54, 0.02], [0.0, -1.27], [0.02, 0.0]])
G = np.array([[12.7, 0.1], [0.3, 0.0]])


def test_switchback_by_hand():
    found = switchback.layer(X, W, G, "switchback")
    x, w = found.operands["y"]
    assert x.codes.tolist() == [[127, -64, 1], [0, 0, 0]]
    np.testing.assert_allclose(x.scale, [[0.01], [0]])
    assert w.codes.tolist() == [[127, 1], [0, -64], [1, 0]]
    np.testing.assert_allclose(w.scale, [[0.02]])
    np.testing.assert_allclose(found.y, [[0.01 * 0.02 * (127 * 127 + 1), 2e-4 * 4223], [0, 0]])
    g, back = found.operands["dx"]
    assert g.codes.tolist() == [[127, 1], [127, 0]]
    assert back.codes.tolist() == w.codes.T.tolist()
    np.testing.assert_allclose(found.dx[1], 0.3 / 127 * 0.02 * 127 * np.array([127, 0, 1]))
    np.testing.assert_allclose(found.dw, X.T @ G)


def test_variants_by_hand():
    of_m = switchback.layer(X, W, G, "switchback_m")
    np.testing.assert_allclose(of_m.dw, np.array([[1.27, -0.64, 0.01], [0, 0, 0]]).T @ G)
    of_q = switchback.layer(X, W, G, "switchback_q")
    np.testing.assert_allclose(of_q.operands["y"][1].scale, [[0.02, 0.01]])  # a column
    np.testing.assert_allclose(of_q.operands["dx"][1].scale, [[0.02, 0.01, 0.02 / 127]])  # a row
    np.testing.assert_allclose(of_q.dw, X.T @ G)
    of_all = switchback.layer(X, W, G, "llm_int8")
    np.testing.assert_allclose(of_all.operands["dw"][0].scale, [[0.01], [0.005], [1e-2 / 127]])
    np.testing.assert_allclose(of_all.operands["dw"][1].scale, [[0.1, 0.1 / 127]])
    one = switchback.layer(X, W, G, "tensorwise")
    assert all(a.scale.size == b.scale.size == 1 for a, b in one.operands.values())


@pytest.mark.parametrize("fmt,ulp", [("e4m3", 1 / 8), ("e5m2", 1 / 4)])
def test_float8_casts_to_values_of_the_format(fmt, ulp):
    largest = switchback.LARGEST[fmt]
    assert switchback.cast(np.array([largest, 1 + ulp / 2, 1 + 0.51 * ulp]), fmt).tolist() == [
        largest, 1, 1 + ulp
    ]  # fmt: skip
    unit = switchback.quantize(np.array([[4.0, 2.2]]), 1, fmt, 1.0)
    assert unit.codes.tolist() == [[1, np.round(0.55 * 2 / ulp) * ulp / 2]] and unit.scale == 4
