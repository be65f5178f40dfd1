"""Tests of `explain`: its lines per leaf, and the misuses that it finds."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_lowmem as lowmem
from benchmarks.model_shapes import gpt2_124m, llama_3_1_8b
from optax_lowmem import Storage
from optax_lowmem._src.arrays import trees
from optax_lowmem._src.optim.wrappers import stale_corrections
from tests.tiers import in_turn, rows

PARAMS = {
    "block": {"kernel": jnp.ones((64, 128), jnp.bfloat16), "bias": jnp.ones((64,), jnp.bfloat16)},
    "norm": jnp.ones((64,), jnp.float32),
}
DTYPES = {path: leaf.dtype for path, leaf in trees.named_leaves(PARAMS)}


def test_equal_leaves_are_printed_together():
    """A line per slot and kind of leaf, not per leaf: GPT-2's 148 leaves have four kinds."""
    printed = str(lowmem.explain(lowmem.flash_adamw(1e-3), gpt2_124m())).splitlines()
    assert len(printed) == 4 * (1 + 3) + 1
    kinds = [line for line in printed if not line.startswith((" ", "xla updates"))]
    assert (
        "h/0/attn/c_attn/kernel, h/0/attn/c_proj/kernel, h/0/mlp/c_fc/kernel and 47 more" in kinds
    )
    assert len(kinds) == 4


def lines(tx, path):
    found = lowmem.explain(tx, PARAMS).decisions
    return {d.slot: (d.form, d.reason) for d in found if d.path == path}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_weights_that_nothing_splits(dtype):
    tx, params = lowmem.scale_by_flash_adam(), {"w": jnp.ones((64, 128), dtype)}
    (found,) = (d for d in lowmem.explain(tx, params).decisions if d.slot == "correction")
    assert found.form is None and "no optimizer splits this leaf" in found.reason


def test_other_storage():
    tx = lowmem.flash_lion(1e-3, storage=Storage.paper(group_size=64, master_weight_bits=32))
    assert lines(tx, "block/kernel") == {
        "mu": ("softsign-int8-paper", "groups of 64, nearest rounding"),
        "correction": ("ulp-32", "32-bit master weights"),
    }
    nothing = lines(lowmem.flash_sgd(0.1, storage=Storage(master_weight_bits=None)), "block/kernel")
    assert nothing.keys() == {"correction"}
    assert "steps under half an ulp of the weight are lost" in nothing["correction"][1]


UNSPLIT = Storage(master_weight_bits=None)
CODECS = {"mu": lowmem.codecs.softsign(), "nu": lowmem.codecs.sqrt()}
NESTED = {
    "split of ours": lambda: lowmem.split_master_weights(lowmem.flash_adamw(1e-3, storage=UNSPLIT)),
    "split of a wrapper of ours": lambda: lowmem.split_master_weights(
        lowmem.accumulate_gradients(lowmem.flash_adamw(1e-3, storage=UNSPLIT), every=2)
    ),
    "codecs in codecs": lambda: lowmem.split_master_weights(
        lowmem.compand_momentum(lowmem.sqrt_variance_quant(optax.adamw(1e-3)))
    ),
    "codecs in codecs of values": lambda: lowmem.split_master_weights(
        lowmem.compand_momentum(
            lowmem.sqrt_variance_quant(optax.contrib.schedule_free(optax.adam(1e-3), 1e-3))
        )
    ),
    "average and batches": lambda: lowmem.track_master_ema(
        lowmem.accumulate_gradients(lowmem.split_master_weights(
            lowmem.compress_state(optax.adamw(1e-3), **CODECS)
        ), 2), 0.9
    ),
}  # fmt: skip


@pytest.mark.parametrize("nested", NESTED)
def test_each_slot_of_a_leaf_once(nested):
    found = lowmem.explain(NESTED[nested](), PARAMS)
    slots = [(d.path, d.slot) for d in found.decisions]
    assert len(slots) == len(set(slots)), str(found)
    assert lines(NESTED[nested](), "block/kernel")["correction"][0] == "bits-24"
    assert len(found.steps) in (0, len(DTYPES))


def test_slots_of_one_name_are_each_listed():
    tx = optax.chain(lowmem.flash_trace(0.9), lowmem.scale_by_flash_adam())
    slots = [(d.path, d.slot) for d in lowmem.explain(tx, PARAMS).decisions]
    assert slots.count(("norm", "mu")) == 2 and slots.count(("norm", "nu")) == 1


