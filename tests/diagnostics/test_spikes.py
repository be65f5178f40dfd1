"""RMS_t, spikes and their prediction (StableAdamW, section 3.4 and appendix E), weight norms."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import Storage, codecs, diagnostics
from optax_lowmem._src.optim.step.storage import FLASH, completed
from tests.oracle import codecs as oracle_codecs
from tests.oracle.table import ORACLES
from tests.tiers import rows

B2, STEPS = 0.99, 12


# -- RMS_t ----------------------------------------------------------------------------------------


def stream(steps=STEPS):
    """Gradients of a stationary stream whose last one is ten times larger in one leaf."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        grads = {name: rng.normal(size=(64, 80)) * 1e-3 for name in ("embed", "block")}
        grads["bias"] = rng.normal(size=(80,)) * 1e-3
        if step == steps - 1:
            grads["embed"] *= 10
        yield {name: jnp.asarray(g, jnp.float32) for name, g in grads.items()}


def run(tx, dtype=jnp.float32):
    params = {"embed": jnp.ones((64, 80)), "block": jnp.ones((64, 80)), "bias": jnp.ones((80,))}
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    state, update = tx.init(params), jax.jit(tx.update)
    for grads in stream():
        _, state = update(grads, state, params)
    return grads, state


def exact(b2=B2, eps=1e-8):
    """RMS_t of the stream's last step in float64, with the debiased betas of Algorithm 2."""
    found = {}
    for name in ("embed", "block", "bias"):
        u = 0.0
        for t, grads in enumerate(stream(), start=1):
            g = np.asarray(grads[name], np.float64)
            beta = b2 * (1 - b2 ** (t - 1)) / (1 - b2**t)
            u = beta * u + (1 - beta) * g**2
        found[name] = math.sqrt(np.mean(g**2 / np.maximum(u, eps**2)))
    return found


F32 = {
    "optax.adamw": optax.adamw(1e-3, b2=B2),
    "optax.chain": optax.chain(optax.add_noise(0.0, 0.0, 0), optax.adam(1e-3, b2=B2)),
    "inject": optax.inject_hyperparams(optax.adamw)(1e-3, b2=B2),
    "flash f32": lowmem.flash_adamw(1e-3, b2=B2, storage=Storage.full_precision()),
}


@pytest.mark.parametrize("name", F32)
def test_rms_against_float64(name):
    grads, state = run(F32[name])
    for read in (diagnostics.rms, jax.jit(diagnostics.rms, static_argnames=("b2", "eps"))):
        found = read(grads, state, b2=B2, eps=1e-8)
        # f32 moments after 12 steps; 1 - b2^t of b2 = 0.99
        assert found == pytest.approx(exact(), rel=1e-5)
    assert found["embed"] > 2.3 > 1.5 > found["block"] > 0.8


def test_rms_maximum_of_appendix_f2():
    grads, state = run(F32["optax.adamw"])
    found = diagnostics.rms(grads, state, b2=B2, eps=1e-2)  # over every sqrt(u) here
    assert found == pytest.approx(exact(eps=1e-2), rel=1e-5)
    assert found["block"] == pytest.approx(0.1, rel=0.1)


def test_rms_of_debiased_moments():
    """At step 1 u is g^2 itself, so RMS_t is 1 whatever b2 is."""
    tx, params = optax.adamw(1e-3), {"w": jnp.ones((8,))}
    grads = {"w": jnp.arange(1.0, 9.0)}
    _, state = tx.update(grads, tx.init(params), params)
    assert diagnostics.rms(grads, state)["w"] == pytest.approx(1, rel=1e-6)
    assert diagnostics.rms(grads, state, b2=0.9)["w"] == pytest.approx(10, rel=1e-6)


CODED = {
    "sqrt": (lambda s: lowmem.flash_adamw(1e-3, b2=B2, storage=s), Storage(group_size=32)),
    "groups of 24": (lambda s: lowmem.flash_adamw(1e-3, b2=B2, storage=s), Storage(group_size=24)),
    "paper": (lambda s: lowmem.flash_adam(1e-3, b2=B2, storage=s), Storage.paper()),
    "linear": (
        lambda s: lowmem.flash_adamw(1e-3, b2=B2, storage=s),
        Storage(nu=codecs.linear(signed=False)),
    ),
    "4 bits": (
        lambda s: lowmem.flash_adamw(1e-3, b2=B2, storage=s),
        Storage(mu=codecs.linear4(), nu=codecs.linear4(signed=False)),
    ),
    "compress_state": (
        lambda s: lowmem.compress_state(optax.adamw(1e-3, b2=B2), nu=s.nu, mu=s.mu),
        FLASH,
    ),
    "chain": (
        lambda s: optax.chain(
            optax.masked(lowmem.scale_by_flash_adam(b2=B2, storage=s), {n: True for n in PATHS}),
            optax.scale(-1.0),
        ),
        Storage(),
    ),
}
PATHS = ("embed", "block", "bias")


