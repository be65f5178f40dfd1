"""The Llama example with activations kept in FP8: losses, checkpoints, meshes, other flags."""

import jax
import numpy as np
import pytest

from tests.repo.test_examples import example  # noqa: F401 (a fixture)
from tests.repo.test_train_llama import ANOTHER, ONE, llama, settings_of, trained  # noqa: F401

FP8 = "--activations fp8"


@pytest.fixture(scope="module")
def text():
    """Flags of a run on text that the loss follows."""
    return f"{ONE} --text standard-library --steps 60"


def test_the_loss_follows(llama, text):  # noqa: F811
    """Over 60 steps on text: 5.5 to under 3, and never far from the ordinary run."""
    plain = llama.script.main(text.split()).run
    run = llama.script.main(f"{text} {FP8}".split()).run
    assert plain.losses[0] == pytest.approx(run.losses[0], rel=1e-2)
    assert run.losses[0] > 5 and np.mean(run.losses[-6:]) < 3
    assert np.mean(run.losses[-6:]) == pytest.approx(np.mean(plain.losses[-6:]), rel=0.03)
    assert run.losses != plain.losses
    assert jax.tree.map(np.shape, run.params) == jax.tree.map(np.shape, plain.params)


def test_a_run_goes_on_with_fp8_activations(llama, tmp_path):  # noqa: F811
    """From the checkpoint of an ordinary model."""
    whole = trained(llama, ONE).run
    where = f"{ONE} --checkpoint {tmp_path}"
    trained(llama, f"{where} --until 3")
    rest = trained(llama, f"{where} --resume {FP8}").run
    assert rest.step == 6
    assert rest.losses == pytest.approx(whole.losses[3:], abs=0.05)
    assert rest.losses != whole.losses[3:]


def test_on_a_mesh(llama):  # noqa: F811
    """FSDP and tensor parallelism: the same maxima, so nearly the same losses."""
    one, mesh = (trained(llama, f"{flags} {FP8}").run for flags in (ONE, ANOTHER))
    assert mesh.losses[0] == pytest.approx(one.losses[0], abs=1e-3)
    assert mesh.losses == pytest.approx(one.losses, abs=0.03)  # codes next to ties differ


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--linear switchback_m-fp8", marks=pytest.mark.full),
        "--remat --optimizer coat_adamw --compute bfloat16",
        pytest.param("--release", marks=pytest.mark.full),
        pytest.param("--optimizer flash_lion --linear switchback-fp8", marks=pytest.mark.full),
        pytest.param("--optimizer stable_adamw --remat", marks=pytest.mark.full),
        pytest.param("--optimizer optax.adamw", marks=pytest.mark.full),
    ],
)
def test_with_other_flags(llama, flags):  # noqa: F811
    plain, run = (trained(llama, f"{ONE} {flags} {more}").run for more in ("", FP8))
    assert run.losses == pytest.approx(plain.losses, abs=0.08)
    assert run.losses != plain.losses


def test_the_record_says_so(llama):  # noqa: F811
    settings = settings_of(llama, f"--data 1 {FP8}")
    assert llama.report.case(settings) == "llama-tiny activations=fp8/flash_adamw"
