"""The optimizers, parameters and gradient streams of the contract tests."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from packaging.version import Version

import optax_lowmem as lowmem
from optax_lowmem._src.optim.optimizers.record import name_of
from tests import small_leaves, tolerances
from tests.compilation import QUICK_COMPILE as QUICK_COMPILE
from tests.tiers import rows

POLICY = lowmem.Policy(min_size=32)
FLASH = lowmem.flash_adamw(1e-3).engine.storage
OLD_OPTAX = Version(optax.__version__) < Version("0.2.7")
_MU, _NU = lowmem.codecs.softsign(), lowmem.codecs.sqrt()
_ADAM = {"mu": _MU, "nu": _NU}


def skip_old_multi_steps() -> None:
    if OLD_OPTAX:
        pytest.skip("optax 0.2.6 sums 16-bit gradients in f32, which changes the state's dtypes")


@dataclasses.dataclass(frozen=True)
class Form:
    """Storage settings that `Storage` and `compress_state` have in common."""

    bits: int | None = 24
    group_size: int = 32
    rounding: str = "stochastic"
    seed: int = 0
    policy: lowmem.Policy = POLICY
    update_dtype: str = "float32"

    def storage(self, default: lowmem.Storage) -> lowmem.Storage:
        """An optimizer's own codecs in this form."""
        return dataclasses.replace(
            default,
            master_weight_bits=self.bits,
            group_size=self.group_size,
            rounding=self.rounding,
            seed=self.seed,
            policy=self.policy,
            update_dtype=self.update_dtype,
        )


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer under contract.

    Attributes:
      plain: learning rate -> the optax optimizer that it must follow.
      make: (learning rate, form) -> ours.
      slots: compressed state fields, as optax.tree.get finds them.
      learning_rate: one with which optax's own tests converge.
      step: one that moves weights of about 1 by 1e-3 a step under `stream`.
    """

    plain: Callable[[Any], optax.GradientTransformation]
    make: Callable[[Any, Form], optax.GradientTransformationExtraArgs]
    slots: tuple[str, ...]
    learning_rate: float
    step: float = 1e-3


_OPTIONS: dict[str, tuple[float, dict[str, Any]]] = {
    "flash_adamw": (1e-1, {}),
    "flash_adam": (1e-1, {}),
    "flash_lion": (1e-2, {"weight_decay": 1e-4}),
    "flash_sgd": (1e-3, {}),
}


def case_of(name: str) -> Case:
    """The case of an optimizer of the table."""
    row = small_leaves.record(name)
    # an optimizer that comes new into the table is tested with its own defaults
    learning_rate, options = _OPTIONS.get(name, (row.learning_rate, {}))
    default = row.make(learning_rate).engine.storage
    return Case(
        plain=lambda lr: row.plain(lr, **options),
        make=lambda lr, form: row.make(lr, **options, storage=form.storage(default)),
        slots=row.moments,
        learning_rate=learning_rate,
    )


def _split(tx: Any, form: Form) -> optax.GradientTransformationExtraArgs:
    assert form.bits is not None
    return lowmem.split_master_weights(tx, form.bits, update_dtype=form.update_dtype)


def _compressed(
    plain: Callable, learning_rate: float, slots: dict, step: float = 1e-3, **options: Any
) -> Case:
    def make(lr: Any, form: Form) -> optax.GradientTransformationExtraArgs:
        tx = lowmem.compress_state(
            plain(lr, **options),
            group_size=form.group_size,
            rounding=form.rounding,
            seed=form.seed,
            policy=form.policy,
            **slots,
        )
        return tx if form.bits is None else _split(tx, form)

    return Case(functools.partial(plain, **options), make, tuple(slots), learning_rate, step)


CASES: dict[str, Case] = {
    **{name: case_of(name) for name in lowmem.OPTIMIZERS},
    "optax.adamw": _compressed(optax.adamw, 1e-1, _ADAM),
    "optax.adan": _compressed(optax.adan, 1e-1, {"m": _MU, "v": _MU, "n": _NU}),
    "optax.lion": _compressed(optax.lion, 1e-2, {"mu": _MU}, weight_decay=1e-4),
    "optax.sgd": _compressed(optax.sgd, 1e-3, {"trace": _MU}, momentum=0.9),
    "optax.amsgrad": _compressed(optax.amsgrad, 1e-1, {**_ADAM, "nu_max": _NU}),
    "optax.adabelief": _compressed(optax.adabelief, 1e-2, _ADAM),
    "optax.novograd": _compressed(optax.novograd, 1e-3, {"mu": _MU}, step=1e-2),
    "optax.nadamw": _compressed(optax.nadamw, 1e-2, _ADAM),
    "optax.rmsprop": _compressed(optax.rmsprop, 5e-3, {"nu": _NU}),
}
# In codes of 4 bits, two in a byte: what holds whatever the size of rounding errors.
_MU4, _NU4 = lowmem.codecs.normal4(), lowmem.codecs.log4()
WIDE = tuple(CASES)
CASES |= {
    "flash_adamw-int4": dataclasses.replace(
        CASES["flash_adamw"],
        make=lambda lr, form: lowmem.flash_adamw(
            lr, storage=form.storage(lowmem.Storage.four_bit())
        ),
    ),
    "optax.adan-int4": _compressed(optax.adan, 1e-1, {"m": _MU4, "v": _MU4, "n": _NU4}),
}


def codes_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the codes of a case for a weight of this one."""
    return (*shape[:-1], -(-shape[-1] // 2)) if name.endswith("-int4") else shape


def _wraps(
    wrap: Callable[[Any], Any], name: str = "flash_adamw"
) -> Callable[[Any, Form], optax.GradientTransformationExtraArgs]:
    return lambda lr, form: wrap(CASES[name].make(lr, form))


def _direction(make: Callable[..., Any]) -> Callable[[Any, Form], Any]:
    def chained(lr: Any, form: Form) -> optax.GradientTransformationExtraArgs:
        direction = make(storage=form.storage(FLASH))
        return optax.chain(direction, optax.scale_by_learning_rate(lr))

    return chained


def _links(lr: Any, form: Form) -> optax.GradientTransformationExtraArgs:
    del form
    links = (lowmem.compand_momentum(0.9, policy=POLICY),
             lowmem.sqrt_variance_quant(0.9, policy=POLICY))  # fmt: skip
    return optax.chain(*links, optax.scale_by_learning_rate(lr))


def _of_moments(wrap: Callable, plain: Callable) -> Callable[[Any, Form], Any]:
    return lambda lr, form: wrap(plain(lr), group_size=form.group_size, policy=form.policy)


# Our `scale_by_*` by name.
DIRECTIONS = {
    name_of(record.scale_by): record.scale_by
    for record in map(small_leaves.record, lowmem.OPTIMIZERS)
    if record.scale_by is not None
}
# Every wrapper of ours, and the pieces: name -> (learning rate, form) -> transformation.
WRAPPERS: dict[str, Callable[[Any, Form], optax.GradientTransformationExtraArgs]] = {
    "compress_state": lambda lr, form: _compressed(optax.adan, 1e-1, {"m": _MU}).make(
        lr, dataclasses.replace(form, bits=None)
    ),
    "compand_momentum": _of_moments(lowmem.compand_momentum, optax.adam),
    "sqrt_variance_quant": _of_moments(lowmem.sqrt_variance_quant, optax.amsgrad),
    "split_master_weights": lambda lr, form: _split(optax.contrib.muon(lr), form),
    "update_clipping": lambda lr, form: _split(
        lowmem.update_clipping(optax.adamw(lr), b2=0.999, eps=1e-8), form
    ),
    "chain": _wraps(lambda tx: lowmem.chain(optax.clip_by_global_norm(1e3), tx)),
    "accumulate_gradients": _wraps(lambda tx: lowmem.accumulate_gradients(tx, 1)),
    "into moments": _wraps(lambda tx: lowmem.accumulate_gradients(tx, 1, "moments")),
    "track_master_ema": _wraps(lambda tx: lowmem.track_master_ema(tx, 0.9)),
    "inject_hyperparams": lambda lr, form: lowmem.inject_hyperparams(lowmem.flash_adamw)(
        lr, storage=form.storage(FLASH)
    ),
    "flash_sgd plain": lambda lr, form: lowmem.flash_sgd(lr, storage=form.storage(FLASH)),
    **{name: _direction(make) for name, make in DIRECTIONS.items()},
    "links": _links,
}
EVERYONE = {**{name: case.make for name, case in CASES.items()}, **WRAPPERS}

# The first of each rule; the others differ in their codecs and defaults.
RULES = {type(record.rule): name for name, record in reversed(lowmem.OPTIMIZERS.items())}.values()
# The default tier has one of ours for each rule, and one of optax's with a running maximum;
# the full tier has all of them.
DISTINCT = tuple(name for name in CASES if name in (*RULES, "optax.amsgrad"))
OPTIMIZER = pytest.mark.parametrize("name", rows(CASES, DISTINCT))


def third(turn: int) -> pytest.MarkDecorator:
    """A third of the default tier's optimizers, where the test is about what is around them."""
    return pytest.mark.parametrize("name", rows(CASES, DISTINCT[turn::3]))


DTYPES: dict[str, Any] = {
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float32": jnp.float32,
    "mixed": lambda path, leaf: jnp.float32 if "norm" in path else jnp.bfloat16,
}


def masters(seed: int = 0) -> dict[str, Any]:
    """f32 parameters: full and partial groups, and a leaf that the policy leaves uncompressed."""
    rng = np.random.default_rng(seed)

    def leaf(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(1.0, 0.2, shape), jnp.float32)

    return {"block": {"w": leaf(3, 40)}, "norm": leaf(5)}


def stream(params: Any, steps: int, seed: int = 1) -> Any:
    """Gradients of `steps` steps, stacked: a steady part and noise, of sizes that vary by leaf."""
    rng = np.random.default_rng(seed)

    def leaf(p: Any) -> jax.Array:
        steady = rng.normal(0.0, 1.0, p.shape)
        noise = rng.normal(0.0, 0.5, (steps, *p.shape))
        return jnp.asarray((steady + noise) * 10.0 ** rng.uniform(-1, 1), jnp.float32)

    return jax.tree.map(leaf, params)


def at(gradients: Any, step: int) -> Any:
    return jax.tree.map(lambda g: g[step], gradients)


def train(tx: Any, params: Any, state: Any, gradients: Any, **extra: Any) -> tuple[Any, Any]:
    """Every step of a stream, compiled together as one scan."""

    def body(carry: Any, grads: Any) -> tuple[Any, None]:
        params, state = carry
        updates, state = tx.update(grads, state, params, **extra)
        return (optax.apply_updates(params, updates), state), None

    scan = lambda p, s, g: jax.lax.scan(body, (p, s), g)[0]  # noqa: E731
    steps = jax.jit(scan)
    return steps(params, state, gradients)


def changes(start: Any, end: Any) -> list[np.ndarray]:
    """Return the change of each leaf in f64."""
    rows = zip(jax.tree.leaves(start), jax.tree.leaves(end), strict=True)
    return [np.asarray(b, np.float64) - np.asarray(a, np.float64) for a, b in rows]


def distance(ours: list[np.ndarray], plain: list[np.ndarray]) -> float:
    """Largest over leaves of |ours - plain| / |plain|; a leaf that plain leaves alone must rest."""
    worst = 0.0
    for u, v in zip(ours, plain, strict=True):
        gap, size = np.linalg.norm(u - v), np.linalg.norm(v)
        worst = max(worst, float(gap / size) if size else (np.inf if gap else 0.0))
    return worst


def cosine(ours: list[np.ndarray], plain: list[np.ndarray]) -> float:
    """Of two total changes."""
    u, v = (np.concatenate([leaf.ravel() for leaf in tree]) for tree in (ours, plain))
    return float(u @ v / (np.linalg.norm(u) * np.linalg.norm(v)))


def assert_same(one: Any, other: Any) -> None:
    """Equal in structure, dtype and every bit's value."""
    chex.assert_trees_all_equal_shapes_and_dtypes(one, other)
    chex.assert_trees_all_equal(one, other)


def code_differences(one: Any, other: Any) -> tuple[int, float]:
    """Largest difference of 8-bit codes, and the share of codes that differ."""
    gaps = [
        np.abs(np.asarray(a, np.int32) - np.asarray(b, np.int32)).ravel()
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        if a.ndim and jnp.dtype(a.dtype) in (jnp.int8, jnp.uint8)
    ]
    assert gaps, "no codes to compare"
    gap = np.concatenate(gaps)
    return int(gap.max()), float((gap > 0).mean())


def pairs_of(row: Sequence[Any]) -> Iterator[tuple]:
    """((factor, value), (factor, value)) for all pairs of factors of a row."""
    return itertools.combinations(enumerate(row), 2)


def pairwise(factors: Sequence[Sequence[Any]], but: tuple[int, int] | None = None) -> list[tuple]:
    """Rows in which every pair of values of two factors occurs; greedy, the same every time.

    Args:
      factors: the values of each.
      but: two factors of whose pairs only those occur that the others happen to need.
    """
    missing = {
        ((i, a), (j, b))
        for (i, left), (j, right) in itertools.combinations(enumerate(factors), 2)
        if (i, j) != but
        for a in left
        for b in right
    }
    rng = np.random.default_rng(0)
    rows = []
    while missing:
        fixed = dict(min(missing, key=repr))
        candidates = []
        for _ in range(30):
            drawn = [values[rng.integers(len(values))] for values in factors]
            row = [fixed.get(index, value) for index, value in enumerate(drawn)]
            candidates.append(tuple(row))
        best = max(candidates, key=lambda row: sum(pair in missing for pair in pairs_of(row)))
        rows.append(best)
        missing -= set(pairs_of(best))
    return rows


def covering(rows: Sequence[tuple]) -> list[tuple]:
    """The fewest rows (greedily) in which every value occurs that some row has in that place."""
    missing = {pair for row in rows for pair in enumerate(row)}
    found = []
    while missing:
        best = max(rows, key=lambda row: len(missing & set(enumerate(row))))
        found.append(best)
        missing -= set(enumerate(best))
    return found


def assert_alike(one: Any, other: Any, steps: int) -> None:
    """The same after some steps, but for what lay next to a rounding boundary.

    XLA fuses the multiply-adds of two programs in its way.
    """
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if np.issubdtype(a.dtype, np.integer):
            assert np.sum(a != b) <= max(1, tolerances.REORDERED_CODES * steps * a.size)
        else:
            size = np.abs(b).max(initial=0)  # of terms that may cancel
            few = np.abs(np.float64(a) - np.float64(b)) > tolerances.REORDERED_SLOT * size
            assert np.sum(few) <= max(1, tolerances.REORDERED_CODES * steps * a.size)
            np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=2.0**-7, atol=1e-5)
