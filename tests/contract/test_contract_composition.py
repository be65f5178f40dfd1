"""The flash optimizers are the composition of the named transformations, and follow f32 optax."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests.compilation import FULL_COMPILE
from tests.contract_cases import RULES, changes, cosine
from tests.tiers import rows
from tests.tolerances import (
    COMPOSITION_SHARE,
    COSINE_200,
    COSINE_6000,
    REORDERED_SLOT,
    STEP_ROUNDING,
)

LR, DECAY, STEPS = 1e-3, 0.1, 50
POLICY = lowmem.Policy(min_size=64)
KINDS = [
    (jnp.bfloat16, 24, "stochastic"),
    (jnp.bfloat16, 24, "nearest"),
    (jnp.bfloat16, 32, "nearest"),
    (jnp.float16, 24, "nearest"),
    (jnp.float32, 24, "stochastic"),
    (jnp.float32, 24, "nearest"),
]


def _tree(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {"w": (16, 260), "b": (33, 3, 1), "norm": (5,)}
    return {k: jnp.asarray(rng.normal(0, 0.3, s), jnp.float32) for k, s in shapes.items()}


def _gradients(params: dict, step: int) -> dict:
    rng = np.random.default_rng(100 + step)
    size = 10.0 ** rng.uniform(-2, 0)
    return jax.tree.map(lambda p: jnp.float32(size * rng.normal(0.2, 1, p.shape)), params)


def _end() -> tuple:
    return optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(LR)


CHAINS = (
    "flash_adamw",
    "flash_lion",
    "flash_sgd",
    "coat_adamw",
    "q_adam_mini",
    "stable_adamw",
    "flash_adam",
    "adam_mini",
    "q_adamw",
    "flash_adam_mini",
    "flash_factored_adamw",
)
HEADS = lowmem.blocks.Structure(
    rules=(("w", lowmem.blocks.Block(axes=(0,), heads=(1, 4))),), default="whole"
)

FACTORED = {"min_dim_size_to_factor": 8}


def _storage(name: str, bits: int, rounding: str) -> lowmem.Storage:
    """The optimizer's own storage, for small leaves."""
    own = getattr(lowmem, name)(LR).engine.storage
    return dataclasses.replace(own, master_weight_bits=bits, rounding=rounding, policy=POLICY)


def _composed(name: str, storage: lowmem.Storage) -> optax.GradientTransformationExtraArgs:
    how: dict[str, Any] = {
        "group_size": storage.group_size, "rounding": storage.rounding, "policy": storage.policy
    }  # fmt: skip
    momentum = functools.partial(lowmem.compand_momentum, codec=storage.mu, **how)
    variance = functools.partial(lowmem.sqrt_variance_quant, codec=storage.nu, **how)
    links: tuple = _end()
    if name == "flash_lion":
        first = momentum(optax.scale_by_lion())
    elif name == "flash_sgd":
        first = momentum(optax.trace(0.9))
    elif name == "stable_adamw":
        adamw = optax.chain(optax.scale_by_adam(b2=0.99, eps=1e-6), *links)
        first = momentum(variance(lowmem.update_clipping(adamw, b2=0.99, eps=1e-6)))
        links = ()
    elif name.endswith("adam_mini"):
        first = lowmem.scale_by_adam_mini(blocks=HEADS)
        first = first if storage.mu is None else momentum(first)
        first = first if storage.nu is None else variance(first)
    elif name == "flash_factored_adamw":
        first = momentum(lowmem.scale_by_factored_adam(**FACTORED))
    else:
        first = momentum(variance(optax.scale_by_adam()))
    links = links[1:] if name == "flash_adam" else links
    return lowmem.split_master_weights(
        optax.chain(first, *links), storage.master_weight_bits, group_size=storage.group_size
    )


def _direction(name: str, storage: lowmem.Storage) -> optax.GradientTransformationExtraArgs:
    more = {"blocks": HEADS} if name == "flash_adam_mini" else {}
    return lowmem.OPTIMIZERS[name].scale_by(**more, storage=storage)


