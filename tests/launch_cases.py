"""Leaves to launch a kernel of `fused_update` on, and its results against the reference's."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_lowmem as lowmem
from optax_lowmem._src.arrays import numerics, random
from optax_lowmem._src.arrays.groups import Tile, Tiling
from optax_lowmem._src.optim.optimizers.lion import LionRule
from optax_lowmem._src.optim.step import LeafPlan, reference
from optax_lowmem._src.optim.step.state import Leaf
from optax_lowmem.codecs import StoredSlot, decode_array, encode_array
from tests import tolerances

LEARNING_RATE = 1e-3
POLICY = lowmem.Policy(min_size=0)
# Those with one rule for all leaves; a launch of others has the leaves of one of their rules.
ALIKE = [n for n, row in lowmem.OPTIMIZERS.items() if row.rule.for_leaf(None) is row.rule]
OPTIMIZERS: dict[str, Callable[[lowmem.Storage], Any]] = {
    "adamw": lambda s: lowmem.flash_adamw(LEARNING_RATE, weight_decay=0.1, storage=s),
    "lion": lambda s: lowmem.flash_lion(LEARNING_RATE, weight_decay=0.1, storage=s),
    "sgd": lambda s: lowmem.flash_sgd(LEARNING_RATE, momentum=0.9, weight_decay=1e-2, storage=s),
    "nesterov": lambda s: lowmem.flash_sgd(LEARNING_RATE, momentum=0.9, nesterov=True, storage=s),
    "direction": lambda s: lowmem.scale_by_flash_adam(storage=s),
}


def storage(**options: Any) -> lowmem.Storage:
    """With flash_adamw's codecs in every optimizer, where they are not said."""
    flash = lowmem.flash_adamw(LEARNING_RATE).engine.storage
    return dataclasses.replace(flash, policy=POLICY, **options)


# op by op they would compile for seconds
_decoded = jax.jit(decode_array, static_argnums=(0, 3, 4))
joined = jax.jit(lambda split, p, correction: split.join(p, correction), static_argnums=0)
_operands = jax.jit(lambda block, mean, shape: block.operands(mean, shape), static_argnums=(0, 2))


@dataclasses.dataclass
class Case:
    """The arguments of a launch."""

    rule: Any
    plans: list[LeafPlan]
    leaves: list[Leaf]
    h: dict[str, jax.Array]
    keys: jax.Array

    @property
    def leaf_hyperparameters(self) -> list[dict[str, jax.Array]]:
        """The hyperparameters, once or, where leaves have their own, once a leaf."""
        if self.rule.prepares != "leaf":
            return [self.h]
        measured = jax.jit(reference.prepare, static_argnums=(0, 1))
        return [
            self.h | measured(self.rule, plan.nameless, leaf, self.h)
            for plan, leaf in zip(self.plans, self.leaves, strict=True)
        ]

    def scalars(self, names: tuple[str, ...]) -> jax.Array:
        """`leaf_hyperparameters` as a launch takes them."""
        return jnp.stack(
            [jnp.stack([h[name] for name in names]) for h in self.leaf_hyperparameters]
        )

    @property
    def numbers(self) -> list[int]:
        """Of all keys, which are the leaves': not the first ones, and not in order."""
        return [len(self.plans) - i for i in range(len(self.plans))]


