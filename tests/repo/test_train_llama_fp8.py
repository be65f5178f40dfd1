"""The Llama example with activations kept in FP8: losses, checkpoints, meshes, other flags."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from tests.contract_cases import assert_same
from tests.repo.test_examples import example  # noqa: F401 (a fixture)
from tests.repo.test_train_llama import (  # noqa: F401
    ANOTHER,
    KEPT,
    ONE,
    hopper,
    llama,
    settings_of,
    trained,
)
from tests.tiers import in_turn

FP8 = "--activations fp8"
# nats, of a step of six at a high rate: what rounding products to FP8 moves, up to 0.06 on a CPU
# whose instructions round f32 otherwise, and a third more
APART = 0.08


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


@pytest.mark.parametrize(("stacked", "remat"), in_turn([True, False], ["none", "full"]))
def test_weights_quantized_once_change_no_bit(llama, stacked, remat):  # noqa: F811
    """Loss and gradients of the model, with layers in a scan and unrolled."""
    more = {"activations": "fp8", "stacked": stacked, "remat": remat}
    model = llama.model.Llama(llama.config.PRESETS["tiny"].shape, "float32", **more)
    params = jax.jit(lambda key: model.weights(key, lambda path: jnp.bfloat16))(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 65), 0, 256)
    once, anew = (
        jax.jit(lowmem.value_and_grad(model, 2, prepare)).lower(params, tokens, 3).compile()
        for prepare in (model.quantized_weights, None)
    )
    assert_same(once(params, tokens, 3), anew(params, tokens, 3))


def test_a_run_whose_weights_are_quantized_once(llama, monkeypatch, capsys):  # noqa: F811
    """It says so, and has the losses of quantizing in each micro-batch, up to XLA's fusions."""
    flags = f"{ONE} {FP8} --accumulate 2 --unroll 1"
    once = trained(llama, flags)
    assert once.program.settings.quantize_once is True
    assert "2 micro-batches, weights quantized once a step" in capsys.readouterr().out
    make = llama.script.make_settings
    monkeypatch.setattr(
        llama.script,
        "make_settings",
        lambda args: dataclasses.replace(make(args), quantize_once=False),
    )
    anew = trained(llama, flags)
    assert "2 micro-batches, weights quantized in each" in capsys.readouterr().out
    assert once.run.losses[:2] == pytest.approx(anew.run.losses[:2], abs=1e-3)
    assert once.run.losses == pytest.approx(anew.run.losses, abs=0.03)  # as on a mesh


@pytest.mark.parametrize(
    ("flags", "fixed", "remat", "once"),
    [
        ("--accumulate 2", 54, "none", True),
        ("--accumulate 2", 55, "none", False),  # no layer is computed anew for it
        ("--accumulate 2 --remat full", 55, "full", True),
        ("--accumulate 2", 65, "full", False),
        ("--accumulate 1", 10, "none", False),
        ("--accumulate 2 --linear switchback-fp8", 10, "none", False),
        ("--accumulate 2 --activations lean", 10, "none", False),
    ],
)
def test_where_weights_are_quantized_once(llama, hopper, flags, fixed, remat, once):  # noqa: F811
    """Only where 1.8 GiB of codes fit into 67, beside `fixed` and what layers keep, 10.7 or 1."""
    flags = f"--preset 1b --data-parallel 1 --compute bfloat16 --activations fp8 {flags}"
    kept = {policy: int(size * 2**30) for policy, size in KEPT["fp8"].items()}
    settings, codes = settings_of(llama, flags), int(1.8 * 2**30)
    found = llama.choose.resolved(settings, fixed * 2**30, kept.__getitem__, codes)
    assert (found.remat, found.quantize_once) == (remat, once)


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
    assert run.losses == pytest.approx(plain.losses, abs=APART)
    assert run.losses != plain.losses


HEADS = ["fp8 --activations fp8", "fp8-gradients --compute bfloat16"]


@pytest.mark.parametrize("flags", HEADS)
def test_a_head_in_fp8(llama, flags, capsys):  # noqa: F811
    """Alone or beside FP8 layers, on one device and on a mesh: nearly the same losses."""
    more = flags.partition(" ")[2]
    plain, one, mesh = (
        trained(llama, f"{where} {own}").run
        for where, own in ((ONE, more), (ONE, f"--head {flags}"), (ANOTHER, f"--head {flags}"))
    )
    assert f", {flags.split()[0]} head" in capsys.readouterr().out
    assert one.losses != plain.losses
    assert one.losses == pytest.approx(plain.losses, abs=APART)
    assert mesh.losses[0] == pytest.approx(one.losses[0], abs=1e-3)
    assert mesh.losses == pytest.approx(one.losses, abs=0.05)
    assert "head=fp8" in llama.report.case(settings_of(llama, f"--data-parallel 1 --head {flags}"))


def test_the_record_says_so(llama):  # noqa: F811
    settings = settings_of(llama, f"--data-parallel 1 {FP8}")
    assert llama.report.case(settings) == "llama-tiny activations=fp8/flash_adamw"
