"""Paper-exact storage against flashoptim's own kernels, recorded on a GPU (golden/flashoptim.npz).

Its arithmetic is fused (fma) and approximate (division within 2 ulp), so a value next to a rounding
boundary may fall on the other side: at most one code, in at most 0.1 % of elements.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem import codecs
from optax_lowmem._src.optim.optimizers import adam, lion, sgd
from tests import tolerances as tol

GOLDEN = dict(np.load(Path(__file__).parent / "flashoptim.npz"))
META = json.loads(str(GOLDEN.pop("meta")))
CASES = sorted({key.split(".")[1] for key in GOLDEN if key.startswith("quant.")})
CODECS = {"mu": codecs.softsign_paper(), "nu": codecs.sqrt_paper()}
STORAGE = lowmem.Storage.paper(policy=lowmem.Policy(min_size=0))
STEPS = 5


def hyperparameters(name, *names):
    return [META["hyperparameters"][name][key] for key in names]


def _adamw():
    lr, (b1, b2), eps, decay = hyperparameters("adamw", "lr", "betas", "eps", "weight_decay")
    return lowmem.flash_adamw(lr, b1, b2, eps, weight_decay=decay, storage=STORAGE)


def _lion():
    lr, (b1, b2), decay = hyperparameters("lion", "lr", "betas", "weight_decay")
    return lowmem.flash_lion(lr, b1, b2, weight_decay=decay, storage=STORAGE)


def _sgd(name):
    lr, momentum, decay = hyperparameters(name, "lr", "momentum", "weight_decay")
    nesterov = name == "sgd_nesterov"
    return lowmem.flash_sgd(lr, momentum, nesterov, weight_decay=decay, storage=STORAGE)


OPTIMIZERS = {
    "adamw": (_adamw, adam.FlashAdamState, ("mu", "nu")),
    "lion": (_lion, lion.FlashLionState, ("mu",)),
    "sgd": (functools.partial(_sgd, "sgd"), sgd.FlashSgdState, ("mu",)),
    "sgd_nesterov": (functools.partial(_sgd, "sgd_nesterov"), sgd.FlashSgdState, ("mu",)),
}


def differing(ours, golden):
    """Return the mask of differing integers; assert that none differs by more than one unit."""
    off = np.abs(np.int32(ours) - np.int32(golden)).ravel()
    assert off.max() <= 1
    return off != 0


def check_codes(pairs):
    """At most one unit, in at most 0.1 % of the elements of all pairs."""
    off = np.concatenate([differing(*pair) for pair in pairs])
    assert off.mean() <= tol.GOLDEN_SHARE, f"{off.sum()} of {off.size} differ"


def test_provenance():
    assert META["versions"]["flashoptim"] == "0.1.4" and META["settings"]["group_size"] == 32
    assert set(META["hyperparameters"]) == set(OPTIMIZERS)


@pytest.mark.parametrize("slot", CODECS)
def test_quantize(slot):
    codec, pairs = CODECS[slot], []
    for case in CASES:
        x = GOLDEN[f"quant.{case}.x"]
        x = x if slot == "mu" else x * x
        codes, scales = jax.jit(functools.partial(codecs.encode_array, codec, group_size=32))(x)
        want = GOLDEN[f"quant.{case}.{slot}_scales"]
        np.testing.assert_array_equal(np.asarray(scales).view(np.uint16), want.view(np.uint16))
        assert not np.asarray(codes)[x == 0].any()
        pairs.append((codes, GOLDEN[f"quant.{case}.{slot}_codes"]))
        assert codes.dtype == pairs[-1][1].dtype
    check_codes(pairs)


@pytest.mark.parametrize("slot", CODECS)
@pytest.mark.parametrize("case", CASES)
def test_dequantize(case, slot):
    codes, scales, want = (
        GOLDEN[f"quant.{case}.{slot}_{k}"] for k in ("codes", "scales", "decoded")
    )
    back = jax.jit(lambda c, s: codecs.decode_array(CODECS[slot], c, s, 32))(codes, scales)
    np.testing.assert_allclose(back, want, rtol=tol.GOLDEN_DECODE)  # inf and NaN where they have


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("kind,dtype", [("bf16", jnp.bfloat16), ("fp16", jnp.float16)])
def test_error_bits(kind, dtype, width):
    split, x = codecs.SPLITS[f"ulp-{16 + width}"], GOLDEN["ecc.x"]
    p, c = jax.jit(split.split, static_argnums=1)(x, dtype)
    np.testing.assert_array_equal(np.asarray(p).view(np.uint16), GOLDEN[f"ecc.{kind}.narrow"])
    error = GOLDEN[f"ecc.{kind}.error{width}"]
    check_codes([(np.int32(c) - split.zero, error)])
    stored = jnp.asarray(np.int32(error) + split.zero, split.dtype)
    joined = jax.jit(split.join)(p, stored)
    np.testing.assert_allclose(joined, GOLDEN[f"ecc.{kind}.joined{width}"], rtol=2.0**-23)


def bf16(bits):
    return jax.lax.bitcast_convert_type(jnp.asarray(bits, jnp.uint16), jnp.bfloat16)


def golden_state(name, t):
    """Weight and our state from the recorded row t."""
    _, state_type, slots = OPTIMIZERS[name]
    fields = {"count": jnp.int32(t), "seed": jnp.uint32(0)}
    for slot in slots:
        fields[slot] = jnp.asarray(GOLDEN[f"opt.{name}.{slot}_codes"][t])
        fields[slot + "_scale"] = jnp.asarray(GOLDEN[f"opt.{name}.{slot}_scales"][t])
    error = np.int32(GOLDEN[f"opt.{name}.error"][t]) + 128
    fields["correction"] = jnp.asarray(error, jnp.uint8)
    return bf16(GOLDEN[f"opt.{name}.weight"][t]), state_type(**fields)


def masters(name, t):
    weight, state = golden_state(name, t)
    return np.float64(lowmem.master_params(weight, state))


@functools.cache
def stepper(name):
    tx = OPTIMIZERS[name][0]()

    @jax.jit
    def step(weight, state, gradient):
        updates, state = tx.update(gradient, state, weight)
        return optax.apply_updates(weight, updates), state

    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_initial_state(name):
    """lowmem.init of the recorded f32 weights is row 0."""
    tx = OPTIMIZERS[name][0]()
    weight, state = lowmem.init(tx, jnp.asarray(GOLDEN["opt.w0"]), jnp.bfloat16)
    want, golden = golden_state(name, 0)
    np.testing.assert_array_equal(np.asarray(weight), np.asarray(want))
    check_codes([(state.correction, golden.correction)])
    for slot in OPTIMIZERS[name][2]:
        for field in (slot, slot + "_scale"):
            np.testing.assert_array_equal(getattr(state, field), getattr(golden, field))


@functools.cache
def stepped(name, t):
    """Weight and state after step t from the recorded state before it."""
    before, state = golden_state(name, t - 1)
    return stepper(name)(before, state, bf16(GOLDEN["opt.grads"][t - 1]))


@functools.cache
def decided(name, t):
    """Return the mask of elements whose sign is certain: all but Lion's sums that cancel."""
    _, state = golden_state(name, t - 1)
    if name != "lion":
        return np.ones(state.mu.shape, bool)
    b1, _ = hyperparameters("lion", "betas")[0]
    mu = np.float64(codecs.decode_array(CODECS["mu"], state.mu, state.mu_scale, 32))
    kept, new = b1 * mu, (1 - b1) * np.float64(np.float32(bf16(GOLDEN["opt.grads"][t - 1])))
    return np.abs(kept + new) > tol.GOLDEN_CANCELS * (np.abs(kept) + np.abs(new))