def test_patterns_that_match_nothing():
    policy = lowmem.Policy(exclude=("*kernle*", "nu:*bias", "nu:head"))
    found = lowmem.explain(lowmem.flash_adamw(1e-3, storage=Storage(policy=policy)), PARAMS)
    names = "block/kernel, norm, block/bias", "block/bias, block/kernel, norm"
    said = "the pattern {!r} of Policy.exclude matches no leaf; the nearest are: {}"
    assert found.warnings == tuple(map(said.format, ("*kernle*", "nu:head"), names))
    apart = optax.partition(
        {"a": lowmem.flash_adamw(1e-3, storage=Storage(policy=lowmem.Policy(exclude=("norm",)))),
         "b": optax.sgd(1e-3)},
        {"block": "a", "norm": "b"},
    )  # fmt: skip
    assert lowmem.explain(apart, PARAMS).warnings == ()


def test_nothing_to_explain():
    params = {"w": jnp.ones((64, 64))}
    assert str(lowmem.explain(optax.adamw(1e-3), params)) == "no leaf has low-memory state"


def test_it_says_the_same_again():
    """JAX does not trace a function twice on the same shapes; explain must not rely on it."""
    tx = lowmem.flash_adamw(1e-3)
    first = lowmem.explain(tx, PARAMS)
    assert len(first.decisions) == 9
    assert lowmem.explain(tx, PARAMS) == first


def early(step):
    return step < 5


def late(step):
    return step >= 5


STALE = {
    "scale": lambda: optax.chain(lowmem.flash_adamw(1e-3), optax.scale(0.5)),
    "clip": lambda: optax.chain(lowmem.flash_adamw(1e-3), optax.clip(1e-6)),
    "decay": lambda: optax.chain(lowmem.flash_adamw(1e-3), optax.add_decayed_weights(0.1)),
    "schedule_free": lambda: optax.contrib.schedule_free(lowmem.flash_sgd(1e-1), 1e-1, b1=0.9),
    # nothing in the first step
    "schedule": lambda: optax.chain(
        lowmem.flash_adamw(1e-3), optax.scale_by_schedule(lambda count: 1 - count / 400)
    ),
    "plateau": lambda: optax.chain(
        optax.masked(lowmem.flash_adamw(1e-3), lambda p: jax.tree.map(lambda a: a.ndim > 1, p)),
        optax.contrib.reduce_on_plateau(),
    ),
    "norm": lambda: optax.chain(lowmem.flash_adamw(1e-3), optax.clip_by_global_norm(1e3)),
    "sam": lambda: optax.contrib.sam(lowmem.flash_adamw(1e-3), optax.sgd(0.05)),
    "line search": lambda: optax.chain(
        lowmem.flash_sgd(1.0), optax.scale_by_backtracking_linesearch(2)
    ),
    "zoom": lambda: optax.chain(lowmem.flash_sgd(1.0), optax.scale_by_zoom_linesearch(2)),
    # not in the first step
    "some steps": lambda: optax.chain(
        lowmem.flash_adamw(1e-3), optax.conditionally_transform(optax.scale(0.5), late)
    ),
    "masked steps": lambda: optax.chain(
        optax.chain(lowmem.flash_adamw(1e-3)), optax.conditionally_mask(optax.scale(1.0), early)
    ),
    "raw steps": lambda: optax.conditionally_transform(lowmem.flash_adamw(1e-3), early),
    # not before a whole batch
    "MultiSteps": lambda: optax.MultiSteps(
        optax.chain(lowmem.flash_adamw(1e-3), optax.scale(0.5)), 2
    ),
    "accumulated": lambda: lowmem.accumulate_gradients(
        optax.contrib.schedule_free(lowmem.flash_sgd(1e-1), 1e-1, b1=0.9), 3
    ),
}
ALIKE = ("clip", "decay", "zoom")  # as "scale" or "line search"
SOUND = {
    "alone": lambda: lowmem.flash_adamw(1e-3),
    "identity": lambda: optax.chain(lowmem.flash_adamw(1e-3), optax.identity()),
    "selected": lambda: optax.chain(
        optax.apply_if_finite(lowmem.flash_adamw(1e-3), 3), optax.identity()
    ),
    "injected": lambda: optax.chain(
        optax.clip(1.0),
        optax.inject_hyperparams(lowmem.flash_adamw, hyperparam_dtype=jnp.float32)(1e-3),
    ),
    "clip before": lambda: lowmem.chain(optax.clip(1.0), lowmem.flash_adamw(1e-3)),
    "masked": lambda: optax.masked(
        lowmem.flash_adamw(1e-3), lambda p: jax.tree.map(lambda a: a.ndim > 1, p)
    ),
    "MultiSteps": lambda: optax.MultiSteps(lowmem.flash_adamw(1e-3), 4),
    "every step": lambda: optax.MultiSteps(lowmem.flash_adamw(1e-3), 1),
    "inside": lambda: lowmem.split_master_weights(
        optax.chain(lowmem.flash_adamw(1e-3, storage=UNSPLIT), optax.scale(0.5))
    ),
    "ema": lambda: lowmem.track_master_ema(lowmem.flash_adamw(1e-3), 0.9),
    "some steps inside": lambda: lowmem.split_master_weights(
        optax.conditionally_transform(lowmem.flash_adamw(1e-3, storage=UNSPLIT), early)
    ),
    "some steps before": lambda: optax.chain(
        optax.conditionally_transform(optax.scale(0.5), late), lowmem.flash_adamw(1e-3)
    ),
    "idle steps": lambda: optax.conditionally_mask(lowmem.flash_adamw(1e-3), early),
    "opaque sam": lambda: optax.contrib.sam(
        lowmem.flash_adamw(1e-3), optax.sgd(0.05), opaque_mode=True
    ),
    "no split": lambda: optax.chain(lowmem.flash_adamw(1e-3, storage=UNSPLIT), optax.scale(0.5)),
}


