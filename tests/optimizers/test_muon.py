"""Muon against optax's: arithmetic, a training, bf16 products; whole matrices on a mesh; memory."""

import collections
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem._src.optim.optimizers.newton_schulz import PRESETS, STANDARD, polar_factors
from optax_lowmem._src.optim.step import matrices
from optax_lowmem.sharding import state_shardings
from tests import tolerances
from tests.compilation import SAME_BITS
from tests.tiers import rows

EXACT = lowmem.Storage.full_precision()
CODED = lowmem.Storage(policy=lowmem.Policy(min_size=0))
Dimensions = optax.contrib.MuonDimensionNumbers


def drawn(shapes, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.normal(0, scale, s), jnp.float32) for n, s in shapes.items()}


def changes_of(tx, params, steps=4):
    """Return the changes that some steps of random gradients make."""

    def body(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    shapes = {name: (steps, *p.shape) for name, p in params.items()}
    run = jax.jit(lambda start, grads: jax.lax.scan(body, start, grads)[0][0])
    end = run((params, tx.init(params)), drawn(shapes, 1))
    return {name: np.asarray(end[name] - p) for name, p in params.items()}


def distance(found, wanted):
    """|found - wanted| / |wanted| of two trees."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    gap = math.sqrt(sum(float(np.sum((np.asarray(a) - b) ** 2)) for a, b in pairs))
    return gap / math.sqrt(sum(float(np.sum(np.asarray(b) ** 2)) for _, b in pairs))


# ---- optax's arithmetic --------------------------------------------------------------------------

SHAPES = {"wide": (24, 40), "tall": (40, 24), "square": (24, 24), "heads": (24, 3, 8),
          "conv": (12, 3, 8), "bias": (24,)}  # fmt: skip
AXES = {"wide": Dimensions(), "tall": Dimensions(1, 0), "square": None, "bias": None,
        "heads": Dimensions(0, (1, -1)), "conv": Dimensions(2, 0)}  # fmt: skip
SCHEDULE = optax.linear_schedule(1e-2, 0.0, 6)
ARGUMENTS = {
    "defaults": {},
    "decay and rates": dict(weight_decay=0.1, adam_weight_decay=0.2, adam_learning_rate=3e-3,
                            weight_decay_mask={**dict.fromkeys(SHAPES, True), "wide": False}),
    "schedules": dict(learning_rate=SCHEDULE, adam_learning_rate=lambda count: 1e-3 / (1 + count)),
    "axes": dict(muon_weight_dimension_numbers=AXES, consistent_rms=0.2),
    "a function of axes": dict(muon_weight_dimension_numbers=lambda params: AXES),
    "adaptive": dict(adaptive=True, nesterov=False, adam_b1=0.8, adam_b2=0.9, beta=0.8),
    "adaptive axes": dict(adaptive=True, muon_weight_dimension_numbers=AXES),
    "dion": dict(ns_coeffs="dion", eps=1e-4, adam_eps_root=1e-6),
    "aol": dict(preconditioning="aol", ns_steps=4, ns_coeffs=((3.9, -6.4, 2.7), (2.8, -3.1, 1.2))),
    "schatten": dict(preconditioning="schatten", ns_steps=3),
    "spectral": dict(preconditioning="spectral", mu_dtype="bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", rows(ARGUMENTS, ["decay and rates", "adaptive axes", "aol"]))
def test_exact_storage_is_optax(name):
    arguments = {"learning_rate": 1e-2, **ARGUMENTS[name]}
    params = drawn(SHAPES)
    ours = changes_of(lowmem.flash_muon(**arguments, storage=EXACT), params)
    plain = changes_of(optax.contrib.muon(**arguments), params)
    bound = tolerances.MUON_BF16_MOMENTUM if "mu_dtype" in arguments else tolerances.MUON_EXACT
    for leaf, moved in ours.items():
        assert distance(moved, plain[leaf]) <= bound, leaf


@pytest.mark.parametrize("name, order", [("frobenius", 2), ("schatten", 4), ("spectral", np.inf)])
def test_the_polar_factor_in_float64(name, order):
    """Singular vectors of the matrix; singular values where the polynomials lead theirs."""
    (x,) = drawn({"x": (2, 8, 20)}).values()
    found = np.asarray(polar_factors(x, (STANDARD,) * 5, name, jnp.float32(1e-8)))
    for own, matrix in zip(found, np.asarray(x, np.float64), strict=True):
        u, s, vt = np.linalg.svd(matrix, full_matrices=False)
        s = s / np.linalg.norm(s, order)
        for _ in range(5):
            s = STANDARD[0] * s + STANDARD[1] * s**3 + STANDARD[2] * s**5
        np.testing.assert_allclose(own, (u * s) @ vt, atol=tolerances.MUON_EXACT)


@pytest.mark.parametrize("axes, shape", [(None, (24, 40)), (Dimensions(2, 0), (12, 3, 8))])
@pytest.mark.parametrize("rms", [0.2, None])
def test_neurons_are_normalized_as_in_normuon(axes, shape, rms):
    """Algorithm 1 of arXiv 2510.05491 in float64, for W of [outputs, inputs], of each matrix.

    Without `rms` the norm of O is kept, as in the authors' code, instead of line 10.
    """
    b1, b2, eps, rate, steps = 0.9, 0.8, 1e-3, 1e-2, 3
    tx = lowmem.flash_muon(
        rate, beta=b1, eps=eps, nesterov=False, consistent_rms=rms, normuon_b2=b2, weight_decay=0.1,
        muon_weight_dimension_numbers=axes and {"w": axes}, storage=EXACT,
    )  # fmt: skip
    params = drawn({"w": shape})
    found = changes_of(tx, params, steps)["w"]
    assert tx.init(params).nu["w"].shape == ((1, 40) if axes is None else (12, 3, 1))
    order = (0, 1) if axes is None else (1, 2, 0)  # to [..., inputs, outputs]
    steps_of = {"w": (steps, *shape)}
    one, moved, grads = (
        np.asarray(x, np.float64).transpose(*lead, *(i + len(lead) for i in order))
        for x, lead in ((params["w"], ()), (found, ()), (drawn(steps_of, 1)["w"], (0,)))
    )
    m, n = one.shape[-1], one.shape[-2]
    for at in np.ndindex(one.shape[:-2]):
        w, momentum, v = one[at].T, np.zeros((m, n)), np.zeros(m)
        for t, g in enumerate(grads[(slice(None), *at)], 1):
            momentum = b1 * momentum + (1 - b1) * g.T
            debiased = momentum / (1 - b1**t)  # as ours is, which matters for eps
            u, s, vt = np.linalg.svd(debiased, full_matrices=False)
            s = s / (np.linalg.norm(s) + eps)
            for _ in range(5):
                s = STANDARD[0] * s + STANDARD[1] * s**3 + STANDARD[2] * s**5
            o = (u * s) @ vt
            v = b2 * v + (1 - b2) * np.mean(o * o, axis=1)
            norm = np.linalg.norm(o) * max(1, m / n) ** 0.5 if rms is None else rms * (m * n) ** 0.5
            o = o / (np.sqrt(v) + eps)[:, None]
            w = w - rate * 0.1 * w - rate * norm / np.linalg.norm(o) * o
        assert distance(moved[at], w.T - one[at]) <= tolerances.MUON_EXACT


def test_second_moments_of_outputs_are_stored(tmp_path):
    """In f32, in checkpoints too; optax has no such optimizer."""
    tx = lowmem.flash_muon(1e-2, normuon_b2=0.95, storage=CODED)
    weights, state = lowmem.init(tx, drawn(SHAPES))
    weights, state = lowmem.step(tx, weights, state, weights)
    lowmem.checkpoint.save(tmp_path / "one", tx, weights, state, 1)
    restored = lowmem.checkpoint.restore(tmp_path / "one", tx, weights)
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, (weights, state)))
    forms = {name: (nu.shape, str(nu.dtype)) for name, nu in restored[1].nu.items()}
    assert forms["wide"] == ((1, 40), "float32") and forms["bias"] == ((24,), "uint8")
    decisions = {(d.path, d.slot): d.form for d in lowmem.explain(tx, weights).decisions}
    assert decisions["wide", "nu"] == "f32, per output"
    with pytest.raises(ValueError, match="no optax optimizer is known to correspond to MuonRule"):
        lowmem.checkpoint.to_optax(tx, state, weights)


@pytest.mark.parametrize("preconditioning", ["frobenius", "aol"])
def test_bf16_products(preconditioning):
    """Of a matrix with small singular values, and of one without."""
    (x,) = drawn({"x": (2, 32, 48)}).values()
    u, _, vt = np.linalg.svd(x[0], full_matrices=False)
    spread = (u * np.geomspace(1, 1e-2, 32)) @ vt
    stack = jnp.stack([x[1], jnp.asarray(spread)])
    wanted, found = (
        polar_factors(stack.astype(dtype), (STANDARD,) * 5, preconditioning, jnp.float32(1e-8))
        for dtype in ("float32", "bfloat16")
    )
    assert found.dtype == jnp.bfloat16
    for one, other in zip(np.asarray(found, np.float32), np.asarray(wanted), strict=True):
        assert 0 < distance(one, other) <= tolerances.MUON_BF16


def polar(iterations):
    return jax.jit(lambda x: polar_factors(x, iterations, "frobenius", jnp.float32(1e-8)))


def plainly(x, iterations):
    """Iterate on the matrix itself, with every result rounded to its dtype."""
    x = (x / jnp.linalg.norm(x.astype(jnp.float32))).astype(x.dtype)
    for a, b, c in iterations:
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


@pytest.mark.parametrize(
    "preset, shape, condition",
    rows(
        list(itertools.product(
            PRESETS, [(64, 64), (192, 64), (64, 1024), (2048, 32)], [1e1, 1e3, 1e6]
        )),
        [("standard", (64, 1024), 1e6), ("polar_express", (2048, 32), 1e3)],
    ),
)  # fmt: skip
def test_iterating_on_the_gram_matrix(preset, shape, condition):
    """In bf16, errors and singular values are at most twice those of iterating on the matrix."""
    short, rng = min(shape), np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(side, short)))[0] for side in shape)
    s = np.geomspace(1, 1 / condition, short)
    x = jnp.asarray((u * s) @ v.T, jnp.bfloat16)
    given = PRESETS[preset]
    iterations = tuple(given) if np.ndim(given) == 2 else (given,) * 5
    s = s / np.linalg.norm(s)
    for a, b, c in iterations:
        s = a * s + b * s**3 + c * s**5
    wanted, far, largest = (u * s) @ v.T, {}, {}
    results = {"ours": polar(iterations)(x[None])[0], "plain": plainly(x, iterations)}
    for name, result in results.items():
        result = np.asarray(result, np.float64)  # noqa: PLW2901
        far[name], largest[name] = distance(result, wanted), np.linalg.norm(result, 2)
    assert far["ours"] <= 2 * far["plain"]
    assert largest["ours"] <= 2 * largest["plain"]


def test_polar_express_equioscillates():
    """As Section 4.2 of arXiv 2505.16932 demands, where Appendix G cushions the lower bound."""
    low, high = 1e-3, 1.0
    for a, b, c in PRESETS["polar_express"]:
        p = np.polynomial.Polynomial([0, a * 1.01, 0, b * 1.01**3, 0, c * 1.01**5])
        peak, dip = sorted(x for x in p.deriv().roots() if x > 0)
        start = max(low, 0.02407327424182761 * high)
        found, wanted = (p(start), p(peak), p(low)), (p(dip), p(high), 2 - p(high))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerances.POLYNOMIAL)
        low, high = p(low), 2 - p(low)


def test_a_long_matrix_is_multiplied_once():
    x = jax.ShapeDtypeStruct((2, 32, 128), jnp.float32)
    for iterations, times in ((STANDARD,) * 5, 1), ((STANDARD,) * 6, 2):
        program = str(jax.make_jaxpr(polar(iterations))(x))
        assert len(re.findall(r"\[2,32,128\] = dot_general", program)) == times


# ---- which leaves are matrices, and errors -------------------------------------------------------


def test_other_leaves_have_a_second_moment():
    tx = lowmem.flash_muon(1e-2, muon_weight_dimension_numbers=AXES, storage=CODED)
    weights, state = lowmem.init(tx, drawn(SHAPES))
    assert {name for name, nu in state.nu.items() if nu.ndim} == {"square", "bias"}
    assert {mu.dtype for mu in state.mu.values()} == {jnp.dtype(jnp.int8)}
    slots = collections.Counter(d.slot for d in lowmem.explain(tx, weights).decisions)
    assert slots == {"mu": 6, "nu": 2, "correction": 6}
    others = {**AXES, "wide": None}
    tx = lowmem.flash_muon(1e-2, muon_weight_dimension_numbers=others, storage=CODED)
    with pytest.raises(ValueError, match=r"state field nu of 'wide' is float32\[\].*keeps uint8"):
        tx.update(weights, state, weights)


def test_its_state_can_be_donated():
    """No array is in it twice, placeholders of leaves without a second moment included."""
    tx = lowmem.flash_muon(1e-2, storage=CODED)
    weights, state = lowmem.init(tx, drawn(SHAPES))
    step = jax.jit(functools.partial(lowmem.step, tx), donate_argnums=(1, 2))
    for _ in range(2):
        weights, state = step(drawn(SHAPES, 5), state, weights)
    assert int(state.count) == 2


def test_an_empty_matrix():
    tx, params = (
        lowmem.flash_muon(1e-2, storage=CODED),
        {"w": jnp.ones((0, 8)), "v": jnp.ones((4, 8))},
    )
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates["w"].shape == (0, 8) and np.isfinite(updates["v"]).all()


MISTAKES = {
    "out of range": ({"w": Dimensions(0, 2)}, ValueError, "output_axis 2 is out of range.*'w'"),
    "twice": ({"w": Dimensions(0, -2)}, ValueError, r"leaf 'w' of shape \(8, 12\).*no axis twice"),
    "no axis": ({"w": Dimensions((), 1)}, ValueError, "at least one axis each"),
    "another tree": ({"v": None}, ValueError, "does not fit the parameters.*w"),
    "a pair": ({"w": 1}, TypeError, "MuonDimensionNumbers for each matrix"),
}  # fmt: skip


@pytest.mark.parametrize("axes, kind, said", MISTAKES.values(), ids=list(MISTAKES))
def test_axes_that_do_not_fit(axes, kind, said):
    tx = lowmem.flash_muon(1e-2, muon_weight_dimension_numbers=axes)
    with pytest.raises(kind, match=said):
        tx.init({"w": jnp.ones((8, 12))})


REFUSED = {
    "steps": (dict(ns_steps=0), TypeError, "ns_steps must be an int of at least 1"),
    "preset": (dict(ns_coeffs="fast"), ValueError, "one of.*standard"),
    "two numbers": (dict(ns_coeffs=(1.0, 2.0)), ValueError, r"shape \(3,\) or \(n, 3\)"),
    "NaN": (dict(ns_coeffs=(math.nan, 1.0, 1.0)), ValueError, "ns_coeffs must be finite"),
    "infinity": (dict(ns_coeffs=[(1.0, math.inf, 1.0)]), ValueError, "ns_coeffs must be finite"),
    "no numbers": (dict(ns_coeffs=3.0), TypeError, "three numbers"),
    "more than steps": (dict(ns_coeffs="dion", ns_steps=3), ValueError, "5 iterations and.*3"),
    "preconditioning": (dict(preconditioning="svd"), ValueError, "preconditioning must be one of"),
    "dtype": (dict(ns_dtype="float16"), ValueError, "ns_dtype must be"),
    "beta": (dict(beta=1.0), ValueError, "beta must be in"),
    "b2": (dict(normuon_b2=1.0), ValueError, "normuon_b2 must be in"),
    "rms": (dict(consistent_rms=-1.0), ValueError, "consistent_rms must be"),
    "adam's decay": (dict(adam_weight_decay=-1.0), ValueError, "adam_weight_decay must be"),
}  # fmt: skip


@pytest.mark.parametrize("arguments, kind, said", REFUSED.values(), ids=list(REFUSED))
def test_arguments_that_are_refused(arguments, kind, said):
    with pytest.raises(kind, match=said):
        lowmem.flash_muon(1e-2, **arguments)


def test_gradients_of_parts_do_not_go_into_the_moments():
    tx = lowmem.accumulate_gradients(lowmem.flash_muon(1e-2), 2, into="moments")
    with pytest.raises(ValueError, match="needs the whole gradient at once"):
        tx.init({"w": jnp.ones((8, 12))})


# ---- whole matrices on a mesh --------------------------------------------------------------------

ON_MESH = {"a": (64, 128), "b": (128, 64), "c": (64, 128), "square": (64, 64), "bias": (64,)}
# the bias is whole: a CPU may take the collectives of its groups and of a matrix in another order
# on each of its devices, which then wait for each other
LAYOUTS = {
    "fsdp": ((8,), (*(P("x"),) * 4, P())),
    "tensor": ((4, 2), (P(None, "y"), P("y"), P(None, "y"), P("x", "y"), P())),
}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def on_a_mesh(layout, axis_type, normuon_b2=None):
    """(optimizer, parameters, state, gradients, the step compiled for eight devices)."""
    sizes, specs = LAYOUTS[layout]
    names = ("x", "y")[: len(sizes)]
    own = jax.devices("cpu")[:8]
    mesh = jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes), devices=own)
    tx = lowmem.flash_muon(1e-2, weight_decay=0.1, normuon_b2=normuon_b2, storage=CODED)
    params, state = lowmem.init(tx, drawn(ON_MESH), jnp.bfloat16)
    grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), drawn(ON_MESH, 3))
    lies = {n: NamedSharding(mesh, spec) for n, spec in zip(ON_MESH, specs, strict=True)}
    of_state = state_shardings(tx, params, lies)
    placed = jax.device_put((grads, state, params), (lies, of_state, lies))
    out = {} if axis_type == AxisType.Explicit else {"out_shardings": (lies, of_state)}
    step = jax.jit(functools.partial(lowmem.step, tx), **out)
    program = step.lower(*placed).compile(compiler_options=SAME_BITS)
    return tx, params, state, grads, placed, program


@pytest.mark.parametrize(
    "layout, axis_type, normuon_b2",
    rows(
        itertools.product(LAYOUTS, [AxisType.Auto, AxisType.Explicit], [None, 0.9]),
        [("fsdp", AxisType.Auto, None)],
    ),
)
def test_a_mesh_takes_whole_matrices(layout, axis_type, normuon_b2):
    """The step of one device; and nothing is moved between iterations, however many there are."""
    tx, params, state, grads, placed, program = on_a_mesh(layout, axis_type, normuon_b2)
    found, new = jax.block_until_ready(program(*placed))  # before another program has its threads
    wanted, other = jax.jit(functools.partial(lowmem.step, tx))(grads, state, params)
    moved = [
        jax.tree.map(jnp.subtract, lowmem.master_params(*pair), lowmem.master_params(params, state))
        for pair in ((found, new), (wanted, other))
    ]
    assert distance(*moved) <= tolerances.MUON_EXACT
    for a, b in zip(jax.tree.leaves(new.mu), jax.tree.leaves(other.mu), strict=True):
        assert np.mean(np.asarray(a) != np.asarray(b)) <= tolerances.REORDERED_CODES
    for n in ON_MESH if normuon_b2 else ():
        assert distance(new.nu[n], other.nu[n]) <= tolerances.MUON_EXACT
    # each of four matrices is moved before its products and after, and some in two axes; with
    # `normuon_b2`, means over their inputs are summed
    moves, between = collectives(program.as_text())
    assert 0 < moves <= (12 if normuon_b2 is None else 16) and not between
    # of two matrices of one shape each device takes one at most
    products = re.findall(r"(f32\S*?)\{\S* dot\(", program.as_text())
    assert set(products) == {"f32[64,128]", "f32[128,64]", "f32[64,64]"}


def collectives(text):
    """Return the number of a program's collectives, and those between one product and another."""
    computations, count, between = {}, 0, []
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            inside = computations.setdefault(head[1], {})
        elif found := re.match(r" +(?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)", line):
            name, op, rest = found.groups()
            inside[name] = op.removesuffix("-start"), set(re.findall(r"%([\w.\-]+)", rest))

    def has(one, ops):
        op, names = one
        inner = [other for name in names for other in computations.get(name, {}).values()]
        return op in ops or any(has(other, ops) for other in inner)

    for inside in computations.values():
        count += sum(op in COLLECTIVES for op, _ in inside.values())
        products, moves = ({n for n, one in inside.items() if has(one, ops)}
                           for ops in ({"dot"}, COLLECTIVES))  # fmt: skip
        between += [n for n in products & moves if inside[n][0] == "while"]
        after, before = set(), set()
        for name, (_, operands) in inside.items():  # operands come first
            after.update({name} if operands & (products | after) else ())
        for name, (_, operands) in reversed(inside.items()):
            before.update(operands if name in products | before else ())
        between += [*((moves - products) & after & before)]
    return count, between


def test_a_part_of_a_matrix_is_refused():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])
    tx, params = lowmem.flash_muon(1e-2), drawn({"w": (64, 128)})

    def step(spec, check_vma=True):
        run = lambda g, p: tx.update(g, tx.init(p), p)[0]  # noqa: E731
        tree = {"w": spec}
        return jax.shard_map(
            run, mesh=mesh, in_specs=(tree, tree), out_specs=tree, check_vma=check_vma
        )

    with pytest.raises(ValueError, match="leaf 'w' may differ over x.*whole matrices"):
        jax.eval_shape(step(P("x")), params, params)
    with pytest.raises(ValueError, match="check_vma=False.*a direction of whole matrices"):
        jax.eval_shape(step(P("x"), False), params, params)
    found = jax.jit(step(P()))(params, params)
    wanted = jax.jit(tx.update)(params, tx.init(params), params)[0]
    assert distance(found, wanted) <= tolerances.MUON_EXACT


