"""Quantized products on a mesh of 8 simulated devices: results, and what is communicated."""

import collections
import functools
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import tolerances as tol
from tests.tiers import in_turn, rows

pytest.importorskip("flax")

from optax_lowmem import layers  # noqa: E402

TOKENS, INPUTS, OUTPUTS = 64, 32, 48
# layout -> specs of X, W and G
LAYOUTS = {
    "data": (P("d"), P(), P("d")),
    "fsdp of inputs": (P("d"), P("d"), P("d")),
    "fsdp of outputs": (P("d"), P(None, "d"), P("d")),
    "columns": (P(), P(None, "d"), P(None, "d")),
    "rows": (P(None, "d"), P("d"), P()),
}
REDUCE, MAXIMA = "all-reduce", "s32"  # maxima of magnitudes are of their bits
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(text):
    """Count the communicated arrays per (kind, dtype, elements), each array of an all-reduce."""
    found = collections.Counter()
    for types, kind in COLLECTIVE.findall(text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", types):
            found[kind, dtype, math.prod(int(n) for n in shape.split(",") if n)] += 1
    return found


def drawn():
    """X, W and G."""
    rng = np.random.default_rng(0)
    shapes = (TOKENS, INPUTS), (INPUTS, OUTPUTS), (TOKENS, OUTPUTS)
    return [np.float32(rng.normal(size=shape)) for shape in shapes]


@functools.cache
def compiled(layout, variant, format="int8"):
    """(collectives, Y, dX and dW) of a layer's forward and backward pass."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])
    shardings = [NamedSharding(mesh, spec) for spec in LAYOUTS[layout]]
    arrays = [jax.device_put(*pair) for pair in zip(drawn(), shardings, strict=True)]
    dot_general = layers.switchback_dot_general(variant, format)

    def step(x, w, g):
        y, vjp = jax.vjp(lambda x, w: dot_general(x, w, (((1,), (0,)), ((), ()))), x, w)
        return y, *vjp(g)

    x, w, g = shardings
    run = jax.jit(step, in_shardings=shardings, out_shardings=(g, x, w)).lower(*arrays)
    run = run.compile()
    alone = jax.jit(step)(*(jax.device_put(np.asarray(a), jax.devices("cpu")[0]) for a in arrays))
    return collectives(run.as_text()), run(*arrays), alone


def compared(layout, variant):
    """The collectives of a layer, and those of the standard one."""
    return compiled(layout, variant)[0], compiled(layout, "standard")[0]


@pytest.mark.parametrize(
    "layout,variant",
    rows(
        [*((layout, "switchback") for layout in LAYOUTS), ("data", "llm_int8")],
        [*((layout, "switchback") for layout in list(LAYOUTS)[1::2]), ("data", "llm_int8")],
    ),
)
def test_results_are_those_of_one_device(layout, variant):
    """Codes and integer sums do not depend on the mesh; dW in f32 is summed in another order."""
    _, found, alone = compiled(layout, variant)
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=TOKENS * tol.F32_EPS)


@pytest.mark.parametrize("variant", ["switchback", "switchback_m", "switchback_q"])
def test_data_parallel_adds_nothing(variant):
    mine, theirs = compared("data", variant)
    assert mine == theirs == {(REDUCE, "f32", INPUTS * OUTPUTS): 1}


def test_llm_int8_and_tensorwise_share_maxima_over_tokens():
    mine, theirs = compared("data", "llm_int8")  # of each column of X and G, for dW
    of_sums = {(REDUCE, "f32", INPUTS * OUTPUTS), (REDUCE, "s32", INPUTS * OUTPUTS)}
    assert {key for key in mine - theirs if key not in of_sums} == {
        (REDUCE, MAXIMA, INPUTS),
        (REDUCE, MAXIMA, OUTPUTS),
    }
    mine, theirs = compared("data", "tensorwise")
    rest = {key: n for key, n in (mine - theirs).items() if key not in of_sums}
    assert set(rest) == {(REDUCE, MAXIMA, 1)} and rest[REDUCE, MAXIMA, 1] <= 4


@pytest.mark.parametrize(
    "layout, variant",
    in_turn(["fsdp of inputs", "fsdp of outputs"], ["switchback", "switchback_m"]),
)
def test_fsdp_gathers_codes_and_reduces_scalars(layout, variant):
    """The weights are gathered as codes, for each pass: no more bytes than of bf16 once."""
    mine, theirs = compared(layout, variant)
    weights = INPUTS * OUTPUTS
    assert theirs == {("all-gather", "f32", weights): 1, (REDUCE, "f32", weights): 1}
    assert mine[REDUCE, MAXIMA, 1] <= 2
    assert mine == {
        (REDUCE, MAXIMA, 1): mine[REDUCE, MAXIMA, 1],
        ("all-gather", "s8", weights): 2,
        (REDUCE, "f32", weights): 1,
    }


@pytest.mark.parametrize("layout,cut", [("columns", INPUTS), ("rows", OUTPUTS)])
def test_tensor_parallel_reduces_a_maximum_a_token(layout, cut):
    """A sum over devices (dX or Y) all-reduces one maximum per row, and int32 in place of f32."""
    mine, theirs = compared(layout, "switchback")
    assert theirs == {(REDUCE, "f32", TOKENS * cut): 1}
    assert mine[REDUCE, MAXIMA, 1] <= 2
    assert mine == {
        (REDUCE, MAXIMA, 1): mine[REDUCE, MAXIMA, 1],
        (REDUCE, MAXIMA, TOKENS): 1,
        (REDUCE, "s32", TOKENS * cut): 1,
    }


@pytest.mark.parametrize(
    "layout, variant", in_turn(["data", "columns", "rows"], ["switchback_m", "tensorwise"])
)
def test_explicit_axes(layout, variant):
    """Each gradient lies as what it is of; the values are those of Auto axes."""
    kind = (AxisType.Explicit,)
    mesh = jax.make_mesh((8,), ("d",), axis_types=kind, devices=jax.devices("cpu")[:8])
    dot_general = layers.switchback_dot_general(variant)
    given = {"out_sharding": NamedSharding(mesh, P(None, None))} if layout == "rows" else {}

    def step(x, w, g):
        dims = (((1,), (0,)), ((), ()))
        y, vjp = jax.vjp(lambda x, w: dot_general(x, w, dims, **given), x, w)
        return y, *vjp(g)

    with jax.set_mesh(mesh):
        shardings = [NamedSharding(mesh, spec) for spec in LAYOUTS[layout]]
        x, w, g = (jax.device_put(*pair) for pair in zip(drawn(), shardings, strict=True))
        found = jax.jit(step)(x, w, g)
        for one, like in zip(found, (g, x, w), strict=True):
            assert jax.typeof(one).sharding == jax.typeof(like).sharding
    for one, other in zip(found, compiled(layout, variant)[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