def _fused(name: str, storage: lowmem.Storage) -> optax.GradientTransformationExtraArgs:
    options: dict[str, Any] = {} if name == "flash_adam" else {"weight_decay": DECAY}
    if name == "flash_sgd":
        options |= {"momentum": 0.9, "decoupled": True}
    if name.endswith("adam_mini"):
        options["blocks"] = HEADS
    if name == "flash_factored_adamw":
        options |= FACTORED
    return getattr(lowmem, name)(LR, storage=storage, **options)


def _onto_composed(fused: Any, like: Any) -> Any:
    """A fused state as the state of the composition: the same codes, scales and corrections."""
    if type(like) is tuple:
        return tuple(_onto_composed(fused, part) for part in like)
    names = {"trace": "mu"}
    fields = {}
    for field in getattr(like, "_fields", ()):
        if field == "inner_state":
            fields[field] = _onto_composed(fused, like.inner_state)
        elif field == "scales":
            fields[field] = {
                key: fused.nu_scale if key == "nu_scale" else fused.mu_scale for key in like.scales
            }
        elif field in ("count", "seed", "correction", "mu", "nu", "trace"):
            fields[field] = getattr(fused, names.get(field, field))
    if isinstance(like, type(fused)):  # of a direction: no correction, and scales are outside
        fields["correction"] = None
    return like._replace(**fields) if fields else like


def _slots(state: Any) -> dict[str, tuple[Any, Any]]:
    """Slot -> (codes, scales) trees, of a state of either form."""
    found: dict[str, Any] = {}

    def visit(node: Any) -> None:
        if type(node) is tuple:
            for part in node:
                visit(part)
        for field in getattr(node, "_fields", ()):
            value = getattr(node, field)
            if field == "inner_state":
                visit(value)
            elif field == "scales":  # after what is inside, whose scales are placeholders
                for key, scales in value.items():
                    found[key.replace("trace", "mu")] = scales
            elif field in ("mu", "nu", "trace", "mu_scale", "nu_scale"):
                found.setdefault(field.replace("trace", "mu"), value)

    visit(state)
    return {name: (found[name], found[f"{name}_scale"]) for name in ("mu", "nu") if name in found}


class _Shares:
    """Counts units that differ over all steps."""

    def __init__(self) -> None:
        self.differing = self.total = 0

    def add(self, one: Any, other: Any, close: Any = False) -> None:
        """Codes, or master weights in units of their last kept bit: at most one apart, or close."""
        gap = np.abs(np.asarray(one, np.int64) - np.asarray(other, np.int64))
        assert np.all((gap <= 1) | close)
        self.differing += int((gap > 0).sum())
        self.total += gap.size

    def check(self) -> None:
        assert self.total > 0
        assert self.differing <= COMPOSITION_SHARE * self.total, self.differing / self.total


def _master_units(p: jax.Array, correction: jax.Array) -> np.ndarray:
    """bf16 weight and int8 correction as one integer, so that a carry between them is one unit."""
    weight = np.asarray(p).view(np.int16).astype(np.int64) & 0x7FFF
    return (weight << 8) + np.asarray(correction, np.int64)


def _steps(*transformations: Any) -> list[Any]:
    return [jax.jit(functools.partial(lowmem.step, tx)) for tx in transformations]


def _parts(scales: jax.Array, codec: Any) -> list[np.ndarray]:
    """Stored scales as integers of which neighbours are one unit apart."""
    bits = np.asarray(scales).astype(np.int64)
    if scales.dtype == jnp.uint16:  # mantissa bits
        return [bits]
    low = int(re.search(r"\d+$", codec.scale.name)[0])  # two numbers in one word
    return [bits >> low, bits & ((1 << low) - 1)]


def _same_sum(storage: lowmem.Storage, slot: str, codes: Any, scales: Any) -> Any:
    """Return whether decoded values are as close as the f32 sums that they are of.

    Where m = b1 m + (1-b1) g cancels its relative error is of any size, and an expanded group of
    one value has 4095 times the octaves: several codes.
    """
    if np.abs(np.subtract(*(np.asarray(c, np.int64) for c in codes))).max() <= 1:
        return False
    decode = functools.partial(lowmem.codecs.decode_array, getattr(storage, slot))
    one, two = (decode(c, s, storage.group_size) for c, s in zip(codes, scales, strict=True))
    return np.abs(one - two) <= REORDERED_SLOT * np.abs(one).max()