def decoded(state, path, storage, length):
    """`nu` of a leaf, with a last axis of this length, in float64."""
    codes, scales = (np.asarray(optax.tree.get(state, field)[path]) for field in ("nu", "nu_scale"))
    storage = completed(storage)
    if not scales.ndim:
        return codes.astype(np.float64)
    codes = storage.nu.unpack(codes, length)
    grouped = oracle_codecs.group_view(codes, storage.group_size)
    values = oracle_codecs.decode(ORACLES[storage.nu.name], grouped, scales.astype(np.float64))
    return oracle_codecs.ungroup(values, length)


@pytest.mark.parametrize("name", rows(CODED, list(CODED)[1::2]))
def test_rms_of_codes(name):
    make, storage = CODED[name]
    grads, state = run(make(storage), jnp.float32 if name == "compress_state" else jnp.bfloat16)
    found = jax.jit(lambda g, s: diagnostics.rms(g, s, b2=B2, storage=storage))(grads, state)
    for path in PATHS:
        g = np.asarray(grads[path], np.float64)
        u = decoded(state, path, storage, g.shape[-1]) / (1 - B2**STEPS)
        assert found[path] == pytest.approx(
            math.sqrt(np.mean(g**2 / np.maximum(u, 1e-16))), rel=1e-5
        )
    if name not in ("linear", "4 bits"):  # whose zero codes are what the square root is for
        assert found["block"] == pytest.approx(exact()["block"], rel=0.02)


def test_rms_with_a_schedule_has_no_debiasing():
    schedule = lowmem.b2_schedule(0.8)
    tx = lowmem.flash_adamw(1e-3, b2=schedule, storage=Storage.full_precision())
    grads, state = run(tx)
    found = diagnostics.rms(grads, state, b2=schedule)
    for path in PATHS:
        ratio = np.asarray(grads[path], np.float64) ** 2 / np.asarray(state.nu[path], np.float64)
        assert found[path] == pytest.approx(math.sqrt(np.mean(ratio)), rel=1e-5)


def test_rms_of_chosen_leaves():
    grads, state = run(lowmem.flash_adamw(1e-3, b2=B2))
    every = diagnostics.rms(grads, state, b2=B2)
    assert list(every) == ["bias", "block", "embed"]
    some = diagnostics.rms(grads, state, b2=B2, leaves=("emb*", "b?as"))
    assert some == {"bias": every["bias"], "embed": every["embed"]}


def test_rms_of_a_sample():
    tx = lowmem.flash_adamw(1e-3, b2=B2)
    grads, state = run(tx)
    found = diagnostics.rms(grads, state, b2=B2, sample=1280)  # of 5120: every 4th row
    width = grads["embed"].shape[-1]
    u = decoded(state, "embed", Storage(), width)[::4] / (1 - B2**STEPS)
    wanted = math.sqrt(np.mean(np.asarray(grads["embed"], np.float64)[::4] ** 2 / u))
    assert found["embed"] == pytest.approx(wanted, rel=1e-5)
    assert found["bias"] == diagnostics.rms(grads, state, b2=B2)["bias"]
    one = diagnostics.rms(grads, state, b2=B2, sample=1)["embed"]
    assert bool(jnp.isfinite(one))


def test_rms_reads_chosen_leaves_only():
    """The compiled program takes only four arrays of the gradients and the state."""
    grads, state = run(lowmem.flash_adamw(1e-3, b2=B2))
    read = jax.jit(lambda g, s: diagnostics.rms(g, s, b2=B2, leaves=("embed",), sample=640))
    text = read.lower(grads, state).compile().as_text()
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", text).group(1)
    arrays = re.findall(r"(\w+\[[\d,]*\])", layout)
    assert sorted(arrays) == ["f32[64,3]", "f32[64,80]", "s32[]", "u8[64,80]"]


