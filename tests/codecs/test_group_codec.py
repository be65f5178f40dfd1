"""Encode and decode of one array: the kernels against the reference, and who takes what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.arrays.groups import Tile, Tiling
from optax_lowmem._src.kernels import (
    gpu_kernel,
    gpu_pallas,
    group_codec,
    platform,
)
from tests import launch_cases
from tests import tolerances as tol
from tests.launch_cases import units
from tests.lowering import gpu_mesh, kernels_in, lower_for_cuda
from tests.tiers import rows, triton_often

CODECS = sorted(codecs.CODECS)
# signed and unsigned, and either rounding; the others share their bodies with these
FAST = {
    "softsign-int8": "nearest",
    "sqrt-uint8": "stochastic",
    "linear-int4": "stochastic",  # two codes in a byte
}
MARKED = rows(CODECS, list(FAST)[:2])
KEY = jnp.uint32(9)
GRID = [
    pytest.param(
        backend,
        name,
        key,
        id=f"{backend}-{name}-{how}",
        # interpreting takes seconds
        marks=()
        if FAST.get(name) == how and (backend == "triton" or name == "linear-int4")
        else pytest.mark.full,
    )
    for backend in ("interpret", "triton")
    for name in CODECS
    for how, key in (("nearest", None), ("stochastic", KEY))
]
SMALL = Tile(elements=64, warps=1)  # several tiles even of small arrays, the last one partial

# (shape, group size, dtype): flat groups, odd tails, groups wider than the axis or than a tile,
# widths that are no power of two
CASES = [
    ((3, 96), 32, jnp.float32), ((100,), 32, jnp.float32), ((7, 33), 32, jnp.bfloat16),
    ((5, 3), 32, jnp.float32), ((70, 1), 32, jnp.float16), ((2, 3, 50), 24, jnp.float32),
    ((3, 40), 7, jnp.bfloat16), ((2, 300), 256, jnp.float32), ((9,), 1, jnp.float32),
]  # fmt: skip


def cases_of(codec, cases=CASES):
    """Return those whose groups hold whole bytes of codes."""
    return [case for case in cases if case[1] % codec.codes_per_byte == 0]


def values(codec, case, seed=0):
    """Normal values with log-normal scales inside a group, some zeros, and a group of zeros."""
    shape, group_size, dtype = case
    rng = np.random.default_rng(seed)
    x = np.exp(rng.normal(size=shape)) * rng.normal(size=shape)
    x[rng.uniform(size=shape) < 0.02] = 0
    x[..., -min(shape[-1] // 2, group_size) :][:1] = 0
    return jnp.asarray(x if codec.signed else np.abs(x), dtype)


def by_reference(codec, arrays, cases, key):
    """Codes, scales and decoded values of every array, in one compiled call."""

    @jax.jit
    def run(arrays):
        stored = [
            group_codec.encode_plain(codec, x, size, key, "mu")
            for x, (_, size, _) in zip(arrays, cases, strict=True)
        ]
        rows = zip(stored, cases, arrays, strict=True)
        return [(*s, codecs.decode_array(codec, *s, n, x.shape[-1])) for s, (_, n, _), x in rows]

    return run(arrays)


def by_kernel(codec, arrays, cases, key, tile=SMALL, backend="interpret"):
    @jax.jit
    def run(arrays):
        how = dict(tile=tile, backend=backend)
        stored = [
            group_codec.encode_by_kernel(codec, x, size, key, "mu", **how)
            for x, (_, size, _) in zip(arrays, cases, strict=True)
        ]
        rows = zip(stored, cases, arrays, strict=True)
        return [(*s, codecs.decode_array(codec, *s, n, x.shape[-1])) for s, (_, n, _), x in rows]

    return run(arrays)


def decode_rtol(codec):
    return tol.GROUP_DECODE_EXPANDED if "expanded" in codec.name else tol.GROUP_DECODE


def assert_same(found, wanted, case, codec, backend="interpret"):
    """Two (codes, scales, decoded values): bits of what is stored, some u of what is not.

    NumPy has no multiply-add: of codes that it makes one may be on the other side of a tie.
    """
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), case
    same = np.asarray(found[0]) == np.asarray(wanted[0])
    assert (~same).sum() <= (backend == "triton"), case
    np.testing.assert_array_equal(found[1], wanted[1], err_msg=str(case))
    values = (x if same.all() else np.asarray(x)[same] for x in (found[2], wanted[2]))
    np.testing.assert_allclose(*values, rtol=decode_rtol(codec), err_msg=str(case))


@functools.cache
def of_cases(name, stochastic):
    """Cases, arrays, and what the reference makes of them: for both backends.

    Of codecs whose bodies others share, every other case for each rounding.
    """
    codec = codecs.CODECS[name]
    cases = cases_of(codec, CASES if name in FAST else CASES[stochastic::2])
    arrays = [values(codec, case) for case in cases]
    return cases, arrays, by_reference(codec, arrays, cases, KEY if stochastic else None)


@pytest.mark.parametrize("backend, name, key", GRID, indirect=["backend"])
def test_kernels_are_the_reference(backend, name, key):
    codec = codecs.CODECS[name]
    cases, arrays, wanted = of_cases(name, key is not None)
    found = by_kernel(codec, arrays, cases, key, backend=backend)
    for case, one, other in zip(cases, found, wanted, strict=True):
        assert_same(one, other, case, codec, backend)


def test_an_odd_vocabulary():
    """50257 = 29 * 1733: a row starts anywhere in memory, and every row ends in part of a group."""
    codec, case = codecs.softsign(), ((2, 50257), 32, jnp.float32)
    x = values(codec, case)
    wanted = by_reference(codec, [x], [case], KEY)[0]
    assert_same(by_kernel(codec, [x], [case], KEY, tile=Tile())[0], wanted, case, codec)
    assert wanted[1].shape == (2, 1571)


# the authors' affine codec takes whole groups only: the zeros of a partial one widen its range
PARTIAL = [row for row in MARKED if "affine-int8-paper" not in getattr(row, "values", (row,))]


@triton_often
@pytest.mark.parametrize("name", PARTIAL)
def test_what_is_not_there_does_not_count(name, backend):
    """A partial group, among far larger values, is stored as it would be alone."""
    codec = codecs.CODECS[name]
    cases = [((5, 33), 32, jnp.float32), ((5, 25), 24, jnp.float32), ((3, 3), 2, jnp.float32)]
    arrays = [jnp.full(shape, 1e3).at[:, -1].set(1e-3) for shape, _, _ in cases]
    # as many as share a byte: of an odd axis one, beside a code of 0
    alone = [x[:, -1:] if x.shape[1] % 2 else x[:, -codec.codes_per_byte :] for x in arrays]
    wanted = by_reference(codec, alone, cases, None)
    for found, other in zip(
        by_kernel(codec, arrays, cases, None, backend=backend), wanted, strict=True
    ):
        assert_same([part[:, -1:] for part in found], other, name, codec)


@pytest.mark.parametrize("shape, partial", [((3, 160), True), ((2, 160), False)])
def test_a_partial_tile_is_masked(shape, partial, monkeypatch):
    """Interpreting drops what is stored beyond an array's end; a GPU would write it."""
    masks = []

    def watched(plain):
        def access(*args, mask, **kwargs):
            masks.append(mask)
            return plain(*args, mask=mask, **kwargs)

        return access

    for name in ("load", "store"):
        plain = getattr(gpu_pallas.plgpu, name)
        monkeypatch.setattr(gpu_pallas.plgpu, name, watched(plain))
    by_kernel(codecs.linear(), [jnp.ones(shape)], [(shape, 32, jnp.float32)], None)
    assert masks and all((mask is not None) == partial for mask in masks)
    if partial:
        tiling = Tiling(shape, 32, SMALL.elements)
        last = gpu_kernel.Place.of(tiling, jnp.int32(tiling.tiles - 1)).row_mask
        assert last.tolist() == [True, False]


