"""Bad input gets an error that names the leaf, or the argument, and the remedy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Policy, Storage, codecs

SOFTSIGN, SQRT = codecs.softsign(), codecs.sqrt()
BOTH = {"mu": SOFTSIGN, "nu": SQRT}


def weights(dtype=jnp.bfloat16, side=64):
    return {"block": {"kernel": jnp.ones((side, side), dtype)}, "norm": jnp.ones((64,), dtype)}


def grads_of(params):
    return jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), params)


def compressed(**options):
    return lowmem.compress_state(optax.adamw(1e-3), **(options or BOTH))


def flash(**storage):
    return lowmem.flash_adamw(1e-3, storage=Storage(**storage))


def split(**options):
    return lowmem.split_master_weights(optax.adamw(1e-3), **options)


def accumulated(into):
    return lowmem.accumulate_gradients(lowmem.flash_adamw(1e-3), 4, into)


ALL = {
    "flash_adamw": lambda: lowmem.flash_adamw(1e-3),
    "flash_adam": lambda: lowmem.flash_adam(1e-3),
    "flash_lion": lambda: lowmem.flash_lion(1e-3),
    "flash_sgd": lambda: lowmem.flash_sgd(1e-3, momentum=0.9),
    "flash_sgd plain": lambda: lowmem.flash_sgd(1e-3),
    "split": split,
    "compressed": compressed,
    "ema": lambda: lowmem.track_master_ema(lowmem.flash_adamw(1e-3), 0.9),
    "into bfloat16": lambda: accumulated("bfloat16"),
    "into moments": lambda: accumulated("moments"),
}
everyone = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def raises(message, kind=ValueError):
    return pytest.raises(kind, match=message)


@everyone
def test_update_without_params(make):
    tx, params = make(), weights()
    ours = "" if make is compressed else r".*Call tx\.update\(grads, state, params\)"
    with raises(f"not passing `params`{ours}"):
        tx.update(grads_of(params), tx.init(params))


NOT_WEIGHTS = [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64, jnp.float8_e4m3fn]


@everyone
@pytest.mark.parametrize("dtype", NOT_WEIGHTS, ids=lambda d: d.__name__)
def test_leaves_that_are_not_weights(make, dtype):
    params = {**weights(), "steps": jnp.ones((8,), dtype)}
    with raises(rf"'steps' is {jnp.dtype(dtype)}.*optax\.masked or optax\.partition", TypeError):
        make().init(params)


@everyone
def test_float64_leaves(make):
    with jax.enable_x64(True):
        params = {"block": {"kernel": jnp.ones((64, 64), jnp.float64)}}
        with raises(r"'block/kernel' is float64.*Cast it to float32", TypeError):
            make().init(params)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64], ids=lambda d: d.__name__)
def test_init_and_report_name_the_leaf_too(dtype):
    params = {"block": {"kernel": jnp.ones((64, 64), dtype)}}
    for use in (lowmem.init, lowmem.memory.report, lowmem.explain):
        with raises("'block/kernel' is .*Leave it out", TypeError):
            use(lowmem.flash_adamw(1e-3), params)


def test_a_leaf_that_is_no_array():
    with raises(r"'a' is a float, not an array: make it one with jnp\.asarray", TypeError):
        lowmem.flash_adamw(1e-3).init({"a": 1.0})


def with_norm(grads, norm):
    return {**grads, "norm": norm}


BAD_GRADIENTS = {
    "missing": (lambda g: {"block": g["block"]}, ValueError, r"missing \['norm'\]"),
    "none": (lambda g: with_norm(g, None), ValueError, r"missing \['norm'\]"),
    "extra": (lambda g: {**g, "bias": g["norm"]}, ValueError, r"extra \['bias'\]"),
    "list": (lambda g: [g["block"], g["norm"]], ValueError, "missing .*'block/kernel'.*'0/kernel'"),
    "shape": (
        lambda g: with_norm(g, jnp.ones((32,))),
        ValueError,
        r"gradient 'norm' has shape \(32,\), its parameter has \(64,\)",
    ),
    "complex": (
        lambda g: with_norm(g, jnp.ones((64,), jnp.complex64)),
        TypeError,
        "gradient 'norm' is complex64.*pass a real one",
    ),
}


@everyone
@pytest.mark.parametrize("bad", BAD_GRADIENTS.values(), ids=BAD_GRADIENTS)
def test_gradients_of_another_tree(make, bad):
    change, kind, message = bad
    tx, params = make(), weights()
    with raises(message, kind):
        tx.update(change(grads_of(params)), tx.init(params), params)


@everyone
def test_gradients_that_fit_pass(make):
    """The control of the test above."""
    tx, params = make(), weights()
    updates, _ = tx.update(grads_of(params), tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


# ---- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Storage, compressed], ids=["Storage", "compress_state"])
@pytest.mark.parametrize(
    ("size", "kind", "message"),
    [
        (0, ValueError, "group_size must be at least 1, got 0"),
        (-32, ValueError, "group_size must be at least 1, got -32"),
        (32.0, TypeError, "group_size must be an int known when tracing, got float"),
        ("32", TypeError, "group_size must be an int.*got str"),
        (True, TypeError, "group_size must be an int.*got bool"),
        (
            jnp.int32(32),
            TypeError,
            r"inject_hyperparams .*static_args.*Storage\(group_size=\.\.\.\)",
        ),
    ],
    ids=str,
)
def test_group_size(make, size, kind, message):
    more = BOTH if make is compressed else {}
    with raises(message, kind):
        make(group_size=size, **more)


def test_group_size_through_inject_hyperparams():
    def make(learning_rate, group_size):
        return lowmem.flash_adamw(learning_rate, storage=Storage(group_size=group_size))

    with raises("group_size must be an int known when tracing.*static_args", TypeError):
        optax.inject_hyperparams(make)(1e-3, 32).init(weights())
    remedy = lowmem.inject_hyperparams(make, static_args=("group_size",))(1e-3, 64)
    assert optax.tree.get(remedy.init(weights()), "mu_scale")["block"]["kernel"].shape == (64, 1)


@pytest.mark.parametrize("bits", [16, 8, 0, 25, 24.0, True, "24", jnp.int32(24)], ids=repr)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda bits: Storage(master_weight_bits=bits), "master_weight_bits"),
        (lambda bits: split(bits=bits), "bits"),
        (lambda bits: lowmem.track_master_ema(optax.sgd(0.1), 0.9, bits=bits), "bits"),
    ],
    ids=["Storage", "split", "ema"],
)
def test_width_of_master_weights(make, name, bits):
    with raises(rf"{name} is the width of the master weights: 24 or 32"):
        make(bits)


MAKERS = [lowmem.flash_adamw, lowmem.flash_adam, lowmem.flash_lion, lowmem.flash_sgd]


@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rate", [-1e-3, np.float32(-1), float("nan"), -1], ids=repr)
def test_learning_rate_that_is_negative(make, rate):
    with raises("learning_rate must be >= 0, got"):
        make(rate)


@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "rate", ["1e-3", None, 1e-3j, np.complex64(1e-3), jnp.complex64(1e-3), {1e-3}], ids=repr
)
def test_learning_rate_that_is_no_number(make, rate):
    with raises("learning_rate must be a number, an f32 scalar or a schedule", TypeError):
        make(rate)


@pytest.mark.parametrize(
    ("make", "name", "bad"),
    [
        (lambda **k: lowmem.flash_adamw(1e-3, **k), name, bad)
        for name in ("b1", "b2")
        for bad in (1, 1.0, 1.5, -0.1)
    ]
    + [(lambda **k: lowmem.flash_lion(1e-3, **k), name, 1.0) for name in ("b1", "b2")]
    + [(lambda **k: lowmem.scale_by_flash_adam(**k), "b1", 1)]
    + [(lambda **k: lowmem.scale_by_flash_lion(**k), "b1", 1)]
    + [(lambda **k: lowmem.flash_sgd(1e-3, **k), "momentum", 1.0)],
)
def test_decay_out_of_range(make, name, bad):
    with raises(rf"{name} must be in \[0, 1\), got {bad}"):
        make(**{name: bad})


@pytest.mark.parametrize("name", ["eps", "eps_root", "weight_decay"])
def test_negative_constants(name):
    with raises(f"{name} must be >= 0, got -0.1"):
        lowmem.flash_adamw(1e-3, **{name: -0.1})


INJECTED = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(lowmem.flash_adamw)(1e-3),
    "inject_hyperparams lion": lambda: optax.inject_hyperparams(lowmem.flash_lion)(1e-3),
    "inject_hyperparams schedule": lambda: optax.inject_hyperparams(lowmem.flash_sgd)(
        optax.constant_schedule(1e-3)
    ),
    "a bf16 rate": lambda: lowmem.flash_adamw(jnp.bfloat16(1e-3)),
}
IN_BF16 = r"hyperparameter \w+ is bfloat16.*lowmem.inject_hyperparams, or pass hyperparam_dtype"


@pytest.mark.parametrize("make", INJECTED.values(), ids=INJECTED)
def test_hyperparameters_in_bf16(make):
    with raises(IN_BF16, TypeError):
        make().init(weights())


NO_RATES = ["1e-3", {}, 1e-3j, jnp.complex64(1e-3), True, -1, -1e-3, float("nan"),
            jnp.float32(-1e-3), jnp.float32("nan")]  # fmt: skip


@pytest.mark.parametrize("value", NO_RATES, ids=repr)
@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "adam_learning_rate"])
def test_schedules_of_what_is_no_hyperparameter(name, value):
    make = lowmem.flash_muon if "adam" in name else lowmem.flash_adamw
    tx = make(**{"learning_rate": 1e-3, name: lambda count: value})
    for init in (tx.init, jax.jit(tx.init)):
        with raises(f"the schedule of {name} gives .*must be", (TypeError, ValueError)):
            init(weights())


def test_a_schedule_in_bf16():
    tx, params = lowmem.flash_adamw(lambda count: jnp.bfloat16(1e-3)), weights()
    with raises(IN_BF16, TypeError):
        jax.jit(tx.update)(grads_of(params), tx.init(params), params)


OPTAXS_F32 = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)


@pytest.mark.parametrize("wrap", [OPTAXS_F32, lowmem.inject_hyperparams], ids=["optax", "ours"])
def test_hyperparameters_in_f32_pass(wrap):
    tx, params = wrap(lowmem.flash_adamw)(0.1), weights()  # 1e-3 would only move the corrections
    updates, _ = tx.update(grads_of(params), tx.init(params), params)
    assert all(bool(jnp.all(u < 0)) for u in jax.tree.leaves(updates))


def test_a_schedule_of_a_decay_without_a_result():
    with raises("the schedule of b2 returned None: let it return a number", TypeError):
        lowmem.flash_adamw(1e-3, b2=lambda count: None)


@pytest.mark.parametrize("name", ["learning_rate", "b1", "b2", "weight_decay"])
def test_booleans_for_hyperparameters(name):
    with raises(f"{name} must be a number, an f32 scalar or a schedule, got True", TypeError):
        lowmem.flash_adamw(**{"learning_rate": 1e-3, name: True})


def test_a_schedule_without_a_result():
    tx, params = lowmem.flash_adamw(lambda count: None), weights()
    with raises("the schedule of learning_rate returned None: let it return a number", TypeError):
        tx.update(grads_of(params), tx.init(params), params)


UNSIGNED = r"negative values and '{}' is unsigned.*Use a signed codec.*codecs\.softsign\(\)"


@pytest.mark.parametrize("codec", [SQRT, codecs.linear(signed=False)], ids=lambda c: c.name)
def test_unsigned_codec_for_a_signed_slot(codec):
    with raises("slot 'mu' has " + UNSIGNED.format(codec.name)):
        Storage(mu=codec)
    adan = lowmem.compress_state(optax.adan(1e-3), v=codec)
    with raises(r"slot 'ScaleByAdanState\.v' has " + UNSIGNED.format(codec.name)):
        adan.init(weights(jnp.float32))
    with raises(r"slot 'EmaState\.ema' has " + UNSIGNED.format(codec.name)):
        lowmem.compand_momentum(0.9, codec=codec).init(weights(jnp.float32))


@pytest.mark.parametrize("codec", ["softsign", codecs.softsign, 8], ids=("name", "maker", "int"))
def test_what_is_no_codec(codec):
    for make in (Storage, compressed):
        with raises(r"mu takes a codec such as lowmem\.codecs\.softsign\(\)", TypeError):
            make(mu=codec)


@pytest.mark.parametrize(
    ("inner", "slots", "message"),
    [
        (optax.adan(1e-3), {"mu": SOFTSIGN}, "no slot mu; it has m, v, n, g"),
        (
            optax.chain(optax.clip(1.0), optax.adamw(1e-3)),
            {"trace": SOFTSIGN, "mu": SOFTSIGN, "ema": SOFTSIGN},
            "no slot trace or ema; it has mu, nu$",
        ),
        (optax.sgd(1e-3), {"trace": SOFTSIGN}, "no slot trace; it has none"),
        (optax.adam(1e-3), {"count": SOFTSIGN}, "no slot count; it has mu, nu$"),
    ],
    ids=["adan", "chain", "sgd", "count"],
)
def test_slots_that_the_state_lacks(inner, slots, message):
    with raises(message):
        lowmem.compress_state(inner, **slots).init(weights(jnp.float32))


def test_nothing_to_compress():
    with raises(r"a codec for at least one slot, such as mu=softsign\(\)"):
        lowmem.compress_state(optax.adam(1e-3))
    with raises("no slot to compress; it has none"):
        lowmem.compand_momentum(optax.sgd(0.1)).init(weights(jnp.float32))
    with raises("no slot to compress; it has mu"):
        lowmem.sqrt_variance_quant(optax.lion(0.1)).init(weights(jnp.float32))


@pytest.mark.parametrize(
    ("name", "bad"),
    [("rounding", "up"), ("rounding", None), ("split", "kahan"), ("update_dtype", "bfloat16")],
)
def test_choices_of_storage(name, bad):
    with raises(rf"{name} must be one of \('\w+'(, '\w+')+\), got {bad!r}"):
        Storage(**{name: bad})


def test_other_arguments_of_storage():
    with raises(r"policy takes a lowmem\.Policy", TypeError):
        Storage(policy=("*bias",))
    with raises("seed must be an int, got 1.5", TypeError):
        Storage(seed=1.5)
    with raises(r"storage takes a lowmem\.Storage, got \{'mu': None\}", TypeError):
        lowmem.flash_adamw(1e-3, storage={"mu": None})
    with raises("rounding must be 'stochastic' or 'nearest', got 'up'"):
        compressed(mu=SOFTSIGN, rounding="up")


def test_arguments_of_a_policy():
    with raises(
        r"tuple of patterns, got the string '\*bias': write exclude=\('\*bias',\)", TypeError
    ):
        Policy(exclude="*bias")
    with raises("tuple of patterns, got", TypeError):
        Policy(exclude=(1,))
    for bad in (-1, 1.5):
        with raises(f"min_size is a number of elements >= 0, got {bad}"):
            Policy(min_size=bad)
    listed = Policy(exclude=["*bias"])
    assert hash(listed) == hash(Policy(exclude=("*bias",)))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda mask: flash(policy=Policy(mask=mask)), "the policy's mask"),
        (lambda mask: lowmem.flash_adamw(1e-3, mask=mask), "the mask of weight decay"),
    ],
    ids=["policy", "decay"],
)
def test_masks_of_another_tree(make, name):
    with raises(f"{name} does not fit the parameters .block/kernel, norm.*a prefix of it"):
        make({"blok": True}).init(weights())


def test_decoupled_decay_needs_a_peak():
    with raises("decouple_lr=True needs .* largest learning rate of the schedule: pass it"):
        lowmem.flash_adamw(optax.constant_schedule(1e-3), decouple_lr=True)
    injected = lowmem.inject_hyperparams(lowmem.flash_adamw)
    with raises("an array may be that of one step .*: pass it, decouple_lr=3e-4"):
        injected(optax.linear_schedule(0.0, 1e-2, 10), decouple_lr=True).init(weights())
    with raises("pass decoupled=True"):
        lowmem.flash_sgd(0.1, decouple_lr=True)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, None], ids=str)
def test_dtypes_that_weights_cannot_have(dtype):
    with raises("'block/kernel': weights are kept in 'bfloat16', .* or 'float32', not", TypeError):
        lowmem.init(flash(), weights(jnp.float32), lambda path, leaf: dtype)
    with raises("dtype of parameter 'block/kernel': .* not 'bf16'", TypeError):
        lowmem.init(flash(), weights(jnp.float32), "bf16")


def test_implementations():
    params = weights()
    with raises("implementation must be one of .*'xla'.* or None, got 'cuda'"):
        lowmem.step(flash(), params, flash().init(params), params, implementation="cuda")


# ---- states of other settings, and splits that meet ------------------------------------------

OTHER = r"made or restored with other settings: use those, or call init again"
KERNEL = "'block/kernel'"
STORAGES = {
    "group size": ({}, {"group_size": 64}, f"mu_scale of {KERNEL}.*group_size=64"),
    "codec": ({}, {"mu": codecs.linear()}, f"mu_scale of {KERNEL}"),
    "paper's scales": ({}, {"nu": codecs.sqrt_paper()}, f"nu_scale of {KERNEL}"),
    "f32 slot": ({}, {"nu": None}, f"nu of {KERNEL} is uint8"),
    "32 bits": ({}, {"master_weight_bits": 32}, f"correction of {KERNEL} is int8"),
    "ulp split": ({}, {"split": "ulp"}, f"correction of {KERNEL} is int8"),
    "no correction": ({}, {"master_weight_bits": None}, f"correction of {KERNEL} is int8"),
    "no correction yet": ({"master_weight_bits": None}, {}, f"correction of {KERNEL} is int8"),
    "min_size": ({}, {"policy": Policy(min_size=0)}, "mu of 'norm' is float32"),
}


@pytest.mark.parametrize("case", STORAGES.values(), ids=STORAGES)
def test_flash_states_of_other_settings(case):
    before, after, message = case
    params = weights()
    state = flash(**before).init(params)
    with raises(f"{message}.*{OTHER}"):
        flash(**after).update(grads_of(params), state, params)


def test_a_state_of_other_rows_and_columns_names_the_parameter():
    params = {"w": jnp.ones((4, 64, 96), jnp.bfloat16)}
    state = lowmem.flash_factored_adamw(1e-3, min_dim_size_to_factor=64).init(params)
    tx = lowmem.flash_factored_adamw(1e-3)
    with raises(
        r"nu of 'w' is float32\[4, 160\].*parameter bfloat16\[4, 64, 96\], nu: a value per "
        rf"element\) keeps float32\[4, 64, 96\].*{OTHER}"
    ):
        tx.update(grads_of(params), state, params)


@pytest.mark.parametrize("make", [flash, split, compressed], ids=["flash", "split", "compressed"])
def test_states_of_another_tree(make):
    tx, params = make(), weights()
    state, others = tx.init(params), {"other": {"kernel": jnp.ones((64, 64), jnp.bfloat16)}}
    with raises("other|for another tree"):
        tx.update(grads_of(others), state, others)


@pytest.mark.parametrize("make", [flash, compressed], ids=["flash", "compressed"])
def test_states_of_another_shape(make):
    tx, params = make(), weights()
    wider = weights(side=128)
    with raises(f"{KERNEL}.*(made or restored with other settings|made for another tree)"):
        tx.update(grads_of(wider), tx.init(params), wider)


SLOTS = {
    "group size": (BOTH, {**BOTH, "group_size": 64}, f"{KERNEL}, slot mu.*groups of 64"),
    "codec": (BOTH, {**BOTH, "mu": codecs.linear()}, f"{KERNEL}, slot mu.*linear-int8"),
    "paper's scales": (BOTH, {**BOTH, "nu": codecs.sqrt_paper()}, f"{KERNEL}, slot nu"),
    "fewer slots": (BOTH, {"mu": SOFTSIGN}, "keeps nu_scale.*no codec here"),
    "more slots": ({"mu": SOFTSIGN}, BOTH, "has no nu_scale, only mu_scale"),
    "min_size": (BOTH, {**BOTH, "policy": Policy(min_size=0)}, "scale of 'norm'"),
    "exclude": (BOTH, {**BOTH, "policy": Policy(exclude=("*kernel",))}, f"scale of {KERNEL}"),
}


@pytest.mark.parametrize("case", SLOTS.values(), ids=SLOTS)
def test_compressed_states_of_other_settings(case):
    before, after, message = case
    params = weights(jnp.float32)
    state = compressed(**before).init(params)
    with raises(f"{message}.*other settings.*call init again"):
        compressed(**after).update(grads_of(params), state, params)


@pytest.mark.parametrize("other", [{"bits": 32}, {"split": "ulp"}], ids=str)
def test_split_states_of_other_settings(other):
    params = weights()
    with raises(f"correction of {KERNEL} is int8.*{OTHER}"):
        split(**other).update(grads_of(params), split().init(params), params)


def test_split_states_of_f32_weights():
    params = weights()
    with raises(f"correction of {KERNEL} is int8.*{OTHER}"):
        split().update(grads_of(params), split().init(weights(jnp.float32)), params)


@pytest.mark.parametrize(
    ("tx", "other", "kept"),
    [
        (lowmem.flash_lion(1e-3), lowmem.flash_adamw(1e-3), "FlashLionState"),
        (lowmem.flash_adamw(1e-3), lowmem.flash_lion(1e-3), "FlashAdamState"),
        (lowmem.flash_adamw(1e-3), optax.adamw(1e-3), "FlashAdamState"),
        (split(), optax.adamw(1e-3), "SplitState"),
        (compressed(), optax.adamw(1e-3), "CompressedState"),
    ],
)
def test_states_of_other_optimizers(tx, other, kept):
    params = weights()
    with raises(rf"this optimizer keeps a {kept}.*restore it into the structure of tx\.init"):
        tx.update(grads_of(params), other.init(params), params)


def test_two_corrections_on_one_leaf():
    twice = optax.chain(lowmem.flash_adamw(1e-3), lowmem.flash_lion(1e-3))
    remedy = (
        r"Keep one split, and give the other optimizer storage=Storage\(master_weight_bits=None\)"
    )
    with raises(f"leaf {KERNEL} would get two corrections.*{remedy}"):
        lowmem.init(twice, weights(jnp.float32))
    params = weights()
    with raises(f"leaf {KERNEL} has two corrections.*{remedy}"):
        lowmem.master_params(params, twice.init(params))


def test_wrappers_around_a_split():
    remedy = r"storage=Storage\(master_weight_bits=None\)"
    with raises(remedy):
        lowmem.split_master_weights(lowmem.flash_adamw(1e-3)).init(weights())
    with raises(rf"link 0 .*link 1.*{remedy}"):
        lowmem.chain(lowmem.flash_adamw(1e-3), optax.scale(0.5)).init(weights())
    with raises(r"put it inside, split_master_weights\(compress_state\(\.\.\.\)\)"):
        lowmem.compress_state(lowmem.flash_adamw(1e-3), mu=SOFTSIGN).init(weights())