def make(
    tx: Any,
    shapes: list[tuple[int, ...]],
    dtype: Any = jnp.bfloat16,
    gradient_dtype: Any = jnp.bfloat16,
    direct: bool = True,
    more: Mapping[str, float] | None = None,
) -> Case:
    """Leaves some steps into a training, with what rounding makes of random numbers."""
    rng, engine = np.random.default_rng(0), tx.engine

    def normal(scale: float, shape: tuple[int, ...]) -> np.ndarray:
        drawn = rng.normal(0, scale, shape) * np.exp(rng.normal(0, 1, shape))
        drawn[..., : shape[-1] // 8] = 0  # weights that never had a gradient
        return drawn.astype(np.float32)

    tree = {f"leaf{i:02}": jax.ShapeDtypeStruct(s, dtype) for i, s in enumerate(shapes)}
    plans = [dataclasses.replace(plan, returns_params=direct) for plan in engine.plans(tree)]
    leaves = []
    for i, plan in enumerate(plans):
        g, w = normal(1e-3, plan.shape), normal(0.1, plan.shape)
        moments = {"mu": normal(3e-4, plan.shape), "nu": normal(1e-3, plan.shape) ** 2}
        p, state = _stored(plan, w, moments)
        weight = p if engine.weights else None
        g = jnp.asarray(g.astype(gradient_dtype))
        leaves.append(state._replace(g=g, p=weight, of_block=of_block(plan, i)))
    (rule,) = {engine.rule.for_leaf(plan.matrices) for plan in plans}  # of all leaves of a launch
    h = engine.rule.hyperparameters_of(plans[0].matrices, engine.hyperparameters(jnp.int32(100)))
    h = {**h} | {name: jnp.float32(value) for name, value in (more or {}).items()}
    names = [f"leaf{i:02}" for i in range(len(plans) + 1)]
    keys = random.leaf_keys(jnp.uint32(1), jnp.int32(101), names)
    return Case(rule, plans, leaves, h, keys)


def of_block(plan: LeafPlan, seed: int) -> Any:
    """Something for what blocks give their elements."""
    if plan.block is None:
        return None
    shape, rng = plan.block.mean_shape(plan.shape), np.random.default_rng(seed)
    mean = jnp.asarray(rng.uniform(500, 1500, shape), jnp.float32)
    return _operands(plan.block, mean, plan.shape)


@functools.partial(jax.jit, static_argnums=0)
def _stored(plan: LeafPlan, w: jax.Array, moments: dict[str, jax.Array]) -> Any:
    """Weight and state of a leaf."""
    p, correction = w.astype(plan.dtype), None
    if plan.split is not None:
        p, correction = plan.split.split(w, plan.dtype)
    stored = [
        encode_array(slot.codec, moments[slot.name], plan.group_size)
        if slot.codec
        else (moments[slot.name], None)
        for slot in plan.slots
    ]
    codes, scales = zip(*stored, strict=True) if stored else ((), ())
    scales = tuple(x for x in scales if x is not None)
    return p, Leaf(slots=codes, scales=scales, correction=correction)


def stored_slots(slots: Sequence[Any], state: Leaf) -> list[tuple[jax.Array, Any]]:
    """(values, scales) of each slot; without a codec the scales are None."""
    scales = iter(state.scales)
    rows = zip(slots, state.slots, strict=True)
    return [(values, next(scales) if slot.codec else None) for slot, values in rows]


def launch(case: Case, launcher: Callable[..., Any], tile: Tile) -> list[Leaf]:
    """Launch a kernel on a case and return its results; as in a step, leaves of a launch have
    groups of equal width."""
    names = tuple(sorted(case.h))  # not what blocks share, which is a leaf's
    scalars = case.scalars(names)
    widths: dict[int, list[int]] = {}
    for i, plan in enumerate(case.plans):
        lanes = Tiling(plan.shape, plan.group_size, tile.elements).lanes
        widths.setdefault(lanes, []).append(i)
    results: dict[int, Leaf] = {}
    for together in widths.values():
        launched = launcher(
            case.rule,
            tuple(case.plans[i].nameless for i in together),
            tuple(case.leaves[i] for i in together),
            names,
            scalars[jnp.asarray(together)] if len(scalars) > 1 else scalars,
            case.keys,
            jnp.asarray([case.numbers[i] for i in together], jnp.int32),
            tile,
        )
        results.update(zip(together, launched, strict=True))
    return [results[i] for i in range(len(case.plans))]


def expected(case: Case) -> list[Leaf]:
    """Compute the reference's update (or weight, where a plan returns new parameters) and state."""

    def every(leaves: Any, hs: Any, keys: Any) -> Any:
        rows = zip(case.plans, leaves, case.numbers, strict=True)
        return [
            reference.fused_update(case.rule, plan, leaf, hs[i % len(hs)], keys[number])
            for i, (plan, leaf, number) in enumerate(rows)
        ]

    return jax.jit(every)(case.leaves, case.leaf_hyperparameters, case.keys)


def compare(case: Case, found: list[Leaf], approximate: bool = False) -> None:
    """Codes, scales, and where each weight lands, against the reference.

    Args:
      case: of the launch.
      found: its results.
      approximate: whether they went through a GPU's instructions for logarithms and powers, with
        which expanded moments are decoded.
    """
    for i, wanted in enumerate(expected(case)):
        update = wanted.p
        plan, leaf, result = case.plans[i], case.leaves[i], found[i]
        any_sign = undecided(case, i)
        expanded = any(slot.codec and "expanded" in slot.codec.name for slot in plan.slots)
        loose = approximate and expanded
        step = tolerances.APPROXIMATE_STEP if loose else tolerances.REORDERED_STEP
        _compare_state(plan, wanted, result)
        if plan.writes_weight and not plan.returns_params:
            given = reference.update_towards(result.p, leaf.p, plan.update_dtype)
        else:
            given = result.p
        assert (given.shape, given.dtype) == (update.shape, update.dtype)
        if not plan.returns_params and leaf.p is not None:  # -0.0 leaves even a -0.0 alone
            stays = (np.asarray(update) == 0) & (np.asarray(given) == 0) & ~any_sign
            assert np.signbit(np.asarray(given))[stays].all()
        both = (update, wanted.correction), (given, result.correction)
        _compare_weights(plan, leaf, any_sign, step, *both)


def undecided(case: Case, i: int) -> np.ndarray:
    """Return the mask of elements where rounding errors decide the sign of Lion's direction."""
    leaf, plan = case.leaves[i], case.plans[i]
    if not isinstance(case.rule, LionRule):
        return np.zeros(plan.shape, bool)
    kept = np.float64(case.h["b1"]) * np.asarray(
        reference.decode(plan, leaf, reference.whole(plan))["mu"]
    )
    new = np.float64(case.h["one_minus_b1"]) * np.asarray(numerics.widen(leaf.g))
    return np.abs(kept + new) < tolerances.LION_SIGN * np.abs(kept)


def _bits_over(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Bits of f32 numbers over 2^-80, no difference of which is subnormal: XLA's CPU has none."""
    drawn = rng.integers(0, 2**32, shape, dtype=np.uint32)
    return np.where((drawn >> 23) & 0xFF < 47, drawn + (64 << 23), drawn).astype(np.uint32)


def check_landing(
    launcher: Callable[..., Any], storage: lowmem.Storage, direct: bool, tile: Tile
) -> None:
    """Weights, corrections and steps of any size, sign and kind: nothing is left to rounding."""
    tx = lowmem.flash_sgd(1.0, 0.9, storage=storage)
    case = make(tx, [(64, 128)], gradient_dtype=jnp.float32, direct=direct)
    rng, plan = np.random.default_rng(0), case.plans[0]
    old = (_bits_over(rng, plan.shape) >> 16).astype(np.uint16)
    special = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0xFF7F], np.uint16)
    old[:8] = special[rng.integers(0, special.size, old[:8].shape)]
    half = 1 << (plan.split.bits - 17)
    correction = rng.integers(-half, half, plan.shape)
    correction[old & 0x7FFF == 0] = -1  # as a user's zeros may have it
    # steps near the weight leave small weights; the others leave anything
    with np.errstate(all="ignore"):
        weight = old.view(jnp.bfloat16).astype(np.float32)
        error = rng.normal(0, 1, plan.shape) * 2.0 ** rng.integers(-24, 2, plan.shape)
        far = _bits_over(rng, plan.shape).view(np.float32)
        g = np.where(rng.random(plan.shape) < 0.7, weight * (1 + error), far).astype(np.float32)
    g[-1] = 0  # a step of nothing
    g[g == 0] = 0  # the momentum of -0.0 is 0.0
    leaf = case.leaves[0]._replace(
        g=jnp.asarray(g),
        p=jnp.asarray(old.view(jnp.bfloat16)),
        slots=(jnp.zeros(plan.shape, jnp.int8),),  # the momentum is then the gradient
        correction=jnp.asarray(correction, plan.split.dtype),
    )
    (found,) = launch(dataclasses.replace(case, leaves=[leaf]), launcher, tile)
    random_bits = None
    if plan.stochastic_master:
        key = case.keys[case.numbers[0]]
        random_bits = random.leaf_bits(key, plan.shape, plan.group_size, reference.MASTER)
    landed = jax.jit(lambda *arrays: reference.move(plan, *arrays))
    weight, kept = landed(leaf.p, leaf.g, leaf.correction, random_bits)
    bits, bits2 = (np.asarray(x).view(np.uint16) for x in (found.p, weight))
    np.testing.assert_array_equal(bits, bits2)
    np.testing.assert_array_equal(found.correction, kept)