def test_few_signs_are_undecided():
    assert np.mean([decided("lion", t) for t in range(1, STEPS + 1)]) > 0.95


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_reproduce_weights_and_codes(name):
    """Five steps, each from its recorded state."""
    pairs = [(stepped(name, t), golden_state(name, t)) for t in range(1, STEPS + 1)]
    clear = [decided(name, t) for t in range(1, STEPS + 1)]
    weights = [
        (np.asarray(w).view(np.int16)[c], np.asarray(v).view(np.int16)[c])
        for ((w, _), (v, _)), c in zip(pairs, clear, strict=True)
    ]
    check_codes(weights)
    for slot in OPTIMIZERS[name][2]:
        check_codes([(getattr(s, slot), getattr(g, slot)) for (_, s), (_, g) in pairs])
        scales = [[np.asarray(getattr(x, slot + "_scale")).view(np.int16) for x in (s, g)]
                  for (_, s), (_, g) in pairs]  # fmt: skip
        off = np.concatenate([differing(*pair) for pair in scales])
        assert off.mean() <= tol.GOLDEN_SCALE_SHARE


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_reproduce_master_weights(name):
    """Error bits on the joined masters: where a step cancels w, they are open."""
    off = []
    for t in range(1, STEPS + 1):
        weight, state = stepped(name, t)
        golden, old, new = golden_state(name, t), masters(name, t - 1), masters(name, t)
        w = np.float64(lowmem.master_params(weight, state))
        _, exponent = np.frexp(np.float64(np.float32(golden[0])))
        half_ulp = 2.0 ** (np.maximum(exponent - 1, -126) - 8)
        allowed = tol.GOLDEN_ERROR_BIT * half_ulp / 127 + 2.0**-23 * np.abs(old)
        near = np.abs(w - new) <= allowed + tol.GOLDEN_STEP * np.abs(new - old)
        assert near[decided(name, t)].all()
        off.append(np.int32(state.correction) != np.int32(golden[1].correction))
    assert np.mean(off) <= (tol.GOLDEN_ERROR_SHARE if name == "adamw" else tol.GOLDEN_SHARE * 5)