def rounding(make=lowmem.flash_adamw):
    """Of bf16 weights without a correction, to a neighbour at random."""
    return make(1e-3, storage=Storage(master_weight_bits=None, master_rounding="stochastic"))


CHANGED = {
    "scale": lambda: optax.chain(rounding(), optax.scale(0.5)),
    "clip, in ours": lambda: lowmem.chain(rounding(), optax.clip(1e-6)),
    "schedule_free": lambda: optax.contrib.schedule_free(rounding(lowmem.flash_sgd), 1e-1, b1=0.9),
    "some steps": lambda: optax.conditionally_transform(rounding(), early),
}
AS_ROUNDED = {
    "alone": rounding,
    "clip before": lambda: lowmem.chain(optax.clip(1.0), rounding()),
    "selected": lambda: optax.chain(optax.apply_if_finite(rounding(), 3), optax.identity()),
    "masked": lambda: optax.masked(rounding(), {"block": True, "norm": False}),
    "MultiSteps": lambda: optax.MultiSteps(rounding(), 4),
    "accumulated": lambda: lowmem.accumulate_gradients(rounding(), 4),
    "inside": lambda: lowmem.split_master_weights(optax.chain(rounding(), optax.scale(0.5))),
    "noise": lambda: lowmem.gaussws_noise(rounding(), parts="all"),
    "f32": lambda: optax.chain(rounding(), optax.scale(0.5)),
}


@pytest.mark.parametrize("kind", [*CHANGED, *AS_ROUNDED])
def test_updates_changed_after_their_weights_were_rounded_are_found(kind):
    """They are rounded once more, to nearest: with half an ulp or less a weight stands still."""
    dtype = jnp.float32 if kind == "f32" else jnp.bfloat16
    params = jax.tree.map(lambda p: jnp.ones(p.shape, dtype), PARAMS)
    found = lowmem.explain((CHANGED | AS_ROUNDED)[kind](), params).warnings
    assert len(found) == (kind in CHANGED)
    for warning in found:
        assert "block/kernel" in warning and "16-bit weights were rounded stochastically" in warning
        assert "split_master_weights(wrapper(" in warning


