"""From a running optax optimizer to low memory and back, in the middle of a run."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem._src.arrays import groups
from optax_lowmem._src.optim.optimizers import every_record
from tests import contract_cases as cases
from tests import small_leaves
from tests.tiers import rows

SMALL = lowmem.Storage(policy=cases.POLICY)
EXACT = lowmem.Storage.full_precision(policy=cases.POLICY, master_weight_bits=32)


def plain_of(name):
    """The optax optimizer of a case; Adam-mini, which optax has not, continues from AdamW."""
    record = lowmem.OPTIMIZERS.get(name)
    return (record and record.counterpart) or cases.CASES[name].plain


def started(plain, seed=0):
    """f32 parameters and an optax state as in the middle of a run, without compiling one."""
    rng = np.random.default_rng(seed)
    params = cases.masters()

    def leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(7, x.dtype) if x.ndim == 0 else x
        return jnp.asarray(rng.lognormal(-8, 1, x.shape), jnp.float32)

    return params, jax.tree.map(leaf, plain.init(params))


def moments(state):
    """Every array of a state with a path, in f32."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = leaf
    return found


# ---- each optimizer ------------------------------------------------------------------------------
@cases.OPTIMIZER
def test_there_and_back(name):
    plain, tx = plain_of(name)(1e-3), cases.CASES[name].make(1e-3, cases.Form(bits=32))
    params, old = started(plain)
    weights, state = checkpoint.from_optax(tx, old, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype(jnp.bfloat16)}
    chex.assert_trees_all_equal_shapes_and_dtypes(state, tx.init(weights))

    back, new = checkpoint.to_optax(tx, state, weights, plain)
    cases.assert_same(back, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, old)
    described = checkpoint.metadata(tx, weights)["slots"]
    after, seen = moments(new), set()
    record = lowmem.OPTIMIZERS.get(name)  # None of compressed optimizers of optax
    constants = {c.rpartition(".")[2] for c in (record.optax_constants if record else ())}
    for path, x in moments(old).items():
        if path.rpartition("/")[2] in constants:  # those of `plain`, whatever the old state has
            continue
        owner = "norm" if path.endswith("norm") else "block/w"
        slot = path.removesuffix(f"/{owner}").split("/")[-1]
        # SGD's slot is called mu in our own states, trace where optax's state is compressed
        forms = described[owner]
        form = forms.get(slot) or (forms["mu"] if slot == "trace" else {"codec": None})
        if "block" in form and x.ndim:
            np.testing.assert_allclose(np.mean(after[path]), np.mean(x), rtol=1e-6)
            if form["block"].get("rows_and_columns"):
                assert np.linalg.matrix_rank(after[path]) == 1 and np.ptp(after[path]) > 0
            else:
                assert np.ptp(after[path]) == 0 or not form["block"]["axes"]
        elif form["codec"] is None or not x.ndim:
            np.testing.assert_array_equal(after[path], x, err_msg=path)
        else:
            view = groups.to_groups(x, form["group_size"])
            bound = lowmem.codecs.CODECS[form["codec"]].error_bound(view, stochastic=True)
            error = np.abs(groups.to_groups(after[path] - x, form["group_size"]))
            assert np.all(error <= bound), path
            assert np.any(error > 0), path
            seen.add(slot)
    assert len(seen) >= 1
    again, _ = checkpoint.from_optax(tx, new, back)
    cases.assert_same(again, weights)


@pytest.mark.parametrize("name", lowmem.OPTIMIZERS)
def test_the_optax_optimizer_is_found(name):
    for rate in (1e-3, optax.linear_schedule(1e-3, 0.0, 9)):
        tx = small_leaves.record(name).make(rate, storage=dataclasses.replace(
            small_leaves.record(name).make(rate).engine.storage, policy=cases.POLICY))  # fmt: skip
        params, old = started(plain_of(name)(rate))
        weights, state = checkpoint.from_optax(tx, old, params)
        _, new = checkpoint.to_optax(tx, state, weights)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, old)
        assert {int(c) for _, c in optax.tree.get_all_with_path(new, "count")} <= {7}


