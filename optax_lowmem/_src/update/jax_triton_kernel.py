"""The step of several leaves as one hand-written Triton kernel.

With `jax_triton_numerics` the second home of some formulas, and the only one: Adam, Lion and
momentum, the default codecs, and the split on the bits. Its rules say what `optimizers` say, which
is the specification, in fewer instructions: what belongs to a group is multiplied together once a
group.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations: what has none is a value on the GPU.

import functools
import linecache
from typing import Any

import triton
import triton.language as tl

from optax_lowmem._src.update import jax_triton_numerics as numerics

# Of a leaf, in the order in which the kernel takes their pointers.
ROLES = ("g", "p", "correction", "mu", "nu", "mu_scale", "nu_scale", "update")

# ---- memory --------------------------------------------------------------------------------------


@triton.jit
def _load(pointer, offsets, mask, MASKED: tl.constexpr):
    """Elements of a tile, bf16 as its bits; 0 where there are none."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.uint16), bitcast=True)
    if MASKED:
        return tl.load(pointer + offsets, mask=mask, other=0)
    else:
        return tl.load(pointer + offsets)


@triton.jit
def _widen(stored):
    """f32 of what `_load` gives for a float."""
    if stored.dtype == tl.uint16:
        return numerics.as_float(stored.to(tl.uint32) << 16)
    else:
        return stored.to(tl.float32)


@triton.jit
def _store(pointer, offsets, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, values, mask=mask)
    else:
        tl.store(pointer + offsets, values)


@triton.jit
def _store_upper(pointer, offsets, bits, mask, MASKED: tl.constexpr):
    """Stores the bf16 that the upper half of 32 bits is."""
    pointer = pointer.to(tl.pointer_type(tl.uint16), bitcast=True)
    _store(pointer, offsets, (bits >> 16).to(tl.uint16), mask, MASKED)


@triton.jit
def _store_rounded(pointer, offsets, values, mask, MASKED: tl.constexpr):
    """Stores f32 values in the dtype of a pointer."""
    if pointer.dtype.element_ty == tl.bfloat16:
        _store_upper(pointer, offsets, numerics.round_to_bf16(values), mask, MASKED)
    else:
        _store(pointer, offsets, values.to(pointer.dtype.element_ty), mask, MASKED)


# ---- leaves --------------------------------------------------------------------------------------


@triton.constexpr_function
def _first_tile(leaves, index):
    return leaves[index][0]


@triton.constexpr_function
def _length(leaves, index):
    return leaves[index][1]


@triton.constexpr_function
def _groups(leaves, index):
    return leaves[index][2]


@triton.constexpr_function
def _rank(leaves, index):
    return len(leaves[index][3])


@triton.constexpr_function
def _below(leaves, index, axis):
    return leaves[index][3][axis][0]


@triton.constexpr_function
def _factor(leaves, index, axis):
    return leaves[index][3][axis][1]