def _teacher_forced(dtype: Any, storage: lowmem.Storage, fused: Any, other: Any) -> None:
    params, state = lowmem.init(fused, _tree(), dtype)
    like = lowmem.init(other, _tree(), dtype)[1]
    step, step_other = _steps(fused, other)
    codes, weights, words = _Shares(), _Shares(), _Shares()
    for index in range(STEPS):
        grads = _gradients(params, index)
        theirs, their_state = step_other(grads, _onto_composed(state, like), params)
        params, state = step(grads, state, params)
        own, composed = _slots(state), _slots(their_state)
        assert own.keys() == composed.keys()
        for slot, (a, a_scale) in own.items():
            b, b_scale = composed[slot]
            for key, code in a.items():
                if a_scale[key].ndim:
                    scales = a_scale[key], b_scale[key]
                    codes.add(code, b[key], _same_sum(storage, slot, (code, b[key]), scales))
                    if scales[0].dtype == jnp.float32:
                        np.testing.assert_allclose(*scales, rtol=1e-6)
                    else:
                        parts = (_parts(one, getattr(storage, slot)) for one in scales)
                        gaps = [np.abs(one - two) for one, two in zip(*parts, strict=True)]
                        if len(gaps) == 1:
                            assert gaps[0].max() <= 1
                        else:
                            words.add(np.maximum(*gaps) > 1, 0)
                else:
                    np.testing.assert_allclose(code, b[key], rtol=2e-6, atol=1e-12)
        masters = lowmem.master_params(params, state)
        their_masters = lowmem.master_params(theirs, their_state)
        for key, p in params.items():
            assert p.dtype == theirs[key].dtype
            if p.dtype == jnp.float32:
                np.testing.assert_allclose(p, theirs[key], rtol=1e-6, atol=STEP_ROUNDING)
            elif state.correction[key].dtype == jnp.int8:
                one = _master_units(p, state.correction[key])
                other = _master_units(theirs[key], their_state.correction[key])
                # next to zero a unit is finer than the f32 rounding of the step that led there
                weights.add(one, other, np.abs(masters[key] - their_masters[key]) < STEP_ROUNDING)
            else:  # these resolve f32's own rounding: one unit of fp16's 24 bits is 2^-11 / 127
                unit = 4e-6 if p.dtype == jnp.float16 else 1e-6
                np.testing.assert_allclose(
                    masters[key], their_masters[key], rtol=unit, atol=STEP_ROUNDING
                )
    if storage.mu is not None:
        codes.check()
    for shares in (weights, words):
        if shares.total:
            shares.check()


# The default tier has each kind once, with the first chains; the full one each kind with every
# rule, and in turn with the chains that differ from one in their codecs.
ONCE = [*zip(KINDS, CHAINS, strict=False)]
OFTEN = [(kind, name) for kind in KINDS for name in CHAINS if name in RULES]
IN_TURN = [(KINDS[i % len(KINDS)], name) for i, name in enumerate(CHAINS)]


@pytest.mark.parametrize("kind, name", rows(dict.fromkeys([*OFTEN, *IN_TURN]), ONCE))
def test_is_the_composition(kind, name):
    dtype, bits, rounding = kind
    storage = _storage(name, bits, rounding)
    _teacher_forced(dtype, storage, _fused(name, storage), _composed(name, storage))


def test_every_optimizer_has_its_chain():
    # but for Muon's, whose iterations enlarge what two ways of rounding differ by
    assert {*lowmem.OPTIMIZERS, "adam_mini"} - {"flash_muon"} == set(CHAINS)


@pytest.mark.full
def test_is_the_composition_with_8_bit_moments_of_blocks():
    """Q-Adam-mini's Case 1: the groups of v are along all its values."""
    storage = dataclasses.replace(
        _storage("q_adam_mini", 24, "stochastic"), nu=lowmem.codecs.linear(signed=False)
    )
    fused, composed = _fused("q_adam_mini", storage), _composed("q_adam_mini", storage)
    _teacher_forced(jnp.bfloat16, storage, fused, composed)


