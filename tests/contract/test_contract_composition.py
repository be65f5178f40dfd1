"""The flash optimizers are the composition of the named transformations, and follow f32 optax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from tests.contract_cases import changes, cosine
from tests.tiers import in_turn, rows
from tests.tolerances import COMPOSITION_SHARE, COSINE_200, COSINE_6000, STEP_ROUNDING

LR, DECAY, STEPS = 1e-3, 0.1, 50
POLICY = lowmem.Policy(min_size=64)
KINDS = [
    (jnp.bfloat16, 24, "stochastic"),
    (jnp.bfloat16, 24, "nearest"),
    (jnp.bfloat16, 32, "nearest"),
    (jnp.float16, 24, "nearest"),
    (jnp.float32, 24, "stochastic"),
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


def _composed(name: str, bits: int, rounding: str) -> optax.GradientTransformationExtraArgs:
    how: dict[str, Any] = {"policy": POLICY, "rounding": rounding}
    momentum = functools.partial(lowmem.compand_momentum, **how)
    if name == "flash_adamw":
        first = momentum(lowmem.sqrt_variance_quant(optax.scale_by_adam(), **how))
    elif name == "flash_lion":
        first = momentum(optax.scale_by_lion())
    else:
        first = momentum(optax.trace(0.9))
    return lowmem.split_master_weights(optax.chain(first, *_end()), bits)


def _direction(name: str, storage: lowmem.Storage) -> optax.GradientTransformationExtraArgs:
    return lowmem.OPTIMIZERS[name].scale_by(storage=storage)


def _fused(name: str, storage: lowmem.Storage) -> optax.GradientTransformationExtraArgs:
    make = getattr(lowmem, name)
    options = {"momentum": 0.9, "decoupled": True} if name == "flash_sgd" else {}
    return make(LR, weight_decay=DECAY, storage=storage, **options)


def _onto_composed(fused: Any, like: Any) -> Any:
    """A flash state as the state of the composition: the same codes, scales and corrections."""
    outer = like.inner_state[0]
    outer = outer._replace(count=fused.count, scales={key: fused.mu_scale for key in outer.scales})
    if isinstance(outer.inner_state, optax.TraceState):
        core = outer.inner_state._replace(trace=fused.mu)
    elif isinstance(outer.inner_state, optax.ScaleByLionState):
        core = outer.inner_state._replace(mu=fused.mu, count=fused.count)
    else:
        adam = outer.inner_state.inner_state._replace(mu=fused.mu, nu=fused.nu, count=fused.count)
        core = outer.inner_state._replace(
            count=fused.count, inner_state=adam, scales={"nu_scale": fused.nu_scale}
        )
    return like._replace(
        count=fused.count, seed=fused.seed, correction=fused.correction,
        inner_state=(outer._replace(inner_state=core), *like.inner_state[1:]),
    )  # fmt: skip


def _slots(state: Any) -> list[tuple[Any, Any]]:
    """(codes, scales) trees of a state of either form."""
    if not isinstance(state, lowmem._src.wrappers.split.SplitState):
        pairs = [(state.mu, state.mu_scale)]
        return pairs + ([(state.nu, state.nu_scale)] if hasattr(state, "nu") else [])
    outer = state.inner_state[0]
    core, scales = outer.inner_state, next(iter(outer.scales.values()))
    if isinstance(core, optax.TraceState):
        return [(core.trace, scales)]
    if isinstance(core, optax.ScaleByLionState):
        return [(core.mu, scales)]
    return [(core.inner_state.mu, scales), (core.inner_state.nu, core.scales["nu_scale"])]


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


def _teacher_forced(name: str, dtype: Any, fused: Any, other: Any, forced: Any) -> None:
    params, state = lowmem.init(fused, _tree(), dtype)
    like = lowmem.init(other, _tree(), dtype)[1]
    step, step_other = _steps(fused, other)
    codes, weights = _Shares(), _Shares()
    for index in range(STEPS):
        grads = _gradients(params, index)
        theirs, their_state = step_other(grads, forced(state, like), params)
        params, state = step(grads, state, params)
        for (a, a_scale), (b, b_scale) in zip(_slots(state), _slots(their_state), strict=True):
            for key, code in a.items():
                if a_scale[key].ndim:
                    codes.add(code, b[key])
                    scale = [np.asarray(s[key], np.float32) for s in (a_scale, b_scale)]
                    if a_scale[key].dtype == jnp.uint16:  # mantissa bits: one unit too
                        assert np.abs(scale[0] - scale[1]).max() <= 1
                    else:
                        np.testing.assert_allclose(*scale, rtol=1e-6)
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
    codes.check()
    if weights.total:
        weights.check()


@pytest.mark.parametrize("kind, name", in_turn(KINDS, ["flash_adamw", "flash_lion", "flash_sgd"]))
def test_is_the_composition(kind, name):
    dtype, bits, rounding = kind
    if name == "flash_sgd" and rounding == "stochastic":
        rounding = "nearest"  # optax calls the slot `trace`: its random bits are others
    storage = lowmem.Storage(bits, rounding=rounding, policy=POLICY)
    composed = _composed(name, bits, rounding)
    _teacher_forced(name, dtype, _fused(name, storage), composed, _onto_composed)


@pytest.mark.parametrize("name", ["flash_adamw", "flash_lion", "flash_sgd"])
def test_is_the_chain_of_its_own_direction(name):
    storage = lowmem.Storage(policy=POLICY)
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
        for a, b in zip(_slots(state), _slots(theirs.inner_state[0]), strict=True):
            for key in a[0]:
                if a[1][key].ndim:
                    codes.add(a[0][key], b[0][key])
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

        return jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(steps))[0])((params, state))

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


@pytest.mark.parametrize("name", PEERS)
def test_follows_f32_optax_for_200_steps(name):
    assert _stream_changes(*PEERS[name], steps=200, size=50_000) > COSINE_200


@pytest.mark.parametrize("name", rows(PEERS, ["flash_adamw"]))
def test_follows_f32_optax_for_6000_steps(name):
    assert _stream_changes(*PEERS[name], steps=6000, size=5_000) > COSINE_6000


@pytest.mark.full
@pytest.mark.parametrize("name", PEERS)
def test_follows_f32_optax_for_6000_steps_on_a_larger_tree(name):
    assert _stream_changes(*PEERS[name], steps=6000, size=50_000) > COSINE_6000
