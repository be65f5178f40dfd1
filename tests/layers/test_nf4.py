"""NF4 against its definitions, bitsandbytes' layout, and the product with the decoded matrix."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem._src.arrays import nf4 as format
from optax_lowmem.layers import nf4
from tests import tolerances as tol
from tests.contract_cases import assert_same
from tests.meshes import mesh_of
from tests.oracle import nf4 as oracle

SHAPES = [(1, 64), (3, 128), (48, 1088), (2, 5, 192)]


def drawn(shape, dtype=jnp.float32, seed=0):
    """Rows of very different sizes, one block of zeros."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))
    w[..., 0, :64] = 0
    return jnp.asarray(w, dtype)


def unpacked(codes):
    codes = np.asarray(codes)
    return np.stack([codes >> 4, codes & 15], -1).reshape(*codes.shape[:-1], -1)


def parts(q):
    return unpacked(q.codes), np.asarray(q.absmax), np.asarray(q.nested_absmax), float(q.offset)


def test_the_maps_are_those_of_the_papers():
    np.testing.assert_allclose(format.LEVELS, oracle.levels(), rtol=0, atol=tol.NF4_LEVELS)
    np.testing.assert_allclose(
        format.dynamic_map(), oracle.dynamic_map(), rtol=tol.DYNAMIC_MAP, atol=0
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_codes_are_the_nearest(shape, dtype):
    """But for numbers that f32 cannot tell from halfway between two levels."""
    w = drawn(shape, dtype)
    found, wanted = parts(nf4.quantize(w)), oracle.quantize(w)
    assert np.mean(found[0] != wanted[0]) <= tol.NF4_TIES
    assert np.mean(found[1].ravel() != wanted[1]) <= tol.NF4_TIES
    np.testing.assert_allclose(found[2], wanted[2], rtol=tol.NF4_OFFSET)
    np.testing.assert_allclose(found[3], wanted[3], rtol=tol.NF4_OFFSET)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_decoded_is_what_the_codes_stand_for(shape):
    q = nf4.quantize(drawn(shape))
    wanted = oracle.dequantize(*parts(q))
    np.testing.assert_allclose(nf4.dequantize(q), wanted, rtol=tol.NF4_DECODE, atol=1e-7)
    assert not np.asarray(nf4.dequantize(q))[0, :64].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_at_most_half_a_gap(shape):
    """Half the widest gap between levels, and that of absmax, which is half that of its map."""
    w = drawn(shape)
    q = nf4.quantize(w)
    error = np.abs(np.float64(nf4.dequantize(q)) - np.float64(w)).reshape(*w.shape[:-1], -1, 64)
    absmax = np.abs(np.float64(w)).reshape(error.shape).max(-1)
    of_absmax = np.abs(np.float64(format.decoded_absmax(q)) - absmax)
    levels, values = oracle.levels(), oracle.dynamic_map()
    gap, nested_gap = np.diff(levels).max() / 2, max(np.diff(values).max() / 2, 1 + values[0])
    rounding = tol.NF4_DECODE * absmax.max()  # of a sum with the mean absmax
    assert (error.max(-1) <= gap * absmax + of_absmax + rounding).all()
    most = nested_gap * np.asarray(q.nested_absmax).max(-1)
    assert (of_absmax <= most[..., None, None] + rounding).all()


def test_bits_per_weight():
    q = jax.eval_shape(nf4.quantize, jax.ShapeDtypeStruct((14_336, 4096), jnp.bfloat16))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(q))
    assert round(8 * size / (14_336 * 4096), 3) == 4.127
    assert q.shape == (14_336, 4096) and q.ndim == 2


def test_layout():
    """The first of two elements is in the high bits; code 15 is the block's maximum."""
    w = jnp.zeros((2, 64)).at[0, :4].set(jnp.array([1.0, -1.0, 0.0, 0.45])).at[1].set(0.5)
    q = nf4.quantize(w)
    assert np.asarray(q.codes)[0, :3].tolist() == [0xF0, 0x7C, 0x77]
    assert np.asarray(q.codes)[1].tolist() == [0xFF] * 32
    assert float(q.offset) == 0.75 and np.asarray(q.nested_absmax).tolist() == [0.25]
    assert np.asarray(q.absmax).ravel().tolist() == [255, 0]  # +1, and -0.993, the lowest


