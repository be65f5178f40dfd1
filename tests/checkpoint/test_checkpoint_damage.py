"""What a checkpoint goes through: wrong arguments, other folders, flipped bits, cuts, kills."""

import jax.numpy as jnp
import pytest

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from tests import contract_cases as cases
from tests.checkpoint_cases import SMALL, assert_same_bits

# of a read that failed, tensorstore's other reads end after Orbax has closed its event loop
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0.5, -1, "a", None, True, jnp.float32(1)])
def test_a_step_that_is_no_number_of_a_step_is_not_written(step, tmp_path):
    tx = lowmem.flash_lion(1e-3, storage=SMALL)
    params, state = lowmem.init(tx, cases.masters())
    with pytest.raises(ValueError, match="step must be a whole number from 0 up, got"):
        checkpoint.save(tmp_path / "run", tx, params, state, step=step)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "1"])
def test_keep_never_means_none_at_all(keep, tmp_path):
    tx = lowmem.flash_lion(1e-3, storage=SMALL)
    params, state = lowmem.init(tx, cases.masters())
    with pytest.raises(ValueError, match="keep must be a whole number from 1 up, .* got"):
        checkpoint.save(tmp_path / "run", tx, params, state, step=0, keep=keep)
    assert not (tmp_path / "run").exists()


def test_steps_of_numpy_and_jax_are_numbers(tmp_path):
    tx = lowmem.flash_lion(1e-3, storage=SMALL)
    params, state = lowmem.init(tx, cases.masters())
    checkpoint.save(tmp_path, tx, params, state, step=jnp.int32(3), keep=jnp.int32(2))
    assert checkpoint.latest_step(tmp_path) == 3
    assert_same_bits(checkpoint.restore(tmp_path, tx, params, step=jnp.int32(3)), (params, state))
    with pytest.raises(ValueError, match="step must be a whole number from 0 up, got True"):
        checkpoint.restore(tmp_path, tx, params, step=True)