def test_every_slot_has_a_place_in_optax():
    """The same for all records of one type of state, by which it is looked up."""
    fields = {}
    for record in every_record():
        assert record.optax_fields.keys() == {slot.name for slot in record.rule.slots}
        wanted = fields.setdefault(record.rule.state_type.__name__, record.optax_fields)
        assert record.optax_fields == wanted


CONSTANT = optax.constant_schedule(1e-3)  # optax counts its steps all the same
PIECES = {
    "adam": (lowmem.scale_by_flash_adam(storage=SMALL), optax.scale_by_adam()),
    "lion": (lowmem.scale_by_flash_lion(storage=SMALL), optax.scale_by_lion()),
    "trace": (lowmem.flash_trace(0.9, storage=SMALL), optax.trace(0.9)),
    "sgd": (lowmem.flash_sgd(0.1, storage=SMALL), optax.sgd(0.1)),
    "sgd with decay": (
        lowmem.flash_sgd(0.1, 0.9, weight_decay=1e-4, storage=SMALL),
        optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, 0.9)),
    ),
    "scheduled decay": (
        lowmem.flash_adamw(1e-3, weight_decay=CONSTANT, storage=SMALL),
        optax.adamw(1e-3, weight_decay=CONSTANT),
    ),
    "scheduled rate and decay": (
        lowmem.flash_lion(CONSTANT, weight_decay=CONSTANT, storage=SMALL),
        optax.lion(CONSTANT, weight_decay=CONSTANT),
    ),
    "adam without decay": (lowmem.flash_adamw(1e-3, weight_decay=0.0), optax.adam(1e-3)),
    "masked decay": (
        lowmem.flash_adamw(1e-3, mask={"block": {"w": True}, "norm": False}, storage=SMALL),
        optax.adamw(1e-3, mask={"block": {"w": True}, "norm": False}),
    ),
    "lowmem.chain": (
        lowmem.chain(optax.clip_by_global_norm(1.0), lowmem.flash_adamw(1e-3, storage=SMALL)),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    ),
    "split of compressed": (
        lowmem.split_master_weights(
            lowmem.compand_momentum(lowmem.sqrt_variance_quant(optax.adamw(1e-3)))
        ),
        optax.adamw(1e-3),
    ),
    "plain": (optax.chain(optax.clip(1.0), optax.adamw(1e-3)),) * 2,
}

WHOLE = lowmem.blocks.Structure(default="whole")
OF_BLOCKS = {
    "adam-mini": (lowmem.scale_by_adam_mini(blocks=WHOLE), optax.scale_by_adam()),
    "chain of adam-mini": (
        lowmem.split_master_weights(
            optax.chain(
                lowmem.compand_momentum(
                    lowmem.sqrt_variance_quant(
                        lowmem.scale_by_adam_mini(blocks=WHOLE), policy=SMALL.policy
                    ),
                    policy=SMALL.policy,
                ),
                optax.scale_by_learning_rate(1e-3),
            )
        ),
        optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(1e-3)),
    ),
}


@pytest.mark.parametrize("kind", rows(OF_BLOCKS, {*OF_BLOCKS} - {"chain of adam-mini"}))
def test_directions_of_blocks(kind):
    tx, plain = OF_BLOCKS[kind]
    params, old = started(plain)
    weights, state = checkpoint.from_optax(tx, old, params, allow_rounding=True)
    _, new = checkpoint.to_optax(tx, state, weights, plain)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, old)
    for path, x in moments(old).items():
        wanted = np.full_like(x, x.mean()) if "nu/" in path else x
        np.testing.assert_allclose(moments(new)[path], wanted, rtol=0.2, atol=2e-5, err_msg=path)