# ---- memory --------------------------------------------------------------------------------------


def test_stacks_are_bounded(monkeypatch):
    monkeypatch.setattr(matrices, "_ELEMENTS", 3 * 64 * (128 + 2 * 64))
    tx = lowmem.flash_muon(1e-2)
    shapes = {f"w{i}": ((64, 128), (128, 64), (512, 512))[i % 3] for i in range(12)}
    plans = tx.engine.plans({n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()})
    found = list(matrices.stacks(plans))
    assert sorted(i for stack in found for i in stack) == list(range(12))
    sizes = [[math.prod(plans[i].shape) for i in stack] for stack in found]
    assert all(len(own) == 1 or sum(own) <= 3 * 64 * 128 for own in sizes)
    assert sorted(map(len, found)) == [1, 1, 1, 1, 1, 1, 3, 3]
    assert sorted(map(len, matrices.stacks(plans, 4))) == [1, 1, 1, 1, 4, 4]


def test_a_step_takes_what_one_stack_takes(monkeypatch):
    """Beside weights, state and gradients: with four times the leaves it is the same."""
    monkeypatch.setattr(matrices, "_ELEMENTS", 256 * 512)
    tx = lowmem.flash_muon(1e-2)
    temporaries = []
    for leaves in (3, 12):
        params = {f"w{i}": jax.ShapeDtypeStruct((256, 512), jnp.bfloat16) for i in range(leaves)}
        state = jax.eval_shape(tx.init, params)
        step = jax.jit(functools.partial(lowmem.step, tx), donate_argnums=(1, 2))
        program = step.lower(params, state, params).compile()
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
    one = 256 * 512 * 4
    # the direction, what an iteration reads and writes, its products of 256 x 256
    assert temporaries[0] <= 4 * one and temporaries[1] <= temporaries[0] + one // 16
