"""Triton source of traced functions: the same numbers as JAX's, on NumPy, without Triton."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_lowmem as lowmem
from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.block import product
from optax_lowmem._src.kernels import jaxpr_to_triton
from optax_lowmem._src.optim.step import gpu as gpu_step
from tests import launch_cases, small_leaves, triton_on_numpy
from tests.contract_cases import RULES
from tests.tiers import rows

RNG = np.random.default_rng(0)
FLOATS = np.float32([-2.5, -0.0, 0.0, 0.75, 3.0, np.inf, -np.inf, np.nan])
EIGHTS = np.float32([0, -0.0, 2**-10, 3 * 2**-10, 0.017, -1.06, 17, 448])
INTS = np.int32([-(2**31), -7, -1, 0, 1, 5, 2**31 - 1, 40])


def bits(x):
    """Of arrays NumPy has no comparison for, their bits."""
    x = np.asarray(x)
    if x.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        return x.view(np.uint8)
    return x.view(np.uint16) if x.dtype == jnp.bfloat16 else x


def source_of(jaxpr, parameters):
    """A function `f` of a jaxpr, as a kernel's body is written."""
    writer = jaxpr_to_triton._Writer(fp8=True)
    results = writer.body(jaxpr, parameters)
    lines = [*writer.lines, f"    return {', '.join(results)}"]
    return jaxpr_to_triton._source("f", parameters, lines)


def found(function, *arguments):
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
    jaxpr = jax.make_jaxpr(function)(*shapes)
    assert jaxpr_to_triton.missing(jaxpr) is None
    source = source_of(jaxpr, [f"x{i}" for i in range(len(arguments))])
    return triton_on_numpy.run(source, "f", *map(bits, arguments))