def check_not_finite(
    launcher: Callable[..., Any], optimizer: str, tile: Tile, width: int = 32
) -> None:
    """Gradients of NaN, infinity, 0 and extreme sizes, one kind a group."""
    tx = OPTIMIZERS[optimizer](lowmem.Storage(policy=POLICY, group_size=width))
    case = make(tx, [(12, width)], gradient_dtype=jnp.float32)
    leaf, plan = case.leaves[0], case.plans[0]
    g, slots = np.array(leaf.g), tuple(np.array(slot) for slot in leaf.slots)
    g[0, 3], g[1, 5], g[2, 7] = np.nan, np.inf, -np.inf
    g[3], g[4, ::2] = 0, 0
    g[5] *= 1e30
    g[6] = np.where(g[6] > 0, 3e38, -3e38)
    g[7] *= 1e-12
    g[8, 1:] *= 1e-6
    for slot in slots:
        slot[[3, 7, 8]] = 0
    leaf = leaf._replace(g=jnp.asarray(g), slots=tuple(map(jnp.asarray, slots)))
    case = dataclasses.replace(case, leaves=[leaf])
    (found,) = launch(case, launcher, tile)
    compare(case, [found])
    master = plan.split.join(found.p, found.correction)
    assert numerics.to_bits(master[0, 3]) == numerics.NAN_BITS
    assert jnp.isfinite(master[3:5]).all()
    if optimizer == "adamw":  # no variance that is not 0 is stored as 0
        assert (np.asarray(found.slots[1])[8] >= (g[8] != 0)).all()
    if optimizer != "sgd":  # whose decay goes into the momentum
        assert (np.asarray(found.slots[0])[3] == 0).all()