def test_rms_of_nan_gradients():
    grads, state = run(lowmem.flash_adamw(1e-3, b2=B2))
    grads["embed"] = grads["embed"].at[3, 3].set(jnp.nan)
    found = diagnostics.rms(grads, state, b2=B2)
    assert jnp.isnan(found["embed"])
    assert jnp.isfinite(found["block"])


def test_rms_misuse():
    grads, state = run(lowmem.flash_adamw(1e-3, b2=B2))
    with pytest.raises(TypeError, match=r"got the string 'embed': write leaves=\('embed',\)"):
        diagnostics.rms(grads, state, leaves="embed")
    with pytest.raises(ValueError, match="pattern 'conv1' of leaves matches no leaf; the nearest"):
        diagnostics.rms(grads, state, leaves=("embed", "conv1"))
    with pytest.raises(ValueError, match=r"b2 must be in \[0, 1\)"):
        diagnostics.rms(grads, state, b2=1.0)
    with pytest.raises(ValueError, match="eps must be at least 1e-18"):
        diagnostics.rms(grads, state, eps=0.0)
    with pytest.raises(ValueError, match="sample must be a number of elements, at least 1, got 0"):
        diagnostics.rms(grads, state, sample=0)
    with pytest.raises(TypeError, match="sample must be a number of elements, or None, got 0.5"):
        diagnostics.rms(grads, state, sample=0.5)
    with pytest.raises(ValueError, match="'block' has shape .64, 80., its gradient .64, 3."):
        diagnostics.rms({**grads, "block": jnp.ones((64, 3))}, state)
    lion = lowmem.flash_lion(1e-3).init(grads)
    with pytest.raises(ValueError, match="no second moment `nu`"):
        diagnostics.rms(grads, lion)
    with pytest.raises(ValueError, match="'bias' has two second moments"):
        diagnostics.rms(grads, (state, state))


@pytest.mark.parametrize("other", [Storage.paper(), Storage(group_size=16), Storage(nu=None)])
def test_rms_with_the_storage_of_another_optimizer(other):
    grads, state = run(lowmem.flash_adamw(1e-3, b2=B2))
    with pytest.raises(
        ValueError, match="moment of 'block' is stored as uint8.*optimizer.s storage="
    ):
        diagnostics.rms(grads, state, b2=B2, storage=other)


# -- spikes ---------------------------------------------------------------------------------------


def quiet(steps=4000, seed=0):
    """A falling loss with noise, and an RMS about 1."""
    rng = np.random.default_rng(seed)
    t = np.arange(steps)
    noise = rng.uniform(-1, 1, size=steps)  # bounded by sqrt(3) deviations: never a deviation
    losses = 2 + 8 * np.exp(-t / 1500) + 0.05 * noise
    return losses, 1 + 0.2 * rng.uniform(-1, 1, size=steps)


def spiked():
    losses, rms = quiet()
    losses[[500, 502]] += 3  # in the ignored steps
    losses[1300] += 3  # alone
    losses[[1500, 1509]] += 3  # two within 10
    losses[[1700, 1710]] += 3  # 10 apart: not within 10
    losses[2000:2014] += 3 + np.arange(14)  # 14 long: two intervals
    losses[[2500, 2503]] += 3
    losses[[3000, 3001]] += 3
    rms[[999, 1000, 1009, 1010]] = 2.3  # 1000 counts, 1009 is the same, 1010 is the next
    rms[[1499, 1990, 1992, 2001, 2009, 2491, 3000]] = 4.0
    return losses, rms


LOSS_SPIKES = [1500, 2000, 2010, 2500, 3000]
# 1992 is 1990's, 2001 starts one (which 2009 is of)
RMS_SPIKES = [1000, 1010, 1499, 1990, 2001, 2491, 3000]
FOLLOWS = [True, False, False, False, False]  # by 1; 10; 9; 9; 0


def test_known_spikes():
    losses, rms = quiet()
    assert diagnostics.loss_spikes(losses).tolist() == []
    assert diagnostics.rms_spikes(rms).tolist() == []
    losses, rms = spiked()
    assert diagnostics.loss_spikes(losses).tolist() == LOSS_SPIKES
    assert diagnostics.rms_spikes(rms).tolist() == RMS_SPIKES
    found = diagnostics.predicted(LOSS_SPIKES, RMS_SPIKES, len(losses))
    assert found.follows.tolist() == FOLLOWS
    assert found.share == 0.2