@triton_often
@pytest.mark.parametrize("name", MARKED)
def test_groups_that_are_not_finite(name, backend):
    codec, case = codecs.CODECS[name], ((4, 80), 32, jnp.float32)
    x = jnp.abs(values(codec, case)) + 1
    bad = x.at[0, 3].set(jnp.nan).at[2, 79].set(jnp.inf)
    found = by_kernel(codec, [bad], [case], KEY, backend=backend)[0]
    wanted = by_reference(codec, [bad], [case], KEY)[0]
    clean = np.ones(x.shape, bool)
    clean[0, :32] = clean[2, 64:] = False
    # bits of a NaN's scale are NumPy's own
    exact = codec.guarded and backend == "interpret"
    groups = np.ones(wanted[1].shape, bool) if exact else clean[:, ::32]
    np.testing.assert_array_equal(found[1][groups], wanted[1][groups])
    assert (np.isfinite(found[2]) == clean).all() or not codec.guarded
    sound = by_reference(codec, [x], [case], KEY)[0]
    codes = (codec.unpack(one[0], 80)[clean] for one in (found, sound))
    np.testing.assert_array_equal(*codes)
    np.testing.assert_allclose(found[2][clean], sound[2][clean], rtol=decode_rtol(codec))


@triton_often
@pytest.mark.parametrize("name", rows(["sqrt-uint8", "linear-int4"], ["sqrt-uint8"]))
def test_vmap(name, backend):
    codec, case = codecs.CODECS[name], ((3, 5, 39), 32, jnp.float32)
    x, keys = values(codec, case), jnp.arange(3, dtype=jnp.uint32)

    def both(encode):
        def run(x, key):
            stored = encode(codec, x, 32, key)
            return (*stored, codecs.decode_array(codec, *stored, 32, 39))

        return jax.jit(jax.vmap(run))

    interpreted = functools.partial(group_codec.encode_by_kernel, tile=SMALL, backend=backend)
    wanted = both(group_codec.encode_plain)(x, keys)
    assert_same(both(interpreted)(x, keys), wanted, case, codec)
    text = lower_for_cuda(both(group_codec.encode_by_kernel), x, keys)
    assert kernels_in(text) == ["group_encode"]