def _compare_weights(
    plan: LeafPlan, leaf: Leaf, any_sign: np.ndarray, of_step: float, *both: tuple[jax.Array, Any]
) -> None:
    """Within a unit of the last place, and what the step itself may be off by."""
    one, other = (_weight(plan, leaf, *result) for result in both)
    old = 0.0 if leaf.p is None else _master(plan, leaf.p, leaf.correction)
    dtype = one.dtype if leaf.p is None else plan.dtype
    last = tolerances.reordered_master(plan.split and plan.split.bits, dtype, one)
    finite = np.isfinite(one)
    np.testing.assert_array_equal(other[~finite], one[~finite])
    rate = 1.0 if leaf.p is None else LEARNING_RATE
    with np.errstate(invalid="ignore"):
        step = of_step * (rate + np.abs(one - old)) + 2 * rate * any_sign
        off = np.abs(other - one) > last + step
        worst = np.max(np.abs(other - one) / (last + step), where=finite, initial=0)
    off &= finite & ~_torn(plan, *both)
    assert not off.any(), (plan.path, plan.shape, int(off.sum()), worst)


def _torn(plan: LeafPlan, *both: tuple[jax.Array, Any]) -> np.ndarray:
    """Weights one unit apart beside the correction of a tie, few enough for TORN_SPLITS.

    XLA on a CPU may compute a master weight once for its 16 bits and once for its correction.
    """
    (weight, correction), (weight2, correction2) = both
    in_bits = plan.returns_params and plan.split is not None and plan.split.dtype == jnp.int8
    if not in_bits or jax.default_backend() != "cpu":
        return np.zeros(plan.shape, bool)
    apart = np.asarray(weight).view(np.int16) - np.asarray(weight2).view(np.int16).astype(int)
    tie = (np.asarray(correction) == -128) & (np.asarray(correction2) == -128)
    torn = tie & (np.abs(apart) == 1)
    assert torn.sum() <= max(1, tolerances.TORN_SPLITS * torn.size)
    return torn


def _master(plan: LeafPlan, p: jax.Array, correction: Any) -> np.ndarray:
    split = plan.split
    return np.asarray(numerics.widen(p) if split is None else joined(split, p, correction))