@pytest.mark.parametrize("lag", range(11))
def test_prediction_is_1_to_8_steps_ahead(lag):
    assert diagnostics.predicted([2000 + lag], [2000], 3000).follows.tolist() == [1 <= lag <= 8]


def test_the_threshold_of_deviations():
    """Against weights written out: 1/n up to 100 losses, then 0.99 of what came before."""
    losses, _ = quiet(1400)
    weights = np.full(100, 0.01)
    for _ in range(100, 1200):
        weights = np.append(weights * 0.99, 0.01)
    mean = weights @ losses[:1200]
    deviation = math.sqrt(weights @ (losses[:1200] - mean) ** 2)
    assert weights.sum() == pytest.approx(1)
    for factor, spikes in ((3.19, []), (3.21, [1200])):
        series = losses.copy()
        series[1200] = mean + factor * deviation
        series[1203] = 50.0
        found = diagnostics.loss_spikes(series).tolist()
        assert found == spikes  # 1203 alone is none


def test_keywords_change_the_heuristics():
    losses, rms = spiked()
    assert diagnostics.loss_spikes(losses, ignore=400).tolist() == [500, *LOSS_SPIKES]
    assert 1300 in diagnostics.loss_spikes(losses, least=1)
    assert 1700 in diagnostics.loss_spikes(losses, interval=11)
    assert diagnostics.loss_spikes(losses, deviations=1e4).tolist() == []
    assert diagnostics.rms_spikes(rms, threshold=3.9).tolist() == RMS_SPIKES[2:]
    assert 999 in diagnostics.rms_spikes(rms, ignore=0)
    assert 1992 in diagnostics.rms_spikes(rms, interval=1)
    late = diagnostics.predicted(LOSS_SPIKES, RMS_SPIKES, 4000, lead=10)
    assert late.follows.tolist() == [True, True, True, True, False]


def test_non_finite_values_are_spikes():
    losses, rms = quiet()
    losses[[2000, 2001]] = [np.nan, np.inf]
    losses[[3000, 3001]] += 3  # the statistics have survived
    rms[1998] = np.nan
    assert diagnostics.loss_spikes(losses).tolist() == [2000, 3000]
    assert diagnostics.rms_spikes(rms).tolist() == [1998]
    assert online(losses, rms)[0] == [2000, 3000]


def test_chance():
    """The paper's share of steps, and a binomial tail written out."""
    found = diagnostics.predicted([1502, 1509, 3000], [1500, 2000, 3998], 4000)
    assert found.chance == (8 + 8 + 1) / 3000  # the last one's steps end with the run
    assert found.flagged == 3 / 3000
    p = found.chance
    assert found.p_value == pytest.approx(1 - (1 - p) ** 3)
    two = diagnostics.predicted([1502, 2004, 3000], [1500, 2000, 3998], 4000)
    assert two.p_value == pytest.approx(3 * p**2 * (1 - p) + p**3)
    assert two.scalars() == {
        "loss_spikes": 3, "predicted": 2, "share": 2 / 3, "flagged": 1e-3, "chance": p,
        "p_value": two.p_value,
    }  # fmt: skip


def test_chance_at_its_ends():
    none = diagnostics.predicted([], [1500], 4000)
    assert math.isnan(none.share)
    assert none.p_value == 1
    assert diagnostics.predicted([1500], [], 4000).p_value == 1
    always = diagnostics.predicted([1500], range(0, 4000), 4000, ignore=0, lead=8)
    assert always.p_value == pytest.approx(1, abs=1e-3)
    many = diagnostics.predicted(np.arange(1001, 3901), [1000], 4000)
    assert 0 < many.p_value <= 1  # factorials of 2900


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: diagnostics.loss_spikes([[1.0]]), "losses must be one value per step.*shape"),
        (lambda: diagnostics.rms_spikes(np.ones((2, 2))), "rms must be one value per step"),
        (lambda: diagnostics.loss_spikes([1.0], decay=1.0), r"decay must be in \[0, 1\)"),
        (
            lambda: diagnostics.loss_spikes([1.0], least=0),
            "least must be a number of steps, at least 1",
        ),
        (lambda: diagnostics.rms_spikes([1.0], interval=0), "interval must be a number of steps"),
        (lambda: diagnostics.rms_spikes([1.0], ignore=-1), "ignore must be a number of steps"),
        (lambda: diagnostics.predicted([1], [], 900), "none left after ignore=1000"),
        (lambda: diagnostics.predicted([900], [], 2000), r"losses must be steps in \[1000, 2000\)"),
        (lambda: diagnostics.predicted([], [2000], 2000), "rms must be steps in"),
        (lambda: diagnostics.predicted([], [], 2000, lead=0), "lead must be a number of steps"),
        (lambda: diagnostics.SpikeDetector(lead=0), "lead must be a number of steps"),
        (lambda: diagnostics.SpikeDetector(interval=1.5), "interval must be a number of steps"),
    ],
)
def test_spike_misuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- the online detector --------------------------------------------------------------------------