@pytest.mark.parametrize("name", MARKED)
def test_kernels_lower_for_cuda(name, on_a_gpu):
    codec = codecs.CODECS[name]
    forms = [
        ((64, 64), 32, jnp.float32, None),
        ((3, 50257), 32, jnp.bfloat16, KEY),
        ((4, 4, 50), 24, jnp.float16, KEY),
        ((4, 1), 32, jnp.float32, None),
        ((3, 40000), 5000, jnp.float32, KEY),
    ]

    def run(*arrays):
        for x, (_, size, _, key) in zip(arrays, forms, strict=True):
            yield group_codec.encode_by_kernel(codec, x, size, key)

    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, _, dtype, _ in forms]
    text = lower_for_cuda(lambda *arrays: list(run(*arrays)), *shapes)
    assert kernels_in(text) == ["group_encode"] * len(forms)


@pytest.mark.parametrize("check", [True, False])
def test_inside_a_shard_map(check, on_a_gpu):
    mesh, codec = gpu_mesh(data=8), codecs.softsign()

    def on_a_device(x, key):
        return group_codec.encode_by_kernel(codec, x, 32, key[0])

    specs = dict(in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=check)
    x = jax.ShapeDtypeStruct((16, 100), jnp.float32)
    keys = jax.ShapeDtypeStruct((8,), jnp.uint32)
    step = jax.shard_map(on_a_device, mesh=mesh, **specs)
    text = lower_for_cuda(step, x, keys, mesh=mesh)
    assert kernels_in(text) == ["group_encode"]


