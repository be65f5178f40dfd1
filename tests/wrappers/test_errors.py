"""Bad input gets an error that names the leaf, or the argument, and the remedy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Policy, Storage, codecs
from optax_lowmem.flax import TrainState
from tests.tiers import rows

SOFTSIGN, SQRT = codecs.softsign(), codecs.sqrt()
BOTH = {"mu": SOFTSIGN, "nu": SQRT}


def weights(dtype=jnp.bfloat16, side=64):
    return {"block": {"kernel": jnp.ones((side, side), dtype)}, "norm": jnp.ones((64,), dtype)}


SHAPES = jax.eval_shape(lambda: weights(jnp.float32))


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


@pytest.mark.parametrize("name", rows(ALL, list(ALL)[::3]))
def test_gradients_that_fit_pass(name):
    """The control of the test above."""
    make = ALL[name]
    tx, params = make(), weights()
    updates, _ = tx.update(grads_of(params), tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


# ---- arguments -------------------------------------------------------------------------------
adamw = functools.partial(lowmem.flash_adamw, 1e-3)
INT = "group_size must be an int known when tracing, got {}"
RATE = "learning_rate must be a number, an f32 scalar or a schedule, got"
LAST = list(codecs.NAMES)[-1]
CODEC = r"mu takes a codec such as lowmem\.codecs\.softsign\(\)"
STRUCTURE = r"blocks must be a lowmem.blocks.Structure, got \{'heads': 4\}"

# error: what it says, and the calls that it is of
ARGUMENTS = {
    ValueError: {
        "group_size must be at least 1, got 0": [
            lambda: Storage(group_size=0), lambda: compressed(**BOTH, group_size=0)],
        "master_weight_bits is the width of the master weights: 24 or 32": [
            lambda: Storage(master_weight_bits=16), lambda: Storage(master_weight_bits=24.0)],
        "bits is the width of the master weights: 24 or 32": [
            lambda: split(bits=True), lambda: split(bits=jnp.int32(24)),
            lambda: lowmem.track_master_ema(optax.sgd(0.1), 0.9, bits=8)],
        "chain takes at least one transformation": [lambda: lowmem.chain()],
        "learning_rate must be >= 0, got": [
            lambda: lowmem.flash_adamw(-1e-3), lambda: lowmem.flash_adam(np.float32(-1)),
            lambda: lowmem.flash_lion(float("nan")), lambda: lowmem.flash_sgd(-1)],
        r"b1 must be in \[0, 1\), got 1": [
            lambda: adamw(b1=1), lambda: adamw(b1=1.5), lambda: lowmem.flash_lion(1e-3, b1=1.0),
            lambda: lowmem.scale_by_flash_adam(b1=1), lambda: lowmem.scale_by_flash_lion(b1=1)],
        r"b2 must be in \[0, 1\), got -0.1": [
            lambda: adamw(b2=-0.1), lambda: lowmem.flash_lion(1e-3, b2=-0.1)],
        r"momentum must be in \[0, 1\), got 1.0": [lambda: lowmem.flash_sgd(1e-3, momentum=1.0)],
        r"the decay must be in \[0, 1\)": [
            lambda: lowmem.compand_momentum(1.0), lambda: lowmem.sqrt_variance_quant(-0.1)],
        r"decay must be in \[0, 1\), got": [
            functools.partial(lowmem.track_master_ema, optax.sgd(0.1), decay)
            for decay in (1.0, 1, -0.1, 2.0)],
        "every must be a number of micro-batches, at least 1, got": [
            functools.partial(lowmem.accumulate_gradients, optax.sgd(0.1), every, "bfloat16")
            for every in (0, -1, 2.0, True, "4")],
        r"micro_batches must be a number of micro-batches, at least 1, got 0\.$": [
            lambda: lowmem.value_and_grad(jnp.sum, 0)],
        "dtype must be one of bfloat16, float32, got 'float16'": [
            lambda: lowmem.value_and_grad(jnp.sum, 2, dtype="float16")],
        "into must be one of bfloat16, moments, got 'float32'": [
            lambda: lowmem.accumulate_gradients(optax.sgd(0.1), 4, "float32")],
        "eps must be >= 0, got -0.1": [lambda: adamw(eps=-0.1)],
        "eps_root must be >= 0, got -0.1": [lambda: adamw(eps_root=-0.1)],
        "weight_decay must be >= 0, got -0.1": [lambda: adamw(weight_decay=-0.1)],
        "rounding must be one of stochastic, nearest, nu, embeddings, got 'up'": [
            lambda: Storage(rounding="up")],
        "split must be one of bits, ulp, got 'kahan'": [lambda: Storage(split="kahan")],
        r"update_dtype must be one of .*, got 'bfloat16'": [
            lambda: Storage(update_dtype="bfloat16")],
        "rounding must be one of stochastic, nearest, got 'up'": [
            lambda: compressed(mu=SOFTSIGN, rounding="up")],
        "min_size is a number of elements >= 0, got": [
            lambda: Policy(min_size=-1), lambda: Policy(min_size=1.5)],
        r"a codec for at least one slot, such as mu='int8'": [
            lambda: lowmem.compress_state(optax.adam(1e-3))],
        "no slot to compress; its slots are none": [
            lambda: lowmem.compand_momentum(optax.sgd(0.1)).init(weights())],
        "no slot to compress; its slots are mu": [
            lambda: lowmem.sqrt_variance_quant(optax.lion(0.1)).init(weights())],
        "no slot mu; its slots are m, v, n, g": [
            lambda: lowmem.compress_state(optax.adan(1e-3), mu=SOFTSIGN).init(weights())],
        "no slot trace or ema; its slots are mu, nu$": [
            lambda: compressed(mu=SOFTSIGN, trace=SOFTSIGN, ema=SOFTSIGN).init(weights())],
        "no slot count; its slots are mu, nu$": [
            lambda: compressed(count=SOFTSIGN).init(weights())],
        f"mu: no codec has the name 'int7'; the names are int8, int4, .*{LAST} .None for f32.$": [
            lambda: Storage(mu="int7"), lambda: compressed(mu="int7")],
        "codec: no codec has the name 'int7'; the names are int8, ": [
            lambda: lowmem.compand_momentum(0.9, codec="int7")],
        "the policy's mask does not fit the parameters .block/kernel, norm.*a prefix of it": [
            lambda: flash(policy=Policy(mask={"blok": True})).init(weights())],
        "the mask of weight decay does not fit the parameters .block/kernel, norm.*a prefix": [
            lambda: adamw(mask={"blok": True}).init(weights())],
        "decouple_lr=True needs .* largest learning rate of the schedule: pass it": [
            lambda: lowmem.flash_adamw(optax.constant_schedule(1e-3), decouple_lr=True)],
        "an array may be that of one step .*: pass a number, such as decouple_lr=3e-4": [
            lambda: lowmem.inject_hyperparams(lowmem.flash_adamw)(
                optax.linear_schedule(0.0, 1e-2, 10), decouple_lr=True).init(weights())],
        "pass decoupled=True": [lambda: lowmem.flash_sgd(0.1, decouple_lr=True)],
        "implementation must be one of .*xla.*, None, got 'cuda'": [
            lambda: lowmem.step(flash(), weights(), flash().init(weights()), weights(),
                                implementation="cuda")],
    },
    TypeError: {
        INT.format("float"): [lambda: Storage(group_size=32.0)],
        INT.format("str"): [lambda: compressed(**BOTH, group_size="32")],
        INT.format("bool"): [lambda: Storage(group_size=True)],
        r"inject_hyperparams .*static_args.*Storage\(group_size=\.\.\.\)": [
            lambda: Storage(group_size=jnp.int32(32)),
            lambda: compressed(**BOTH, group_size=jnp.int32(32))],
        RATE: [
            lambda: lowmem.flash_adamw("1e-3"), lambda: lowmem.flash_adam(None),
            lambda: lowmem.flash_lion([1e-3, 1e-4]), lambda: lowmem.flash_sgd({"a": 1e-3}),
            lambda: lowmem.flash_adamw(True), lambda: lowmem.flash_adamw(1e-3j),
            lambda: lowmem.flash_lion(jnp.complex64(1e-3))],
        "b1 must be a number": [lambda: adamw(b1=[0.9]), lambda: adamw(b1=True)],
        "weight_decay must be a number, an f32 scalar or a schedule, got True": [
            lambda: adamw(weight_decay=True)],
        "the schedule of b2 returned None: let it return a number": [
            lambda: adamw(b2=lambda count: None)],
        "the schedule of learning_rate returned None: let it return a number": [
            lambda: updated(lowmem.flash_adamw(lambda count: None))],
        r"learning_rate must be a scalar, got an array of shape .*partition": [
            lambda: updated(lowmem.flash_adamw(jnp.full(64, 1e-3)))],  # it would broadcast
        CODEC: [
            lambda: compressed(mu=codecs.softsign), lambda: Storage(mu=8)],
        "Policy.mask is a tree of bools or .* got 'kernel': write exclude=..*kernel.*',.$": [
            lambda: Policy(mask="kernel")],
        r"policy takes a lowmem\.Policy": [lambda: Storage(policy=("*bias",))],
        "prepare must be a function of the parameters or None, got 3": [
            lambda: lowmem.value_and_grad(updated, 2, 3)],
        "seed must be an int, got 1.5": [lambda: Storage(seed=1.5)],
        r"storage takes a lowmem\.Storage, got \{'mu': None\}": [
            lambda: adamw(storage={"mu": None})],
        r"tuple of patterns, got the string '\*bias': write exclude=\('\*bias',\)": [
            lambda: Policy(exclude="*bias")],
        "tuple of patterns, got": [lambda: Policy(exclude=(1,))],
        "'block/kernel': weights must be stored in 'bfloat16', .* or 'float32', not": [
            lambda: lowmem.init(flash(), weights(), lambda path, leaf: jnp.int8),
            lambda: lowmem.init(flash(), weights(), lambda path, leaf: None)],
        "dtype of parameter 'block/kernel': .* not 'bf16'": [
            lambda: lowmem.init(flash(), weights(), "bf16")],
        "'block/kernel' is a ShapeDtypeStruct, .*: .* call this inside jax.eval_shape": [
            lambda: lowmem.init(flash(), SHAPES),
            lambda: TrainState.create(apply_fn=None, params=SHAPES, tx=flash())],
        STRUCTURE: [
            lambda: lowmem.adam_mini(1e-3, blocks={"heads": 4}),
            lambda: lowmem.flash_adam_mini(1e-3, blocks={"heads": 4}),
            lambda: lowmem.q_adam_mini(1e-3, blocks={"heads": 4}),
            lambda: lowmem.scale_by_adam_mini(blocks={"heads": 4})],
        "a (dict|list) is not an optax transformation.*: .*pass|one by one": [
            lambda: lowmem.init(weights(), flash()), lambda: lowmem.explain(weights(), flash()),
            lambda: lowmem.memory.report(weights(), flash()),
            lambda: lowmem.step(weights(), flash(), weights(), weights()),
            lambda: lowmem.chain([flash(), flash()])],
        "a .*State is an optimizer's state, not parameters: pass": [
            lambda: lowmem.init(flash(), flash().init(weights())),
            lambda: lowmem.explain(flash(), (flash().init(weights()), optax.EmptyState())),
            lambda: lowmem.memory.report(optax.adam(1e-3), flash().init(weights())),
            lambda: lowmem.checkpoint.metadata(flash(), flash().init(weights()))],
        r"is an optimizer's state: master_params\(params, state\)": [
            lambda: lowmem.master_params(flash().init(weights()), weights())],
        "a function is not an optax transformation.*such as optax.adam": [
            lambda: compressed_of(optax.adam), lambda: lowmem.compand_momentum(optax.adam),
            lambda: lowmem.split_master_weights(optax.adam),
            lambda: lowmem.accumulate_gradients(optax.adam, 2, into="bfloat16"),
            lambda: lowmem.gaussws_noise(optax.adam)],
        "a dict is not an optax transformation.*such as optax.adam": [
            lambda: lowmem.sqrt_variance_quant(weights()),
            lambda: lowmem.track_master_ema(weights(), 0.9),
            lambda: lowmem.update_clipping(weights(), b2=0.99, eps=1e-8)],
    },
}  # fmt: skip
compressed_of = functools.partial(lowmem.compress_state, **BOTH)
CALLS = [
    (kind, message, call)
    for kind, messages in ARGUMENTS.items()
    for message, calls in messages.items()
    for call in calls
]


def updated(tx):
    params = weights()
    return tx.update(grads_of(params), tx.init(params), params)


@pytest.mark.parametrize(("kind", "message", "call"), CALLS)
def test_arguments(kind, message, call):
    with raises(message, kind):
        call()


MISFITS = {  # a mask, and how the error describes it, in a line
    "missing": ({"block": True}, "it has no value for norm"),
    "unknown": ({"block": {"kernel": True, "bias": False}, "norm": True},
                "its block/bias is no parameter"),
    "renamed": ({"blok": True, "norm": True},
                "it has no value for block/kernel, and its blok is no parameter"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS.values(), ids=MISFITS)
def test_a_mask_that_does_not_fit_is_described_by_paths(case):
    mask, fault = case
    for make in (lambda: adamw(mask=mask), lambda: flash(policy=Policy(mask=mask))):
        with raises(f"does not fit the parameters .block/kernel, norm.: {fault}. Give") as error:
            make().init(weights())
        assert "\n" not in str(error.value)


def test_group_size_through_inject_hyperparams():
    def make(learning_rate, group_size):
        return lowmem.flash_adamw(learning_rate, storage=Storage(group_size=group_size))

    with raises("group_size must be an int known when tracing.*static_args", TypeError):
        optax.inject_hyperparams(make)(1e-3, 32).init(weights())
    remedy = lowmem.inject_hyperparams(make, static_args=("group_size",))(1e-3, 64)
    assert optax.tree.get(remedy.init(weights()), "mu_scale")["block"]["kernel"].shape == (64, 1)


INJECTED = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(lowmem.flash_adamw)(1e-3),
    "inject_hyperparams schedule": lambda: optax.inject_hyperparams(lowmem.flash_sgd)(
        optax.constant_schedule(1e-3)
    ),
    "a bf16 rate": lambda: lowmem.flash_adamw(jnp.bfloat16(1e-3)),
    "a schedule": lambda: lowmem.flash_adamw(lambda count: jnp.bfloat16(1e-3)),
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


OPTAXS_F32 = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)


@pytest.mark.parametrize("wrap", [OPTAXS_F32, lowmem.inject_hyperparams], ids=["optax", "ours"])
def test_hyperparameters_in_f32_pass(wrap):
    updates, _ = updated(wrap(lowmem.flash_adamw)(0.1))  # 1e-3 would only move the corrections
    assert all(bool(jnp.all(u < 0)) for u in jax.tree.leaves(updates))


UNSIGNED = r"negative values and '{}' is unsigned.*Use a signed codec.*codecs\.softsign\(\)"


@pytest.mark.parametrize("codec", [SQRT, codecs.linear(signed=False), "sqrt"], ids=str)
def test_unsigned_codec_for_a_signed_slot(codec):
    name = "sqrt-uint8" if isinstance(codec, str) else codec.name
    with raises("slot 'mu' has " + UNSIGNED.format(name)):
        Storage(mu=codec)
    adan = lowmem.compress_state(optax.adan(1e-3), v=codec)
    with raises(r"slot 'ScaleByAdanState\.v' has " + UNSIGNED.format(name)):
        adan.init(weights(jnp.float32))
    with raises(r"slot 'EmaState\.ema' has " + UNSIGNED.format(name)):
        lowmem.compand_momentum(0.9, codec=codec).init(weights(jnp.float32))


@pytest.mark.parametrize("mask", ["kernel", ("kernel", "scale"), {"block": "kernel"}], ids=str)
def test_a_mask_of_names_is_refused_with_one_that_works(mask):
    for make, name in (
        (lowmem.flash_adamw, "mask"),
        (lowmem.flash_muon, "weight_decay_mask"),
        (functools.partial(lowmem.flash_sgd, weight_decay=0.1), "mask"),
    ):
        with pytest.raises(TypeError, match="mask of weight decay is a tree of bools") as error:
            make(1e-3, **{name: mask})
        by_name = eval(str(error.value).split("such as ")[1], {"jax": jax})
        assert by_name(weights()) == {"block": {"kernel": True}, "norm": False}


def test_what_is_taken_all_the_same():
    """A list of patterns, a decay for an optimizer, and optax.MultiSteps, which is no tuple."""
    assert hash(Policy(exclude=["*bias"])) == hash(Policy(exclude=("*bias",)))
    params = weights(jnp.float32)
    for wrap in (lowmem.compand_momentum, lowmem.sqrt_variance_quant):
        assert wrap(0.9).init(params) and wrap(jnp.float32(0.9)).init(params)
    tx = lowmem.compand_momentum(optax.MultiSteps(optax.adam(1e-3), 2))
    mu = tx.init(params).inner_state.inner_opt_state[0].mu
    assert mu["block"]["kernel"].dtype == jnp.int8


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
    "fewer slots": (BOTH, {"mu": SOFTSIGN}, "has nu_scale.*without a codec here"),
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


def test_weights_cast_after_init():
    tx, params = flash(), weights(jnp.float32)
    cast = weights(jnp.bfloat16)
    with raises(r"correction of .* is int8\[\].*lowmem\.init\(tx, params_f32\)"):
        tx.update(cast, tx.init(params), cast)


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