def online(losses, rms, **constants):
    """(loss spikes, RMS spikes, follows) of a detector under scan."""
    detector = diagnostics.SpikeDetector(**constants)

    def body(state, row):
        return detector.update(state, *row)

    rows = (jnp.asarray(losses, jnp.float32), jnp.asarray(rms, jnp.float32))
    _, flags = jax.jit(lambda rows: jax.lax.scan(body, detector.init(), rows))(rows)
    flags = {name: np.asarray(values) for name, values in flags.items()}
    known = flags["loss_spike"]
    assert set(flags["loss_spike_start"][~known]) <= {-1}
    assert not flags["predicted"][~known].any()
    return (
        flags["loss_spike_start"][known].tolist(),
        np.flatnonzero(flags["rms_spike"]).tolist(),
        flags["predicted"][known].tolist(),
    )


def test_online_finds_the_known_spikes():
    assert online(*spiked()) == (LOSS_SPIKES, RMS_SPIKES, FOLLOWS)


@pytest.mark.parametrize("seed", range(4))
def test_online_is_offline(seed):
    """On series whose deviations and RMS spikes fall in bursts, close to each other."""
    rng = np.random.default_rng(seed)
    losses, rms = quiet(3000, seed)
    for start in rng.integers(0, 2980, 60):
        losses[start : start + 14] += 3 * rng.integers(0, 2, 14)
        rms[start - rng.integers(0, 12)] = 4.0
    losses, rms = losses.astype(np.float32), rms.astype(np.float32)
    constants = {"ignore": 100, "interval": 5 + seed, "least": 1 + seed % 3}
    spikes = diagnostics.loss_spikes(losses, **constants)
    rms_constants = {"ignore": 100, "interval": 5 + seed}
    rms_found = diagnostics.rms_spikes(rms, **rms_constants)
    follows = diagnostics.predicted(spikes, rms_found, 3000, ignore=100).follows
    assert len(spikes) >= 5
    assert 0 < follows.sum() < len(spikes)
    found = online(losses, rms, **constants)
    assert found == (spikes.tolist(), rms_found.tolist(), follows.tolist())


def test_the_detector_keeps_its_types():
    detector = diagnostics.SpikeDetector()
    state = detector.init()
    new, flags = detector.update(state, jnp.bfloat16(2.0), jnp.float16(1.0))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), new) == jax.tree.map(
        lambda a: (a.shape, a.dtype), state
    )
    assert sum(a.nbytes for a in state) == 29
    assert all(jnp.shape(flag) == () for flag in flags.values())


# -- weight norms ---------------------------------------------------------------------------------


def test_norms_are_of_the_master_weights():
    rng = np.random.default_rng(0)
    params = {"a": {"w": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)}, "b": jnp.zeros(8)}
    weights, state = lowmem.init(lowmem.flash_adamw(1e-3), params)
    exact_norm = float(np.linalg.norm(np.asarray(params["a"]["w"], np.float64)))
    read = jax.jit(diagnostics.norms)
    assert read(weights, state) == {"a/w": pytest.approx(exact_norm, rel=2e-6), "b": 0.0}
    rounded = float(np.linalg.norm(np.asarray(weights["a"]["w"], np.float64)))
    assert abs(rounded / exact_norm - 1) > 1e-5
    assert diagnostics.norms(weights)["a/w"] == pytest.approx(rounded, rel=2e-6)
    assert list(diagnostics.norms(weights, state, leaves=("a/*",))) == ["a/w"]


def test_norm_misuse():
    with pytest.raises(ValueError, match="the pattern 'x' of leaves matches no leaf; .*: a$"):
        diagnostics.norms({"a": jnp.ones(2)}, leaves=("x",))