# ---- who takes what --------------------------------------------------------------------------
def round_trip(x, key=KEY):
    codec = codecs.softsign()
    stored = group_codec.encode(codec, x, 32, key, "mu")
    return (*stored, group_codec.decode(codec, *stored))


def kernels_of_round_trip():
    """Those in its lowering for CUDA; a new function each time, since JAX keeps what it traced."""
    x = jax.ShapeDtypeStruct((7, 33), jnp.float32)
    return kernels_in(lower_for_cuda(functools.partial(round_trip), x))


def test_kernels_are_for_gpus(on_a_gpu, monkeypatch):
    """Traced where there is one, they run there, and the reference wherever else it is run."""
    codec, case = codecs.softsign(), ((7, 33), 32, jnp.float32)
    x = jax.device_put(values(codec, case), jax.devices("cpu")[0])
    assert group_codec.unsupported(x, 32) is None
    assert kernels_of_round_trip() == ["group_encode"]
    for key in (None, KEY):
        wanted = by_reference(codec, [x], [case], key)[0]
        assert_same(jax.jit(functools.partial(round_trip, key=key))(x), wanted, case, codec)
        assert_same(round_trip(x, key), wanted, case, codec)
    monkeypatch.setattr(platform, "no_kernel_reason", lambda x: "no kernels today")
    assert group_codec.unsupported(x, 32) == "no kernels today"
    assert not kernels_of_round_trip()


@pytest.mark.parametrize(
    "shape, dtype, group_size, reason",
    [
        ((4, 4), "float8_e5m2", 32, "float8_e5m2 is not one of float32, bfloat16"),
        ((0, 4), "float32", 32, "0 elements"),
        ((2**20, 2**11), "float32", 32, "2147483648 elements"),
        ((4, 40000), "float32", 20000, "32768 lanes, over 16384"),
    ],
)
def test_arrays_that_kernels_do_not_take(shape, dtype, group_size, reason, on_a_gpu):
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert reason in group_codec.unsupported(x, group_size)
    encode = functools.partial(group_codec.encode, codecs.linear(), group_size=group_size)
    assert jax.eval_shape(encode, x)[0].shape == shape  # by the reference


def test_explicit_axes(on_a_gpu):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.ones((4, 33)), jax.NamedSharding(mesh, P("data")))
    assert "Explicit mesh axes" in group_codec.unsupported(x, 32)
    codes, _, _ = jax.jit(functools.partial(round_trip))(x)
    assert jax.typeof(codes).sharding.spec == P("data", None)