def _weight(plan: LeafPlan, leaf: Leaf, update: jax.Array, correction: Any) -> np.ndarray:
    """The master weight after an update, or a bare direction itself."""
    if leaf.p is None:
        return np.asarray(update)
    if plan.returns_params:
        return _master(plan, update, correction)
    landed = numerics.widen(leaf.p) + numerics.widen(update)
    if plan.dtype != jnp.float32:
        landed = numerics.narrow(landed, plan.dtype)
    return _master(plan, landed, correction)


def units(stored: Any) -> np.ndarray:
    """Codes or scales as integers that are one apart where they are neighbours."""
    stored = np.asarray(stored)
    if stored.dtype.kind == "f":
        stored = stored.view(f"int{8 * stored.dtype.itemsize}")
    return stored.astype(np.int64)


def same_scales(
    codec: Any, one: Any, other: Any, most: Mapping[str, int] = tolerances.REORDERED_SCALE_UNITS
) -> None:
    """Next to each other; of a word with two parts, each of them.

    Args:
      codec: of the slot.
      one: stored scales.
      other: those of another implementation.
      most: by the name of a format, how many units of the last place they may be apart.
    """
    name = codec.scale.name
    if name in tolerances.REORDERED_WORDS:
        words = (codec.scale.decode(jnp.asarray(stored)) for stored in (one, other))
        for part, part2, rtol in zip(*words, tolerances.REORDERED_WORDS[name], strict=True):
            np.testing.assert_allclose(part2, part, rtol=rtol, err_msg=codec.name)
        return
    assert np.abs(units(one) - units(other)).max() <= most[name], codec.name


def decoded_scales(codec: Any, stored: Any) -> np.ndarray:
    """The f32 scales, without the zero-points that some have."""
    return np.asarray(jax.tree.leaves(codec.scale.decode(jnp.asarray(stored)))[0])


def _codes_apart(plan: LeafPlan, codec: Any, *scales: Any) -> np.ndarray:
    """How far codes may be apart: by 1, and by what another exponent of a group shifts them.

    A moment that almost cancels may be the smallest of its group, and moves the exponent.
    """
    if "expanded" not in codec.name:
        return np.ones(plan.shape)
    k, k2 = (np.asarray(codec.scale.decode(jnp.asarray(stored))[1]) for stored in scales)
    shift = np.floor(tolerances.EXPANDED_CODES * np.abs(k / k2 - 1))
    return 1 + np.repeat(shift, plan.group_size, axis=-1)[..., : plan.shape[-1]]


def _compare_state(plan: LeafPlan, one: Leaf, other: Leaf) -> None:
    both = (stored_slots(plan.slots, state) for state in (one, other))
    forms = plan.forms
    for slot, *pair in zip(plan.slots, *both, strict=True):
        form = StoredSlot(forms[slot.name], forms[f"{slot.name}_scale"])
        (values, _), (values2, _) = pair
        if slot.codec is None:
            assert (values.shape, values.dtype) == (form.codes.shape, form.codes.dtype)
            size = np.abs(values).max() * tolerances.REORDERED_SLOT
            np.testing.assert_allclose(values2, values, rtol=0, atol=size)
            continue
        assert all(StoredSlot(*stored).is_like(form) for stored in pair)
        codes, codes2 = (
            np.asarray(slot.codec.unpack(stored, plan.shape[-1]), np.int32) for stored, _ in pair
        )
        scales, scales2 = (decoded_scales(slot.codec, scales) for _, scales in pair)
        scale = slot.codec.scale  # one spacing apart; rounded to nearest, half of it is the error
        rtol, atol = scale.relative_error * (1 if scale.name == "e8m8" else 2), 0.0
        if not rtol:  # f32: the group's largest value itself
            rtol, atol = 1e-6, np.nanmax(np.abs(scales)) * tolerances.REORDERED_SLOT
        np.testing.assert_allclose(scales2, scales, rtol=rtol, atol=atol)
        decoded, decoded2 = (
            np.asarray(_decoded(slot.codec, *stored, plan.group_size, plan.shape[-1]))
            for stored in pair
        )
        np.testing.assert_array_equal(np.isnan(decoded2), np.isnan(decoded))
        off = np.where(np.isnan(decoded), 0, np.abs(codes - codes2))
        allowed = max(1, tolerances.REORDERED_CODES * off.size)
        most = _codes_apart(plan, slot.codec, *(stored[1] for stored in pair))
        assert (off <= most).all() and (off > 0).sum() <= allowed, (slot.name, off.max(), allowed)