@triton.jit
def _find_leaf(
    arrays,
    program,
    LEAVES: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Find the leaf of a program and its properties, by bisection.

    Returns:
      the pointers of the leaf; its index; the first group of the tile; the number of groups of the
      leaf; and, per group of the tile, the number that its random bits are mixed from, its offset
      in the array and its number of elements, the last two in units of ALIGNMENT.
    """
    if HIGH - LOW == 1:
        first = (program - _first_tile(LEAVES, LOW)) * ROWS
        leaf = tl.full((), LOW, tl.int32)
        count = tl.full((), _groups(LEAVES, LOW), tl.int32)
        N: tl.constexpr = _length(LEAVES, LOW)
        PER_ROW: tl.constexpr = (N + GROUP_SIZE - 1) // GROUP_SIZE
        group = first + tl.arange(0, ROWS)
        column = group % PER_ROW * GROUP_SIZE
        begin = (group // PER_ROW * N + column) // ALIGNMENT
        size = tl.minimum(N - column, GROUP_SIZE) // ALIGNMENT
        place = tl.full((ROWS,), 0, tl.uint32)
        for axis in tl.static_range(_rank(LEAVES, LOW)):
            quotient = group.to(tl.uint32) // _below(LEAVES, LOW, axis)
            place += quotient * _factor(LEAVES, LOW, axis)
        return arrays[LOW], leaf, first, count, place, begin, size
    else:
        MIDDLE: tl.constexpr = (LOW + HIGH) // 2
        if program < _first_tile(LEAVES, MIDDLE):
            found = _find_leaf(arrays, program, LEAVES, LOW, MIDDLE, GROUP_SIZE, ROWS, ALIGNMENT)
        else:
            found = _find_leaf(arrays, program, LEAVES, MIDDLE, HIGH, GROUP_SIZE, ROWS, ALIGNMENT)
        return found


@triton.jit
def _elements(
    group,
    exists,
    begin,
    size,
    lanes,
    LANES: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Offsets and mask of the elements of groups."""
    if FLAT:
        offsets = group[:, None] * LANES + lanes[None, :]
        mask = exists[:, None]
    else:
        offsets = (begin * ALIGNMENT)[:, None] + lanes[None, :]
        mask = (lanes[None, :] < (size * ALIGNMENT)[:, None]) & exists[:, None]
    # 8 neighbours a thread, also of bytes: then every array has its elements in the same threads
    return tl.max_contiguous(offsets, (1, 8 if LANES > 8 else LANES)), mask


# ---- rules ---------------------------------------------------------------------------------------


@triton.constexpr_function
def _place(names, name):
    every = names.split()
    return every.index(name) if name in every else -1


@triton.jit
def _scalar(scalars, NAMES: tl.constexpr, NAME: tl.constexpr):
    """A hyperparameter."""
    tl.static_assert(_place(NAMES, NAME) >= 0, "the rule does not give it")
    return tl.load(scalars + _place(NAMES, NAME))


@triton.jit
def _scale(scalars, NAMES: tl.constexpr, NAME: tl.constexpr):
    """A hyperparameter that is 1 where it is not given."""
    if _place(NAMES, NAME) >= 0:
        return tl.load(scalars + _place(NAMES, NAME))
    else:
        return 1.0


@triton.jit
def _advance(g, mu, mu_scale, nu, nu_scale, scalars, FORMULA: tl.constexpr, NAMES: tl.constexpr):
    """Direction times `lr`, new mu, new nu and its root (mu again where there is no nu).

    `mu` comes as a share of its group's scale, and of `nu` the root, as codes.
    """
    lr = _scale(scalars, NAMES, "lr")
    if FORMULA == "adam":
        kept = (_scalar(scalars, NAMES, "b1") * mu_scale)[:, None]
        mu = kept * mu + _scalar(scalars, NAMES, "one_minus_b1") * g
        share = nu_scale * (1.0 / 255.0)
        kept = (_scalar(scalars, NAMES, "b2") * (share * share))[:, None]
        nu = kept * (nu * nu) + _scalar(scalars, NAMES, "one_minus_b2") * g * g
        root = tl.sqrt(nu)
        bound = root * _scalar(scalars, NAMES, "root_nu_scale") + _scalar(scalars, NAMES, "eps")
        return lr * mu * numerics.reciprocal(bound), mu, nu, root
    elif FORMULA == "lion":
        mu = mu * mu_scale[:, None]
        between = _scalar(scalars, NAMES, "b1") * mu + _scalar(scalars, NAMES, "one_minus_b1") * g
        mu = _scalar(scalars, NAMES, "b2") * mu + _scalar(scalars, NAMES, "one_minus_b2") * g
        step = tl.where(between > 0, lr, tl.where(between < 0, -lr, lr * between))
        return step, mu, mu, mu
    else:
        tl.static_assert(FORMULA == "momentum" or FORMULA == "nesterov")
        momentum = _scalar(scalars, NAMES, "momentum")
        mu = (momentum * mu_scale)[:, None] * mu + _scale(scalars, NAMES, "share") * g
        step = mu
        if FORMULA == "nesterov":
            step = g + momentum * mu
        return lr * step, mu, mu, mu


@triton.jit
def _land(
    master,
    old,
    row,
    lane,
    BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DIRECT: tl.constexpr,
    UPDATE: tl.constexpr,
):
    """Correction, and bf16 bits (upper half), of master weights that follow `old` bf16 bits.

    The bits are those of the new weight, or of the one to aim an update at.
    """
    kept = numerics.lifted(master, row, lane, BITS, STOCHASTIC)
    target = numerics.upper_rounded(kept)
    if UPDATE == "float32":
        if not DIRECT:  # an update in f32 may miss a weight that is too small beside the old one
            missed = tl.abs(master) < tl.abs(numerics.as_float(old)) * 2.0**-16
            kept = tl.where(missed, 0, kept)
    else:
        reached = numerics.reached(old, target)
        kept = numerics.correction(kept, target, reached)
        if DIRECT:
            target = reached
    return kept >> (32 - BITS), target


@triton.jit
def _move(weight, step, WEIGHT: tl.constexpr, DIRECT: tl.constexpr, UPDATE: tl.constexpr):
    """The weight after a step, its update, or where there is no weight the direction."""
    if DIRECT:
        if UPDATE == "bfloat16":
            step = numerics.as_float(numerics.round_to_bf16(step))
        elif UPDATE == "float16":
            step = step.to(tl.float16).to(tl.float32)
        return weight - step
    elif WEIGHT:
        return -1.0 * step  # a minus would make 0.0 of 0.0
    else:
        return step


# ---- the step ------------------------------------------------------------------------------------


@triton.jit
def step_tile(
    scalars,
    keys,
    lane_bits,
    arrays,
    FORMULA: tl.constexpr,
    NAMES: tl.constexpr,
    LEAVES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    MASKED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WEIGHT: tl.constexpr,
    SPLIT_BITS: tl.constexpr,
    SPLIT_STOCHASTIC: tl.constexpr,
    DIRECT: tl.constexpr,
    DECAYS: tl.constexpr,
    UPDATE: tl.constexpr,
):
    """One tile [groups, lanes] of a leaf, a group a row.

    Args:
      scalars: hyperparameters, f32.
      keys: of the leaves, uint32.
      lane_bits: C of the lanes times the salts of mu, nu and masters, uint32 [leaves, 3, lanes].
      arrays: a tuple of pointers a leaf, in the order of ROLES.
      FORMULA: of the rule.
      NAMES: of the hyperparameters, with spaces between them.
      LEAVES: of each leaf its first tile, its last axis, its groups and, for each axis of its
        scales, d and f: what R is mixed from is the key plus all (number of the group // d) f.
      GROUP_SIZE: neighbours that share a scale.
      ROWS: of a tile.
      LANES: of a tile.
      FLAT: whether every group of every leaf is full.
      ALIGNMENT: divides what of the others' groups is an offset or a size.
      MASKED: whether some tile is not.
      STOCHASTIC: rounding of the codes.
      WEIGHT: whether there is a weight, and not a bare direction.
      SPLIT_BITS: 24, 32, or 0 for no split.
      SPLIT_STOCHASTIC: rounding of the master weights.
      DIRECT: whether the result is the new weight.
      DECAYS: whether weight decay applies.
      UPDATE: name of the dtype of the update that takes a weight to the next.
    """
    program = tl.program_id(0)
    pointers, leaf, first, count, place, begin, size = _find_leaf(
        arrays, program, LEAVES, 0, len(LEAVES), GROUP_SIZE, ROWS, ALIGNMENT
    )
    g_at, p_at, correction_at, mu_at, nu_at, mu_scale_at, nu_scale_at, update_at = pointers
    group = first + tl.arange(0, ROWS)
    exists = group < count
    lanes = tl.arange(0, LANES)
    offsets, mask = _elements(group, exists, begin, size, lanes, LANES, FLAT, ALIGNMENT)

    # everything is asked for before anything is waited for, which the barrier below sees to
    g = _load(g_at, offsets, mask, MASKED)
    mu_codes = _load(mu_at, offsets, mask, MASKED)
    mu_scale = _load(mu_scale_at, group, exists, MASKED)
    nu_codes, nu_scale = mu_codes, mu_scale
    if FORMULA == "adam":
        nu_codes = _load(nu_at, offsets, mask, MASKED)
        nu_scale = _load(nu_scale_at, group, exists, MASKED)
    if WEIGHT:
        p = _load(p_at, offsets, mask, MASKED)
    if SPLIT_BITS > 0:
        correction = _load(correction_at, offsets, mask, MASKED)
    key = tl.load(keys + leaf)
    mu_lane = tl.load(lane_bits + leaf * (3 * LANES) + lanes)[None, :]
    nu_lane = tl.load(lane_bits + leaf * (3 * LANES) + LANES + lanes)[None, :]
    master_lane = nu_lane
    if SPLIT_STOCHASTIC:
        master_lane = tl.load(lane_bits + leaf * (3 * LANES) + 2 * LANES + lanes)[None, :]
    tl.debug_barrier()
    row = numerics.mix(key + place)

    g = _widen(g) * _scale(scalars, NAMES, "gradient_scale")
    mu = numerics.expand_mu(mu_codes)
    mu_scale = numerics.as_float(mu_scale.to(tl.uint32) << 15)
    nu = nu_codes.to(tl.float32)
    weight = g
    if SPLIT_BITS > 0:
        old = p.to(tl.uint32) << 16
        weight = numerics.join(old, correction, SPLIT_BITS)
    elif WEIGHT:
        weight = _widen(p)
    if WEIGHT and DECAYS and _place(NAMES, "l2") >= 0:
        g = g + _scalar(scalars, NAMES, "l2") * weight
    step, mu, nu, root = _advance(g, mu, mu_scale, nu, nu_scale, scalars, FORMULA, NAMES)

    if FORMULA == "adam":
        nu_codes, nu_scale = numerics.encode_nu(nu, root, row, nu_lane, STOCHASTIC)
        _store(nu_at, offsets, nu_codes, mask, MASKED)
        _store(nu_scale_at, group, nu_scale, exists, MASKED)
    mu_codes, mu_scale = numerics.encode_mu(mu, row, mu_lane, STOCHASTIC)
    _store(mu_at, offsets, mu_codes, mask, MASKED)
    _store(mu_scale_at, group, mu_scale, exists, MASKED)
    if WEIGHT and DECAYS and _place(NAMES, "decay") >= 0:
        step = step + _scalar(scalars, NAMES, "decay") * weight
    if SPLIT_BITS > 0:
        master = weight - step
        kept, target = _land(
            master, old, row, master_lane, SPLIT_BITS, SPLIT_STOCHASTIC, DIRECT, UPDATE
        )
        _store(correction_at, offsets, kept, mask, MASKED)
        _store_upper(update_at, offsets, target, mask, MASKED)
    else:
        result = _move(weight, step, WEIGHT, DIRECT, UPDATE)
        _store_rounded(update_at, offsets, result, mask, MASKED)


@functools.cache
def entry(parameters: tuple[str, ...], leaves: tuple[tuple[str, ...], ...]) -> Any:
    """`step_tile` with its pointers one by one, which is how jax_triton passes arrays.

    Args:
      parameters: names of the pointers, `scalars`, `keys` and `lane_bits` among them.
      leaves: of each leaf, the names of its pointers in the order of ROLES.
    """
    statics = [name for name in step_tile.arg_names if name.isupper()]
    signature = [*parameters, *(f"{name}: tl.constexpr" for name in statics)]
    arrays = "".join(f"({', '.join(names)}), " for names in leaves)
    call = ", ".join(["scalars", "keys", "lane_bits", f"({arrays})", *statics])
    source = f"def fused_update({', '.join(signature)}):\n    step_tile({call})\n"
    file = f"<fused_update {hash((parameters, leaves)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {"tl": tl, "step_tile": step_tile, "__name__": __name__}
    exec(compile(source, file, "exec"), names)
    return triton.jit(names["fused_update"])