@pytest.mark.parametrize("length, last", [(256, "data"), (254, None)])
def test_values_of_codes_that_share_bytes_are_sharded_as_the_codes(length, last):
    """Where the axis divides them: 127 bytes of 254 values do not lie on two devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    spec, codec = P(None, last), codecs.linear4()
    x = jax.device_put(jnp.ones((4, length)), jax.NamedSharding(mesh, spec))
    stored = group_codec.encode(codec, x)
    values = group_codec.decode(codec, *stored, length=length)
    assert [jax.typeof(a).sharding.spec for a in (stored[0], values)] == [spec, spec]


def test_misuse():
    codec, x = codecs.linear(), jnp.ones((4, 64))
    for shape in ((), (4, 0)):
        with pytest.raises(ValueError, match=r"no groups.*reshape a 0-d array to \(1,\)"):
            group_codec.encode(codec, jnp.ones(shape))
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        group_codec.encode(codec, x, 0)
    stored = group_codec.encode(codec, x, 32)
    for other, group_size in ((codec, 16), (codecs.softsign(), 32), (codecs.sqrt(), 32)):
        with pytest.raises(ValueError, match=f"{other.name} in groups of {group_size} stores"):
            group_codec.decode(other, *stored, group_size)


def test_compress_state_encodes_by_kernel(on_a_gpu):
    """Its decoding is left to XLA, which fuses it into the inner update."""
    tx = lowmem.compress_state(optax.adan(1e-3), m=codecs.softsign(), n=codecs.sqrt())
    params = {"w": jnp.ones((64, 128)), "b": jnp.ones(8)}
    state = tx.init(params)
    text = lower_for_cuda(tx.update, params, state, params)
    assert kernels_in(text) == ["group_encode"] * 2


# ---- on a GPU --------------------------------------------------------------------------------
LARGE = [
    ((512, 4096), 32, jnp.float32),
    ((33, 50257), 32, jnp.bfloat16),
    ((100, 1000), 24, jnp.float16),
    ((20, 10000), 5000, jnp.float32),
    ((100_000, 3), 32, jnp.float32),
]


@pytest.mark.gpu
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("name", CODECS)
def test_kernels_are_the_reference_on_a_gpu(name, key, gpu_backend):
    codec = codecs.CODECS[name]
    cases = cases_of(codec, CASES + LARGE)
    if codec == codecs.affine_paper():  # takes nothing else, says its docstring
        cases = [case for case in cases if Tiling(*case[:2], elements=1).flat]
        assert len(cases) > 2
    arrays = [values(codec, case) for case in cases]
    wanted = by_reference(codec, arrays, cases, key)
    found = by_kernel(codec, arrays, cases, key, tile=Tile(), backend=gpu_backend)
    codes = (
        np.concatenate([units(codec.unpack(row[0], row[2].shape[-1])).ravel() for row in rows])
        for rows in (found, wanted)
    )
    off = np.abs(np.subtract(*codes))
    assert off.max() <= 1 and (off > 0).mean() <= tol.REORDERED_CODES
    scales = [np.concatenate([row[1].ravel() for row in rows]) for rows in (found, wanted)]
    launch_cases.same_scales(codec, *scales, tol.GPU_SCALE_UNITS)
    if codec.scale.name == "f16":
        assert (scales[0] != scales[1]).mean() <= tol.GPU_F16_SCALE_SHARE
    decode = jax.jit(codecs.decode_array, static_argnums=(0, 3, 4))
    for case, (codes, scales, x) in zip(cases, found, strict=True):
        again = decode(codec, codes, scales, case[1], x.shape[-1])
        np.testing.assert_allclose(x, again, rtol=decode_rtol(codec), err_msg=str(case))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CODECS)
def test_groups_that_are_not_finite_on_a_gpu(name, gpu_backend):
    codec, case = codecs.CODECS[name], ((4, 80), 32, jnp.float32)
    x = (jnp.abs(values(codec, case)) + 1).at[0, 3].set(jnp.nan).at[2, 79].set(jnp.inf)
    x = x.at[1, 32:64].set(jnp.inf)
    _, scales, back = by_kernel(codec, [x], [case], KEY, backend=gpu_backend)[0]
    clean = np.ones(x.shape, bool)
    clean[0, :32] = clean[1, 32:64] = clean[2, 64:] = False
    assert np.isfinite(back)[clean].all()
    assert np.isfinite(launch_cases.decoded_scales(codec, scales)).sum() == 9
    assert np.isnan(back)[~clean].all() or not codec.guarded


@pytest.mark.gpu
def test_a_gpu_takes_the_kernels(gpu_backend):
    x = jnp.ones((64, 100))
    if jax.device_count() == 1:
        assert group_codec.unsupported(x, 32) is None
        text = jax.jit(functools.partial(round_trip)).trace(x).lower().as_text()
        by_pallas = ["group_encode"] if gpu_backend == "pallas" else []
        assert kernels_in(text) == by_pallas
        assert text.count("@triton_kernel_call") == 1 - len(by_pallas)
    else:
        assert "devices are visible" in group_codec.unsupported(x, 32)