def started(tx):
    """Return the warnings of `init`, called and traced."""
    masters = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), PARAMS)
    init = functools.partial(
        lowmem.init, tx, dtype=lambda path, _: DTYPES[path], allow_rounding=True
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        init(masters)
        jax.jit(init)(masters)
    return [str(one.message) for one in said]


@pytest.mark.parametrize("name", rows(STALE, [n for n in STALE if n not in ALIKE]))
def test_stale_corrections_are_found(name):
    make = STALE[name]
    found = lowmem.explain(make(), PARAMS)
    assert len(found.warnings) == 1
    assert "are changed after the split of their master weights" in found.warnings[0]
    assert "split_master_weights(wrapper(" in found.warnings[0]
    assert "block/kernel" in found.warnings[0]
    assert str(found).splitlines()[-1] == f"warning: {found.warnings[0]}"
    with pytest.raises(
        ValueError, match="changed after the split of their master weights"
    ) as error:
        started(make())
    assert str(error.value) == found.warnings[0]


def test_the_trial_step_selects_the_extra_arguments_that_an_update_accepts():
    """One that requires two of optax's arguments, and refuses the others without naming them."""

    def update(updates, state, params=None, **extra):
        if extra.keys() != {"value", "grad_fn"}:
            raise TypeError("wrong arguments")
        return jax.tree.map(lambda g: 0.5 * g, updates), state

    picky = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    (found,) = lowmem.explain(optax.chain(lowmem.flash_adamw(1e-3), picky), PARAMS).warnings
    assert "are changed after the split of their master weights" in found


def test_a_batch_that_is_too_long_to_try_is_told(monkeypatch):
    monkeypatch.setattr(stale_corrections, "_MICRO_BATCHES", 4)
    late = optax.MultiSteps(optax.chain(lowmem.flash_adamw(1e-3), optax.scale(0.5)), 5)
    (found,) = lowmem.explain(late, PARAMS).warnings
    assert found == (
        "could not try a step to look for stale corrections: no batch of at most 4 micro-batches"
    )


@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND)
def test_what_is_sound_gets_no_warning(make):
    assert lowmem.explain(make(), PARAMS).warnings == ()
    assert started(make()) == []


DISTANCES = {
    "mechanize": lambda: optax.contrib.mechanize(optax.adamw(1e-3)),
    "dog": optax.contrib.dog,
    "dowg": lambda: optax.chain(optax.clip(1.0), optax.contrib.dowg()),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
}
ESTIMATES = {"prodigy": optax.contrib.prodigy, "cocob": optax.contrib.cocob}


@pytest.mark.parametrize("name, bits", in_turn([*DISTANCES, *ESTIMATES], [24, 32]))
def test_differences_of_24_bit_master_weights(name, bits):
    tx = lowmem.split_master_weights((DISTANCES | ESTIMATES)[name](), bits)
    found = lowmem.explain(tx, PARAMS).warnings
    assert len(found) == (name in DISTANCES and bits == 24)
    for warning in found:
        assert f"optax's {name} uses differences" in warning
        assert "bits=32" in warning and "master_weight_bits=32" in warning
    assert started(tx) == [*found, *found]


def test_differences_of_master_weights_split_by_the_ulp_scheme():
    tx = lowmem.split_master_weights(optax.contrib.dog(), 24, split="ulp")
    (warning,) = lowmem.explain(tx, PARAMS).warnings
    assert "optax's dog uses differences" in warning


@pytest.mark.full
def test_a_trial_with_heads_and_with_leaves_that_are_left_out():
    """`explain` and `init` do not warn of leaves that the trial cannot shorten to a few numbers."""
    params = {
        "attention": {"q_proj": {"kernel": jnp.ones((96, 96))}, "step": jnp.arange(3)},
        "norm": jnp.ones(96),
    }
    kept = jax.tree.map(lambda a: a.dtype == jnp.float32, params)
    blocks = lowmem.blocks.Structure(heads=12)
    tx = optax.masked(lowmem.flash_adam_mini(1e-3, blocks=blocks), kept)
    around = optax.chain(tx, optax.identity())
    assert lowmem.explain(around, params).warnings == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowmem.init(around, params)


def check_abstract(params):
    before = {id(a) for a in jax.live_arrays()}
    found = lowmem.explain(lowmem.flash_adamw(1e-3), params)
    report = lowmem.memory.report(lowmem.flash_adamw(1e-3), params)
    assert [a for a in jax.live_arrays() if id(a) not in before and a.nbytes > 4096] == []
    assert len(found.decisions) == 3 * len(jax.tree.leaves(params)) == 3 * len(report.by_leaf)
    assert found.warnings == ()


def test_an_abstract_tree():
    whole = gpt2_124m()
    check_abstract(dict(list(whole.items())[:3]))


@pytest.mark.full
@pytest.mark.parametrize("make", [gpt2_124m, llama_3_1_8b])
def test_a_whole_abstract_tree(make):
    check_abstract(make())
