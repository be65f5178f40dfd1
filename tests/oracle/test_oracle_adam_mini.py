"""The Adam-mini oracle against values worked out by hand, and against AdamW's where they agree."""

import numpy as np
import pytest

from . import adam_mini, optimizers
from .adam_mini import Block

F64 = {"atol": 0, "rtol": 1e-13}


# -- blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block, numbers",
    [
        (Block(), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Block((0,)), [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (Block((1,)), [[0, 0, 0, 0], [1, 1, 1, 1]]),
        (Block((-1,)), [[0, 0, 0, 0], [1, 1, 1, 1]]),
        (Block((0, 1)), [[0, 0, 0, 0], [0, 0, 0, 0]]),
        (Block((0,), (1, 2)), [[0, 0, 1, 1], [0, 0, 1, 1]]),
        (Block((0,), (-1, 4)), [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (Block((), (1, 2)), [[0, 0, 1, 1], [2, 2, 3, 3]]),
    ],
)
def test_numbers_of_blocks_by_hand(block, numbers):
    assert block.numbers((2, 4)).tolist() == numbers


def test_averages_by_hand():
    x = np.array([[1.0, 3, 5, 7], [9, 11, 13, 15]])
    assert Block((0,)).average(x).tolist() == [5, 7, 9, 11]
    assert Block((0,), (1, 2)).average(x).tolist() == [6, 10]
    assert Block((0, 1)).average(x).tolist() == [8]
    assert Block().average(np.float64(3)).tolist() == [3]


def test_averages_keep_the_layout_of_numpys_mean():
    x = np.random.default_rng(0).normal(size=(3, 4, 6, 5))
    np.testing.assert_allclose(Block((1, 3)).average(x), x.mean((1, 3)).ravel(), **F64)
    heads = x.reshape(3, 4, 2, 3, 5).mean((1, 3, 4))
    np.testing.assert_allclose(Block((1, 3), (2, 2)).average(x), heads.ravel(), **F64)


# -- the step --------------------------------------------------------------------------------------


def test_two_steps_by_hand():
    """One block; g = (3, 1), then (0, 2): mean squares of 5 and 2."""
    hyper = {"lr": 0.1, "b1": 0.5, "b2": 0.75, "eps": 0.5, "weight_decay": 0.01}
    first, second = adam_mini.trajectory([1.0, -2.0], [[3.0, 1], [0.0, 2]], Block((0,)), **hyper)
    np.testing.assert_allclose(first[1], [1.5, 0.5], **F64)
    np.testing.assert_allclose(first[2], [1.25], **F64)
    # debiased m = g and v = 5; decay 0.001 w
    want = np.array([1.0, -2]) - 0.1 * np.array([3.0, 1]) / (5**0.5 + 0.5) - [1e-3, -2e-3]
    np.testing.assert_allclose(first[0], want, **F64)
    np.testing.assert_allclose(second[1], [0.75, 1.25], **F64)
    np.testing.assert_allclose(second[2], [0.75 * 1.25 + 0.25 * 2], **F64)
    root = (1.4375 / 0.4375) ** 0.5 + 0.5
    want = want - 0.1 * np.array([1.0, 1.25 / 0.75]) / root - 1e-3 * want
    np.testing.assert_allclose(second[0], want, **F64)


def test_the_papers_formula_by_hand():
    """w - alpha m / sqrt(v_mean + eps), not debiased: m = 0.2, v_mean = 0.004."""
    hyper = {"lr": 0.5, "eps": 0.0, "eps_root": 5e-3, "debias": False}
    [state] = adam_mini.trajectory([1.0, 1.0], [[2.0, 2]], Block((0,)), **hyper)
    np.testing.assert_allclose(state[0], 2 * [1 - 0.5 * 0.2 / 0.009**0.5], **F64)


@pytest.mark.parametrize("lr, peak", [(1e-2, None), (lambda t: 1e-2 / (1 + t), 1e-2)])
def test_elementwise_is_adamw(lr, peak):
    rng = np.random.default_rng(1)
    theta, grads = rng.normal(size=(5, 7)), rng.normal(size=(20, 5, 7))
    hyper = {"lr": lr, "weight_decay": 0.1, "peak_lr": peak, "eps_root": 1e-6, "b2": 0.95}
    adamw = optimizers.trajectory(optimizers.adamw, theta, grads, **hyper)[1:]
    mini = adam_mini.trajectory(theta, grads, Block(), **hyper)
    for (w, slots), (found, m, v) in zip(adamw, mini, strict=True):
        np.testing.assert_allclose(found, w, **F64)
        np.testing.assert_allclose(m, slots["mu"], **F64)
        np.testing.assert_allclose(v, slots["nu"].ravel(), **F64)
    rows = adam_mini.trajectory(theta, grads, Block((1,)), **hyper)
    assert np.abs(rows[-1][0] - mini[-1][0]).max() > 1e-3  # and blocks are not without effect


def test_gradients_of_one_size_make_every_block_adamw():
    """Gradients of one magnitude make Adam-mini equal to AdamW for any block."""
    rng = np.random.default_rng(2)
    grads = rng.choice([-1.0, 1], (10, 4, 6)) * rng.uniform(1, 2, (10, 1, 1))
    adamw = optimizers.trajectory(optimizers.adamw, np.ones((4, 6)), grads, lr=0.1)[-1][0]
    for block in (Block((0, 1)), Block((0,), (1, 3)), Block((1,))):
        mini = adam_mini.trajectory(np.ones((4, 6)), grads, block, lr=0.1)[-1][0]
        np.testing.assert_allclose(mini, adamw, **F64)


# -- eq. 1 -----------------------------------------------------------------------------------------


def test_reference_by_hand():
    # delta = 1/255 * 255 = 1: low = -100.5 rounds to even, -100, and z = 100 - 128
    x = np.array([[-100.5, 0.0, 0.5, 1.5, 2.5, 154.5]])
    codes, delta, z = adam_mini.reference(x)
    assert (delta.tolist(), z.tolist()) == ([1.0], [-28.0])
    assert codes.tolist() == [[-128, -28, -28, -26, -26, 126]]
    back = adam_mini.dequantize(codes, delta, z)
    assert back.tolist() == [[-100, 0, 0, 2, 2, 154]]


def test_what_the_reference_does_to_groups_of_one_sign():
    """No room for 0: z is clipped to an end, and all but what is under 255 deltas is lost."""
    for x, lost in (
        (np.linspace(1, 1.001, 256), 0.999),
        (np.full(256, 3.0), 0.999),
        (-np.linspace(1, 2, 256), 0.4),
    ):
        codes, delta, z = adam_mini.reference(x[None])
        error = np.abs(adam_mini.dequantize(codes, delta, z)[0] - x) / np.abs(x)
        assert error.max() > lost
        codes, delta, z = adam_mini.zero_inside(x[None])
        error = np.abs(adam_mini.dequantize(codes, delta, z)[0] - x)
        assert error.max() <= delta[0] / 2 * (1 + 1e-12)
    # and the floor of 1e-5 under the range
    assert adam_mini.reference(np.array([[-1e-9, 1e-9]]))[0].tolist() == [[-128, -128]]


def test_zero_inside_by_hand():
    # 254 steps of 1/2 from -27 to 100: low is code -128, 0 is -74, high 126; 0.25 is a tie, away
    x = np.array([[-27.0, 0.0, 0.25, -0.25, 100.0]])
    codes, delta, z = adam_mini.zero_inside(x)
    assert (delta.tolist(), z.tolist()) == ([0.5], [-74.0])
    assert codes.tolist() == [[-128, -74, -73, -75, 126]]
    # no negative one: 0 is the lowest code; no positive one: it is 254 above
    assert adam_mini.zero_inside(np.array([[254.0, 1.0]]))[0].tolist() == [[126, -127]]
    assert adam_mini.zero_inside(np.array([[-254.0, -1.0]]))[0].tolist() == [[-128, 125]]
    codes, delta, z = adam_mini.zero_inside(np.zeros((1, 3)))
    assert not adam_mini.dequantize(codes, delta, z).any()


def test_nothing_is_clipped_and_zero_is_a_code():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5000, 64)) + rng.normal(size=(5000, 1)) * 3
    x[:, 0] = 0
    x *= 10 ** rng.uniform(-12, 12, (5000, 1))
    x[0] = [0, -63.5, 190.5, *np.ones(61)]  # half a step at either end: 255 codes apart
    codes, delta, z = adam_mini.zero_inside(x)
    steps = np.int64(codes) - z[:, None]
    assert (np.abs(steps - x / delta[:, None]) <= 0.5 + 1e-9).all()
    assert (steps[:, 0] == 0).all() and (np.abs(z) <= 128).all()
    assert codes[0, 1:3].tolist() == [-128, 127]
    # not so the reference, whose range need not hold 0
    codes, delta, z = adam_mini.reference(x[:, 1:])
    steps = np.int64(codes) - z[:, None]
    assert (np.abs(steps - x[:, 1:] / delta[:, None]) > 1).mean() > 0.05
