"""Adam-mini's blocks of real Flax models, Linen and NNX."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from optax_lowmem import blocks
from optax_lowmem.blocks import Block

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")


def mean_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """path -> shape of v_mean; every leaf is known."""
    report = blocks.describe(params)
    assert not report.unknown
    return {row.path: row.block.mean_shape(row.shape) for row in report.rows}


def test_linen_models():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=32, name="attn")(y)
            return x + nn.Dense(16)(nn.Dense(48)(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(50, 16)(tokens)
            scanned = nn.scan(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            x, _ = scanned()(x, None)
            x, _ = Layer(name="single")(x, None)
            x = nn.DenseGeneral((2, 5))(x)
            return nn.DenseGeneral(7, axis=(-2, -1))(x)

    tokens = jnp.zeros((2, 6), jnp.int32)
    params = jax.eval_shape(Model().init, jax.random.key(0), tokens)["params"]
    one = {
        "Dense_0/bias": (1,), "Dense_0/kernel": (1, 16), "Dense_1/bias": (1,),
        "Dense_1/kernel": (1, 48), "LayerNorm_0/bias": (1,), "LayerNorm_0/scale": (1,),
        "attn/key/bias": (1, 1), "attn/key/kernel": (1, 4, 1), "attn/out/bias": (1,),
        "attn/out/kernel": (1, 1, 16), "attn/query/bias": (1, 1), "attn/query/kernel": (1, 4, 1),
        "attn/value/bias": (1, 1), "attn/value/kernel": (1, 4, 8),
    }  # fmt: skip
    assert mean_shapes(params) == {
        "DenseGeneral_0/bias": (1, 1),
        "DenseGeneral_0/kernel": (1, 2, 5),
        "DenseGeneral_1/bias": (1,),
        "DenseGeneral_1/kernel": (1, 1, 7),
        "Embed_0/embedding": (50, 1),
        **{f"ScanLayer_0/{path}": (3, *shape) for path, shape in one.items()},
        **{f"single/{path}": shape for path, shape in one.items()},
    }


def test_linens_partition_names_say_where_layers_are_stacked():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            names = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
            return nn.Dense(8, kernel_init=names, use_bias=False, name="project")(x), None

    scanned = nn.scan(
        Layer,
        variable_axes={"params": 1},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )(name="decoder")
    boxed = jax.eval_shape(scanned.init, jax.random.key(0), jnp.zeros((2, 8)), None)["params"]
    report = blocks.describe(boxed)
    assert report.rows[0].shape == (8, 3, 8)
    assert report.rows[0].block == Block((0,)) and not report.unknown
    assert "axis 1 is 'layers' in the metadata" in report.rows[0].block.reason
    assert blocks.describe(nn.unbox(boxed)).unknown  # without the names it is not guessed


def test_nnx_models():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.attn = nnx.MultiHeadAttention(4, 16, 32, use_bias=False, decode=False, rngs=rngs)
            self.norm = nnx.RMSNorm(16, rngs=rngs)
            self.up = nnx.Linear(16, 48, rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def stack(rngs):
                return Layer(rngs)

            self.embed = nnx.Embed(50, 16, rngs=rngs)
            self.layers = stack(rngs)
            self.first = nnx.List([Layer(rngs)])

    params = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
    one = {
        "attn/key/kernel": (1, 4, 1), "attn/out/kernel": (1, 1, 16), "attn/query/kernel": (1, 4, 1),
        "attn/value/kernel": (1, 4, 8), "norm/scale": (1,), "up/bias": (1,), "up/kernel": (1, 48),
    }  # fmt: skip
    assert mean_shapes(params) == {
        "embed/embedding": (50, 1),
        **{f"first/0/{path}": shape for path, shape in one.items()},
        **{f"layers/{path}": (3, *shape) for path, shape in one.items()},
    }


def test_nnxs_metadata_say_where_layers_are_stacked():
    init = nnx.with_metadata(
        nnx.initializers.lecun_normal(), out_sharding=("in", "out"), eager_sharding=False
    )

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def stack(rngs):
        return nnx.Linear(16, 48, use_bias=False, kernel_init=init, rngs=rngs)

    params = nnx.state(stack(nnx.Rngs(0)), nnx.Param)
    assert mean_shapes(params) == {"kernel": (3, 1, 48)}
