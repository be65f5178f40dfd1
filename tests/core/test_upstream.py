"""Limits of JAX and optax that this library works around: a test fails once upstream lifts one."""

import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton as plgpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_lowmem as lowmem
from optax_lowmem._src.kernels import partitioned, platform
from optax_lowmem._src.optim.wrappers.chain import global_norm_limit
from tests.lowering import lower_for_cuda

BF16 = {"w": jnp.ones(8, jnp.bfloat16)}


def test_optax_does_not_say_what_a_transformation_is():
    """Else `global_norm_limit` need not read a closure (google-deepmind/optax#1)."""
    clipping = optax.clip_by_global_norm(0.5)
    assert type(clipping) is optax.GradientTransformation
    assert clipping._fields == ("init", "update") and not hasattr(clipping, "max_norm")


@pytest.mark.parametrize("limit", [0.5, jnp.float32(0.5)])
def test_the_limit_of_clipping_is_found(limit):
    assert global_norm_limit(optax.clip_by_global_norm(limit)) is limit


@pytest.mark.parametrize(
    "link",
    [
        optax.clip(0.5),
        optax.adaptive_grad_clip(0.5),
        optax.masked(optax.clip_by_global_norm(0.5), True),
        optax.chain(optax.clip_by_global_norm(0.5)),
        lowmem.flash_sgd(0.1),
    ],
)
def test_other_links_have_no_limit(link):
    assert global_norm_limit(link) is None


def test_optax_refuses_f32_updates_of_16_bit_gradients():
    """Else `lowmem.step` need not try f32 gradients (google-deepmind/optax#377)."""
    tx = optax.apply_if_finite(lowmem.flash_sgd(0.1), 1)
    state = tx.init(BF16)
    with pytest.raises(TypeError) as error:
        jax.eval_shape(tx.update, BF16, state, BF16)
    assert type(error.value) is TypeError  # a type of its own would tell why


def test_optax_refuses_extra_arguments():
    """Else `stale_corrections` need not select them by trial (google-deepmind/optax#1131)."""
    tx = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))
    with pytest.raises(TypeError):
        tx.update(BF16, tx.init(BF16), BF16, value=0.0)


def test_jax_names_partitioned_calls_by_an_address():
    """Else `partitioned` need not name them by their content (jax-ml/jax#21159)."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))

    def named():
        double = custom_partitioning(lambda x: 2 * x)
        double.def_partition(
            lambda mesh, args, result: (mesh, lambda x: 2 * x, sharding, (sharding,)),
            sharding_rule="i -> i",
        )
        text = jax.jit(double, in_shardings=sharding).lower(jnp.ones(8)).as_text()
        return re.findall(r'CustomSPMDPartitioning.*?backend_config = "(\d+)"', text)

    first, second = named(), named()
    assert len(first) == len(second) == 1 and first != second


def test_this_jax_has_the_private_functions_of_partitioned():
    assert partitioned.available()


def erf(x, y):
    y[...] = jax.lax.erf(x[...])


def to_fp8(x, y):
    y[...] = x[...].astype(jnp.int32).astype(y.dtype)


@pytest.mark.skipif(not platform.has_pallas_triton(), reason="no Pallas-Triton lowering")
@pytest.mark.parametrize("body, dtype", [(erf, "float32"), (to_fp8, "float8_e4m3fn")])
def test_pallas_triton_does_not_lower(body, dtype):
    """Else `gelu_exact` can have a Pallas kernel, and `Reference.load` an integer fill value."""
    out, how = jax.ShapeDtypeStruct((16,), dtype), plgpu.CompilerParams(num_warps=1)
    kernel = pl.pallas_call(body, out_shape=out, compiler_params=how)
    with warnings.catch_warnings(), pytest.raises(NotImplementedError, match=r"erf|cannot cast"):
        warnings.simplefilter("ignore", DeprecationWarning)
        lower_for_cuda(kernel, jnp.ones(16))