@pytest.mark.filterwarnings("ignore:second moments that many elements share")
@pytest.mark.parametrize("blocks", [False, True])
def test_two_codes_in_a_byte(blocks):
    """Of each element, and of the values of three blocks, whose bytes lie in one row.

    Where each element is a block, rows of an even length have bytes of their own.
    """
    four = {"mu": lowmem.codecs.linear4(), "nu": lowmem.codecs.linear4(signed=False)}
    storage = dataclasses.replace(SMALL, **four)
    tx, rows = lowmem.flash_adamw(1e-3, storage=storage), (3, 20)
    if blocks:
        per_row = lowmem.blocks.Structure(rules=[("block/w", (1,)), ("norm", ())])
        tx, rows = lowmem.flash_adam_mini(1e-3, storage=storage, blocks=per_row), (2,)
    params, old = started(optax.adamw(1e-3))
    weights, state = checkpoint.from_optax(tx, old, params)
    assert (state.mu["block"]["w"].shape, state.nu["block"]["w"].shape) == ((3, 20), rows)
    if blocks:
        by_element = lowmem.blocks.Structure(rules=[("*", ())])
        table = lowmem.flash_adam_mini(1e-3, storage=storage, blocks=by_element).init(weights)
        assert table.nu["block"]["w"].shape == (3, 20)
    _, new = checkpoint.to_optax(tx, state, weights, optax.adamw(1e-3))
    chex.assert_trees_all_equal_shapes_and_dtypes(new, old)
    mu, nu = (optax.tree.get(old, slot)["block"]["w"] for slot in ("mu", "nu"))
    nu = jnp.broadcast_to(nu.mean(1, keepdims=True), nu.shape) if blocks else nu
    for slot, wanted, levels in (("mu", mu, 7), ("nu", nu, 15)):
        error = np.abs(optax.tree.get(new, slot)["block"]["w"] - wanted)
        assert 0 < error.max() <= wanted.max() / levels * (1 + 1e-6)


@pytest.mark.parametrize("kind", PIECES)
def test_pieces_and_chains(kind):
    tx, plain = PIECES[kind]
    params, old = started(plain)
    weights, state = checkpoint.from_optax(tx, old, params, allow_rounding=True)
    for given in (None, plain):
        _, new = checkpoint.to_optax(tx, state, weights, given)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, old)
        for path, x in moments(old).items():
            np.testing.assert_allclose(moments(new)[path], x, rtol=0.2, atol=2e-5, err_msg=path)


# ---- inside optax's wrappers ---------------------------------------------------------------------
MASK = {"block": {"w": True}, "norm": False}


def wrappers(inner, make, **static):
    """An optimizer inside each of optax's wrappers."""
    label = {"block": {"w": "one"}, "norm": "two"}
    inject = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32, **static)
    return {
        "chain": optax.chain(optax.clip(1.0), inner),
        "masked": optax.masked(inner, MASK),
        "partition": optax.partition({"one": inner, "two": optax.sgd(0.1, 0.9)}, label),
        "MultiSteps": optax.MultiSteps(inner, 2).gradient_transformation(),
        "apply_if_finite": optax.apply_if_finite(inner, 3),
        "inject": inject(learning_rate=2e-3),
        "nested": optax.chain(optax.masked(optax.chain(optax.clip(1.0), inner), MASK)),
    }


OURS = wrappers(
    lowmem.flash_adamw(1e-3, storage=EXACT),
    lambda learning_rate: lowmem.flash_adamw(learning_rate, storage=EXACT),
)
PLAIN = wrappers(optax.adamw(1e-3), lambda learning_rate: optax.adamw(learning_rate))