@pytest.mark.parametrize(
    "name", rows(["flash_adamw", "flash_lion", "flash_sgd", "flash_adam_mini"], ["flash_lion"])
)
def test_is_the_chain_of_its_own_direction(name):
    storage = _storage(name, 24, "stochastic")
    bare = _direction(name, storage)
    other = lowmem.split_master_weights(optax.chain(bare, *_end()))
    fused = _fused(name, storage)
    params, state = lowmem.init(fused, _tree())
    like = lowmem.init(other, _tree())[1]
    step, step_other = _steps(fused, other)
    codes = _Shares()
    for index in range(10):
        grads = _gradients(params, index)
        bare_state = state._replace(correction=None)
        forced = like._replace(
            count=state.count, correction=state.correction,
            inner_state=(bare_state, *like.inner_state[1:]),
        )  # fmt: skip
        _, theirs = step_other(grads, forced, params)
        params, state = step(grads, state, params)
        own, composed = _slots(state), _slots(theirs)
        for slot, (a, a_scale) in own.items():
            for key, code in a.items():
                if a_scale[key].ndim:
                    codes.add(code, composed[slot][0][key])
                else:
                    np.testing.assert_allclose(code, composed[slot][0][key], rtol=2e-6, atol=1e-12)
    codes.check()


def _stream_changes(tx: Any, plain: Any, steps: int, size: int) -> float:
    """Cosine of the total changes under one stream of gradients made on the fly."""
    rng = np.random.default_rng(0)
    start = {"w": jnp.asarray(rng.normal(0, 0.05, (size // 250, 250)), jnp.float32)}
    steady = {"w": jnp.asarray(rng.normal(0, 1, start["w"].shape), jnp.float32)}
    rows, cells = rng.normal(0, 1, (size // 250, 1)), rng.normal(0, 0.3, start["w"].shape)
    sizes = jnp.asarray(np.exp(rows + cells), jnp.float32)

    def run(tx: Any, params: Any, state: Any) -> tuple[Any, Any]:
        def body(carry: Any, index: jax.Array) -> tuple[Any, None]:
            params, state = carry
            # independent of the parameters, cheap to make: a noise that turns with the step
            angle = steady["w"] * 1e3 + index.astype(jnp.float32) * (1 + jnp.abs(steady["w"]))
            noise = 1.5 * jnp.sin(angle * 2.4)
            grads = {"w": (0.3 * steady["w"] + noise) * sizes}
            return lowmem.step(tx, grads, state, params), None

        scan = lambda c: jax.lax.scan(body, c, jnp.arange(steps))[0]  # noqa: E731
        # thousands of steps take longer than LLVM's passes
        return jax.jit(scan, compiler_options=FULL_COMPILE)((params, state))

    params, state = lowmem.init(tx, start)
    begun = lowmem.master_params(params, state)
    ours = changes(begun, lowmem.master_params(*run(tx, params, state)))
    theirs = changes(start, run(plain, start, plain.init(start))[0])
    return cosine(ours, theirs)


PEERS = {
    "flash_adamw": (lowmem.flash_adamw(1e-3), optax.adamw(1e-3)),
    "flash_lion": (lowmem.flash_lion(1e-4), optax.lion(1e-4)),
    "flash_sgd": (lowmem.flash_sgd(1e-3, 0.9), optax.sgd(1e-3, 0.9)),
}


@pytest.mark.parametrize("name", rows(PEERS, ["flash_adamw"]))
def test_follows_f32_optax_for_200_steps(name):
    assert _stream_changes(*PEERS[name], steps=200, size=50_000) > COSINE_200


@pytest.mark.full
@pytest.mark.parametrize("name, size", [*((name, 5_000) for name in PEERS), ("flash_lion", 50_000)])
def test_follows_f32_optax_for_6000_steps(name, size):
    assert _stream_changes(*PEERS[name], steps=6000, size=size) > COSINE_6000