def checkpoint(q, name="w", **other):
    """The tensors of a matrix as bitsandbytes' `Linear4bit` saves them."""
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(q.shape),
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(q.offset),
    } | other  # fmt: skip
    return {
        name: np.asarray(q.codes).reshape(-1, 1),
        f"{name}.absmax": np.asarray(q.absmax).ravel(),
        f"{name}.quant_map": np.asarray(format.LEVELS, np.float32),
        f"{name}.nested_absmax": np.asarray(q.nested_absmax),
        f"{name}.nested_quant_map": format.dynamic_map(),
        f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(
            json.dumps(state).encode(), np.uint8
        ),
    }


def test_a_checkpoint_of_bitsandbytes():
    """Bytes by hand: [2, 64], codes 0 to 15 in turn, absmax 0.5 + 0.25 and 0.5 + 0.25 * 0."""
    codes = np.tile(np.array([0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF], np.uint8), 8)
    q = nf4.NF4Array(
        codes.reshape(2, 32), np.array([[255], [127]], np.uint8), np.array([0.25], np.float32),
        np.float32(0.5),
    )  # fmt: skip
    assert format.dynamic_map()[127] == 0
    found = nf4.from_bitsandbytes(checkpoint(q), "w")
    wanted = np.tile(np.float32(format.LEVELS), (2, 4)) * np.float32([[0.75], [0.5]])
    assert_same(nf4.dequantize(found), wanted)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda t: t.pop("w.absmax"), r"w\.absmax not in the checkpoint"),
        (lambda t: t.pop("w"), r"w not in the checkpoint"),
        (lambda t: t.update(checkpoint(Q, blocksize=128)), "blocksize 128; 64 is supported"),
        (lambda t: t.update({"w.quant_map": np.zeros(16)}), "quant_map is not the map"),
        (lambda t: t.update(checkpoint(Q, shape=[4, 32])), r"w has the shape \[4, 32\]"),
    ],
)
def test_a_checkpoint_that_is_not_supported(change, error):
    tensors = checkpoint(Q)
    change(tensors)
    with pytest.raises(ValueError, match=error):
        nf4.from_bitsandbytes(tensors, "w")