FUNCTIONS = {
    "maximum": (jnp.maximum, FLOATS, FLOATS[::-1].copy()),
    "minimum of integers": (jnp.minimum, INTS, INTS[::-1].copy()),
    "sign": (jnp.sign, FLOATS),
    "sign of integers": (jnp.sign, INTS),
    "minus": (jnp.negative, FLOATS),
    "minus an integer": (lambda x: -x, INTS),
    "logical shift": (lambda x: lax.shift_right_logical(x, jnp.int32(3)), INTS),
    "arithmetic shift": (lambda x: x >> 3, INTS),
    "a choice": (lambda x: jnp.where(x > 0, x, jnp.float32(2)), FLOATS),
    "no": (lambda x: ~(x > 0), FLOATS),
    "no bit": (lambda x: ~x, INTS),
    "a clamp": (lambda x: lax.clamp(jnp.int32(-5), x, jnp.int32(6)), INTS),
    "a power": (lambda x: x**3, FLOATS[:5]),
    "a square": (jnp.square, FLOATS),
    "finite": (jnp.isfinite, FLOATS),
    "bits": (numerics.to_bits, FLOATS),
    "a byte": (lambda x: x.astype(jnp.int8), INTS),
    "whether": (lambda x: x.astype(jnp.bool_), INTS),
    "a half": (lambda x: x.astype(jnp.float16), FLOATS),
    "bf16": (lambda x: x.astype(jnp.bfloat16), np.float32([1.00390625, 1.01171875, -3.1, 0, 7])),
    "of bf16": (lambda x: x.astype(jnp.float32), jnp.linspace(-1, 1, 8, dtype=jnp.bfloat16)),
    "a sum of bf16": (lambda x: x + x * 3, jnp.linspace(-1, 1, 8, dtype=jnp.bfloat16)),
    "a nested function": (lambda x: jax.jit(lambda y: y - 1)(x) * 2, FLOATS[:5]),
    "over both axes": (lambda x: jnp.max(x.reshape(2, 4)), INTS),
    "a transpose": (lambda x: x.reshape(2, 4).T, FLOATS),
    "a sigmoid": (jax.nn.sigmoid, np.float32([0, -200, 200, np.nan])),
    "E4M3": (lambda x: x.astype(jnp.float8_e4m3fn), EIGHTS),
    "E5M2": (lambda x: x.astype(jnp.float8_e5m2), EIGHTS),
    "of E4M3": (lambda x: x.astype(jnp.float32) * 2, EIGHTS.astype(jnp.float8_e4m3fn)),
    "of E5M2": (lambda x: x.astype(jnp.float32) * 2, EIGHTS.astype(jnp.float8_e5m2)),
    "rows and lanes": (
        lambda x, y: jnp.max(x[:, None] * y[None] + lax.iota(jnp.float32, 8)[None], axis=1),
        np.float32([1, 2, 3, 4]), np.linspace(-1, 1, 8, dtype=np.float32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name):
    function, *arguments = FUNCTIONS[name]
    (mine,) = found(function, *arguments)
    wanted = bits(jax.jit(function)(*arguments))
    assert mine.dtype == wanted.dtype
    np.testing.assert_array_equal(mine, wanted)


def test_instructions_are_named():
    jaxpr = jax.make_jaxpr(jaxpr_to_triton.APPROXIMATIONS.log2)(jnp.ones(4))
    source = source_of(jaxpr, ["x"])
    assert "'lg2.approx.ftz.f32 $0, $1;', '=r,r', [x], dtype=tl.float32" in source


def test_a_maximum_keeps_nan():
    """As lax.max; Triton's own would drop it."""
    jaxpr = jax.make_jaxpr(jnp.maximum)(FLOATS, FLOATS)
    assert "propagate_nan=tl.PropagateNan.ALL" in source_of(jaxpr, ["x", "y"])


def test_what_has_no_form_is_named():
    for function in (jnp.sort, jax.jit(lambda x: jnp.sort(x) + 1)):
        assert jaxpr_to_triton.missing(jax.make_jaxpr(function)(FLOATS)) == "sort"
    table = jax.make_jaxpr(lambda x: x + FLOATS)(FLOATS)
    assert jaxpr_to_triton.missing(table) == "a constant array of shape (8,)"


def test_e4m3_by_bits():
    """Without a GPU's conversions: every code; numbers of every size, all ties, and the largest."""
    codes = np.arange(256, dtype=np.uint8)
    every = codes.view(jnp.float8_e4m3fn).astype(np.float32)
    (found,) = triton_on_numpy.called("of_e4m3_by_bits", codes)
    numbers = ~np.isnan(every)
    np.testing.assert_array_equal(found.view(np.uint32)[numbers], every.view(np.uint32)[numbers])
    assert np.isnan(found[~numbers]).all()

    rng = np.random.default_rng(0)
    x = (rng.normal(size=1 << 14) * 2.0 ** rng.integers(-14, 12, 1 << 14)).astype(np.float32)
    numbers = np.sort(every[np.isfinite(every)])
    ties = (numbers[1:] + numbers[:-1]) / 2
    x[: ties.size], x[-4:] = ties, [np.nan, np.inf, -np.inf, 3e38]
    wanted = np.clip(x, -448, 448).astype(jnp.float8_e4m3fn).view(np.uint8)
    (found,) = triton_on_numpy.called("to_e4m3_by_bits", x)
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(found[numbers], wanted[numbers])
    assert (found[~numbers] & 0x7F == 0x7F).all()


# ---- the step of a tile --------------------------------------------------------------------------

CODECS = lowmem.codecs.CODECS
SIGNED = {name: codec for name, codec in CODECS.items() if codec.signed}
UNSIGNED = {name: codec for name, codec in CODECS.items() if not codec.signed}
OF_CODECS = [("flash_adamw", {"mu": codec}) for codec in SIGNED.values()]
OF_CODECS += [("flash_adamw", {"nu": codec}) for codec in UNSIGNED.values()]
OF_RULES = [(name, {}) for name in lowmem.OPTIMIZERS]
ONCE = (*RULES, "coat_adamw")  # a rule, and powers
OPTIONS = [
    ("flash_adamw", options)
    for options in (
        {"rounding": "nearest", "master_rounding": "nearest"}, {"master_weight_bits": 32},
        {"split": "ulp"}, {"update_dtype": "param"}, {"mu": None}, {"master_weight_bits": None},
        {"mu": lowmem.codecs.linear4(), "nu": lowmem.codecs.linear4(signed=False)},
        {"master_weight_bits": None, "master_rounding": "stochastic"},
        {"master_weight_bits": None, "master_rounding": "stochastic", "update_dtype": "param"},
        {
            "master_weight_bits": None, "master_rounding": "stochastic", "error_feedback": True,
            "weights": "e4m3",
        },
    )
]  # fmt: skip
STEPS = OF_RULES + OF_CODECS + OPTIONS


def label(x):
    return x if isinstance(x, str) else "-".join(getattr(v, "name", str(v)) for v in x.values())


@pytest.mark.parametrize(
    "name, options",
    rows(STEPS, [row for row in OF_RULES if row[0] in ONCE] + OPTIONS[::2]),
    ids=label,
)
@pytest.mark.parametrize("direct", rows([True, False], [True]))
def test_a_step(name, options, direct):
    """Of every rule, codec and split: the bits of the function that it was made from."""
    storage = lowmem.Storage(policy=launch_cases.POLICY, group_size=32, **options)
    tx = small_leaves.record(name).make(1e-3, storage=storage)
    case = launch_cases.make(tx, [(8, 32)], direct=direct)
    plan, leaf = case.plans[0].shapeless, case.leaves[0]
    scalars = case.leaf_hyperparameters[0]
    leaf = leaf._replace(
        scales=jax.tree.map(lambda x: x.reshape(-1), leaf.scales),
        of_block=jax.tree.map(lambda x: jnp.full((8, 1), 27.0), leaf.of_block),
    )
    counters = jnp.asarray(RNG.integers(0, 2**32, 8, np.uint32))
    lane = jnp.asarray(RNG.integers(0, 2**32, 32, np.uint32))
    arrays, structure = jax.tree.flatten((leaf, scalars, counters, lane))

    def step(approximations, *arrays):
        leaf, h, counters, lane = jax.tree.unflatten(structure, arrays)
        noise = (random.mix(counters)[:, None], lane) if plan.noisy else None
        own = jax.tree.leaves(leaf.of_block)
        given = leaf._replace(of_block=product(own) if own else None)
        result = gpu_step._step_tile.__wrapped__(case.rule, plan, approximations, given, h, noise)
        return jax.tree.leaves(result)

    mine = found(functools.partial(step, jaxpr_to_triton.APPROXIMATIONS), *arrays)
    with jax.disable_jit():
        wanted = step(numerics.Approximations(), *arrays)
    for one, other in zip(mine, wanted, strict=True):
        other = bits(other)
        assert one.dtype == other.dtype and one.shape == other.shape
        if one.dtype.kind in "iu" and one.dtype.itemsize == 1:
            # the logarithm and the power of two of NumPy and XLA differ in the last bits
            assert np.abs(np.int32(one) - np.int32(other)).max() <= 1
            assert (one != other).mean() < 0.01
        else:
            np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=1e-5)
