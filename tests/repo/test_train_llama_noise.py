"""The Llama example with noise on some of its weights: from the first step on, resumed, meshes."""

import jax
import numpy as np
import pytest

import optax_lowmem as lowmem
from optax_lowmem import gaussws
from tests.contract_cases import assert_same
from tests.repo.test_examples import example  # noqa: F401 (a fixture)
from tests.repo.test_train_llama import (  # noqa: F401
    ANOTHER,
    ONE,
    assert_same_bits,
    llama,
    settings_of,
    trained,
)

NOISE = "--noise od"


def test_noise_from_the_first_step_on(llama):  # noqa: F811
    """Of the matrices asked for, on the same initial weights."""
    plain, noisy = (
        llama.train.make_program(settings_of(llama, f"{ONE} {flags}")) for flags in ("", NOISE)
    )
    (weights, _), (params, state) = plain.start(), noisy.start()
    assert_same(gaussws.clean_params(params, state), weights)
    changed = {path for path, same in compared(params, weights) if not same}
    assert changed == {"layers/self_attn/o_proj/kernel", "layers/mlp/down_proj/kernel"}
    assert gaussws.bitwidths(state).keys() == changed


def compared(one, other):
    rows = zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True)
    for (keys, a), b in rows:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        yield path, bool((np.asarray(a) == np.asarray(b)).all())


def test_a_run_with_noise_is_resumed(llama, tmp_path):  # noqa: F811
    """With the very bits, its noise and bitwidths included; not without noise."""
    whole = trained(llama, f"{ONE} {NOISE}").run
    where = f"{ONE} --checkpoint {tmp_path}"
    trained(llama, f"{where} {NOISE} --until 3")
    with pytest.raises(SystemExit, match="noise='od', not None"):
        trained(llama, f"{where} --resume")
    rest = trained(llama, f"{where} {NOISE} --resume").run
    assert_same_bits(rest, whole)


@pytest.mark.full
def test_on_a_mesh(llama):  # noqa: F811
    """FSDP and tensor parallelism: the same noise."""
    one, mesh = (trained(llama, f"{flags} {NOISE}").run for flags in (ONE, ANOTHER))
    assert mesh.losses == pytest.approx(one.losses, abs=3e-3)
    plain = trained(llama, ONE).run
    assert one.losses == pytest.approx(plain.losses, abs=0.1) and one.losses != plain.losses


@pytest.mark.full
def test_optax_keeps_its_weights_in_the_state(llama):  # noqa: F811
    """f32 ones, beside bf16 ones with noise."""
    flags = f"{ONE} --optimizer optax.adamw"
    plain, noisy = (trained(llama, f"{flags} {more}").run for more in ("", "--noise all"))
    assert noisy.losses == pytest.approx(plain.losses, abs=0.1)
    kernels = noisy.params["layers"]["mlp"]["down_proj"]["kernel"]
    assert kernels.dtype == "bfloat16" and noisy.params["lm_head"]["kernel"].dtype == "float32"
    masters = lowmem.master_params(noisy.params, noisy.state)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(masters)} == {"float32"}


def test_it_says_so(llama):  # noqa: F811
    settings = settings_of(llama, f"--data-parallel 1 {NOISE}")
    assert llama.report.case(settings) == "llama-tiny noise=od/flash_adamw"
    program = llama.train.make_program(settings)
    assert "GaussWS noise [od]" in llama.report.headline(settings, program.report, "a text")
    with pytest.raises(SystemExit, match="--release and --noise"):
        settings_of(llama, f"--data-parallel 1 --release {NOISE}")