Q = nf4.quantize(jnp.ones((2, 64)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_product_and_gradient_are_those_of_the_decoded_matrix(dtype, transposed):
    """In bits, alone and in jit."""
    q = nf4.quantize(drawn((128, 192)))
    w = nf4.dequantize(q, dtype)
    x = drawn((2, 5, 192 if transposed else 128), dtype, 1)
    g = drawn((2, 5, 128 if transposed else 192), dtype, 2)

    def in_4_bits(x, g):
        y, pull = jax.vjp(lambda x: nf4.matmul(x, q, transposed), x)
        return y, *pull(g)

    def decoded(x, g):
        y, pull = jax.vjp(lambda x: x @ (w.T if transposed else w), x)
        return y, *pull(g)

    wanted = jax.jit(decoded)(x, g)
    assert_same(jax.jit(in_4_bits)(x, g), wanted)
    assert_same(in_4_bits(x, g), wanted)


def test_nothing_decoded_is_kept_for_the_backward_pass():
    q, x = nf4.quantize(drawn((128, 192))), drawn((5, 192))
    report = lowmem.memory.activation_report(lambda x, q: nf4.matmul(x, q, True), x, q, weights=1)
    assert report.total_bytes == 0


def test_a_stack_is_its_matrices():
    w = drawn((2, 5, 192))
    q = nf4.quantize(w)
    for i in range(2):
        assert_same(jax.tree.map(lambda x, i=i: x[i], q), nf4.quantize(w[i]))
    assert_same(jax.vmap(nf4.quantize)(w), q)
    x = drawn((2, 3, 192), seed=1)
    _, scanned = jax.lax.scan(lambda _, given: (None, nf4.matmul(*given, True)), None, (x, q))
    mapped = jax.vmap(lambda x, q: nf4.matmul(x, q, True))(x, q)
    np.testing.assert_allclose(mapped, scanned, rtol=tol.NF4_SUM_ORDER, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("a", "b"), P(("a", "b"), None)])
def test_sharded(spec, kind):
    """Decoding has the bits of one device; a product but for the order of sums."""
    mesh = mesh_of(kind, a=2, b=2)
    q, x = nf4.quantize(drawn((64, 256)) / 64), drawn((8, 256), seed=1)
    placed = jax.device_put(q, q.shardings(NamedSharding(mesh, spec)))
    assert placed.codes.sharding.spec == P(*spec, *(None,) * (2 - len(spec)))
    decoded = jax.jit(nf4.dequantize)(placed)
    assert decoded.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert_same(decoded, nf4.dequantize(q))
    again = nf4.quantize(decoded)
    assert again.codes.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    assert_same(again.codes, nf4.quantize(nf4.dequantize(q)).codes)

    def loss(x, q):
        y = nf4.matmul(x, q, True)
        return jnp.sum(jnp.sin(y))

    x = jax.device_put(x, NamedSharding(mesh, P()))
    found, wanted = (jax.jit(jax.grad(loss))(x, one) for one in (placed, q))
    np.testing.assert_allclose(found, wanted, rtol=tol.NF4_SUM_ORDER, atol=1e-5)


def test_in_a_shard_map():
    """Each device has some outputs of the matrix; the gradient of x is summed over devices."""
    mesh = mesh_of(a=2)
    x = drawn((8, 128), seed=1)
    stacked = nf4.quantize(drawn((2, 32, 128)) / 64)

    def loss(x, q):
        y = nf4.matmul(x, jax.tree.map(lambda a: a[0], q), True)
        return jax.lax.psum(jnp.sum(jnp.sin(y)), "a")

    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    found = jax.jit(jax.grad(sharded))(x, stacked)
    w = nf4.dequantize(stacked).reshape(64, 128)
    wanted = jax.grad(lambda x: jnp.sum(jnp.sin(x @ w.T)))(x)
    np.testing.assert_allclose(found, wanted, rtol=tol.NF4_SUM_ORDER, atol=1e-4)


def test_wrong_calls():
    q, x = nf4.quantize(jnp.ones((4, 64))), jnp.ones((2, 64))
    with pytest.raises(ValueError, match=r"w has the shape \[64, 48\].* multiple of 64"):
        nf4.quantize(jnp.ones((64, 48)))
    with pytest.raises(ValueError, match=r"w has the shape \[64\]"):
        nf4.quantize(jnp.ones(64))
    with pytest.raises(TypeError, match="w is int32"):
        nf4.quantize(jnp.ones((64, 64), jnp.int32))
    with pytest.raises(TypeError, match="not an NF4Array: call nf4.quantize"):
        nf4.matmul(x, x)
    with pytest.raises(TypeError, match="x is int32"):
        nf4.matmul(x.astype(jnp.int32), q, True)
    with pytest.raises(ValueError, match=r"x has the shape \[2, 64\] and w \[4, 64\].*\[k, m\]"):
        nf4.matmul(x, q)
    with pytest.raises(ValueError, match="w is a stack of matrices"):
        nf4.matmul(x, nf4.quantize(jnp.ones((2, 4, 64))), True)
    mesh = mesh_of(a=8)
    with pytest.raises(ValueError, match="the 4 elements along axis 0 .* 8 devices"):
        q.shardings(NamedSharding(mesh, P("a")))
    with pytest.raises(ValueError, match="the 1 blocks of 64 along axis 1 .* 8 devices"):
        q.shardings(NamedSharding(mesh, P(None, "a")))


def test_nan_stays_nan():
    w = drawn((4, 128)).at[1, 3].set(jnp.nan)
    assert np.isnan(np.asarray(nf4.dequantize(nf4.quantize(w)))[1]).any()


def test_adapters_of_a_frozen_base():
    """Training adapters lowers the loss and leaves the base as it was."""
    q = nf4.quantize(drawn((64, 64)))
    before = jax.tree.map(np.asarray, q)
    x, target = drawn((32, 64), seed=1), drawn((32, 64), seed=2)
    tx = lowmem.flash_adamw(1e-2)
    adapters = {"a": drawn((64, 8), seed=3) / 8, "b": jnp.zeros((8, 64))}
    adapters, state = lowmem.init(tx, adapters)

    @jax.jit
    def step(adapters, state, q):
        def loss_fn(adapters):
            y = nf4.matmul(x, q, True) + x @ adapters["a"] @ adapters["b"]
            return optax.squared_error(y, target).mean()

        loss, grads = jax.value_and_grad(loss_fn)(adapters)
        return *lowmem.step(tx, grads, state, adapters), loss

    losses = []
    for _ in range(40):
        adapters, state, loss = step(adapters, state, q)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert_same(q, before)