@pytest.mark.parametrize("kind", OURS)
def test_inside_wrappers(kind):
    if kind == "MultiSteps":
        cases.skip_old_multi_steps()
    tx, plain = OURS[kind], PLAIN[kind]
    params, old = started(plain)
    # where the mask leaves a weight to nobody, it has no correction
    weights, state = checkpoint.from_optax(tx, old, params, cases.DTYPES["mixed"])
    chex.assert_trees_all_equal_shapes_and_dtypes(state, tx.init(weights))
    back, new = checkpoint.to_optax(tx, state, weights, plain)
    cases.assert_same((back, new), (params, old))
    with pytest.raises(ValueError, match="hidden inside a wrapper .* Pass plain="):
        checkpoint.to_optax(tx, state, weights)


def test_one_of_ours_stands_for_several_links():
    """The links of a chain that are one optimizer, as MaxText and big_vision write them."""
    plain = optax.chain(
        optax.clip(1.0),
        optax.scale_by_adam(),
        optax.add_decayed_weights(1e-4),
        optax.scale_by_learning_rate(optax.linear_schedule(1e-3, 0.0, 9)),
        optax.identity(),
    )
    tx = optax.chain(optax.clip(1.0), lowmem.flash_adamw(1e-3, storage=EXACT), optax.identity())
    params, old = started(plain)
    weights, state = checkpoint.from_optax(tx, old, params)
    assert int(state[1].count) == 7
    cases.assert_same(checkpoint.to_optax(tx, state, weights, plain), (params, old))


def test_numbers_that_only_one_side_has():
    """inject_hyperparams keeps what each optimizer takes: the rest is as init makes it."""
    inject = optax.inject_hyperparams
    plain = inject(optax.adamw)(learning_rate=2e-3, weight_decay=0.5)
    ours = lowmem.inject_hyperparams
    tx = ours(lambda learning_rate: lowmem.flash_adamw(learning_rate, storage=EXACT))(1e-3)
    params, old = started(plain)
    old = old._replace(hyperparams={**old.hyperparams, "learning_rate": jnp.float32(3e-3)})
    weights, state = checkpoint.from_optax(tx, old, params)
    assert float(state.hyperparams["learning_rate"]) == np.float32(3e-3)
    _, new = checkpoint.to_optax(tx, state, weights, plain)
    assert float(new.hyperparams["learning_rate"]) == np.float32(3e-3)
    assert float(new.hyperparams["weight_decay"]) == 0.5
    cases.assert_same(new.inner_state, old.inner_state)


# ---- what does not fit ---------------------------------------------------------------------------
MISFITS = {
    "another optimizer": (
        lowmem.flash_adamw(1e-3), optax.amsgrad(1e-3),
        "continues from mu, nu of one ScaleByAdamState, but optax's state has .*"
        "ScaleByAmsgradState.nu_max .* is \\(ScaleByAmsgradState, EmptyState\\)",
    ),
    "momentum": (
        lowmem.flash_lion(1e-3), optax.sgd(1e-3, 0.9), "continues from mu of one ScaleByLionState",
    ),
    "sgd without momentum": (
        lowmem.flash_sgd(1e-3), optax.sgd(1e-3, 0.9),
        "continues from at most a count, but optax's state has TraceState.trace",
    ),
    "chain": (
        lowmem.chain(optax.clip(1.0), lowmem.flash_adamw(1e-3)), optax.scale_by_adam(),
        r"state: tx has the state \(EmptyState, FlashAdamState\) where the optax optimizer has "
        "ScaleByAdamState, so the optimizers do not correspond",
    ),
    "wrapper": (
        optax.MultiSteps(lowmem.flash_adamw(1e-3), 2).gradient_transformation(), optax.adamw(1e-3),
        "state: tx has the state MultiStepsState where",
    ),
    "mask": (
        optax.masked(lowmem.flash_adamw(1e-3), {"block": {"w": True}, "norm": True}),
        optax.masked(optax.adamw(1e-3), MASK),
        r"state.inner_state.mu: mu does not have the leaves .* missing \['norm'\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISFITS)
def test_the_state_of_something_else_is_refused(kind):
    tx, plain, message = MISFITS[kind]
    params, old = started(plain)
    with pytest.raises(ValueError, match=message):
        checkpoint.from_optax(tx, old, params)


def test_a_plain_mask_with_more_parameters_is_refused():
    tx, plain_mask = optax.masked(lowmem.flash_adamw(1e-3), MASK), {**MASK, "norm": True}
    weights, state = lowmem.init(tx, cases.masters(), allow_rounding=True)
    message = r"state.inner_state.mu: mu does not have the leaves .* extra \['norm'\]"
    with pytest.raises(ValueError, match=message):
        checkpoint.to_optax(tx, state, weights, plain=optax.masked(optax.adamw(1e-3), plain_mask))


@pytest.mark.parametrize("name", ["flash_adamw", "compress_state"])
def test_moments_are_rounded_with_the_bits_of_their_step(name):
    plain, policy = optax.adamw(1e-3), lowmem.Policy(min_size=0)
    tx = {
        "flash_adamw": lowmem.flash_adamw(1e-3, storage=lowmem.Storage(policy=policy)),
        "compress_state": lowmem.compress_state(
            plain, mu=lowmem.codecs.softsign(), nu=lowmem.codecs.sqrt(), policy=policy
        ),
    }[name]
    params = {"w": jnp.ones((16, 64))}
    grads = {"w": jax.random.normal(jax.random.key(0), (16, 64))}
    _, state = plain.update(grads, plain.init(params), params)
    codes = []
    for count in (0, 3):
        counted = optax.tree.set(state, count=jnp.int32(count))
        _, ours = lowmem.checkpoint.from_optax(tx, counted, params, dtype=jnp.float32)
        codes.append(optax.tree.get(ours, "mu")["w"])
    assert (codes[0] != codes[1]).any()


def test_counts_that_differ_and_shapes_that_do_not_fit():
    plain = optax.adamw(optax.linear_schedule(1e-3, 0.0, 9))
    params, old = started(plain)
    moved = (old[0]._replace(count=jnp.int32(3)), *old[1:])
    with pytest.raises(ValueError, match=r"counts \[3, 7\] steps, in its moments and its schedule"):
        checkpoint.from_optax(lowmem.flash_adamw(1e-3), moved, params)
    other = {**params, "norm": jnp.ones(7)}
    with pytest.raises(ValueError, match=r"state.mu: 'norm' has shape \(5,\) .* and \(7,\) here"):
        checkpoint.from_optax(lowmem.flash_adamw(1e-3), old, other)


# ---- the run goes on -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (lowmem.flash_adamw, optax.adamw),
        (lowmem.flash_lion, optax.lion),
        (lambda rate, **kw: lowmem.flash_sgd(rate, 0.9, True, **kw),
         lambda rate: optax.sgd(rate, 0.9, True)),
    ],
)  # fmt: skip
def test_the_run_goes_on_as_if_nothing_had_happened(ours, plain):
    """With f32 slots and 32-bit masters: counts, bias corrections and the schedule carry over."""
    schedule = optax.linear_schedule(2e-3, 0.0, 12)
    plain, tx = plain(schedule), ours(schedule, storage=EXACT)
    params = cases.masters()
    gradients = cases.stream(params, 8)
    first, rest = (jax.tree.map(lambda g, s=s: g[s], gradients) for s in (slice(4), slice(4, 8)))
    middle, old = cases.train(plain, params, plain.init(params), first)
    wanted, _ = cases.train(plain, middle, old, rest)
    weights, state = checkpoint.from_optax(tx, old, middle)
    weights, state = cases.train(tx, weights, state, rest)
    found, new = checkpoint.to_optax(tx, state, weights)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=4e-7, atol=1e-8)  # 4 steps of a few u
    assert {int(c) for _, c in optax.tree.get_all_with_path(new, "count")} == {8}
