"""Facts about the slots of optimizer states, by state type and field, and a map over slots."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import optax

from optax_lowmem._src.arrays.trees import DICTS, is_named_tuple, is_state
from optax_lowmem._src.arrays.typing import PyTree


@dataclasses.dataclass(frozen=True)
class SlotFacts:
    """Facts about a slot that determine its codec."""

    signed: bool  # whether its values may be negative
    # whether it only grows, so that stochastic rounding would ratchet it up
    running_maximum: bool = False
    # whether it starts as one constant, so that `init` allocates no f32 array
    constant_init: bool = True
    moment: int = 0  # 1 for a first moment, 2 for a second moment


_FIRST = SlotFacts(signed=True, moment=1)
_SECOND = SlotFacts(signed=False, moment=2)
_UNKNOWN = SlotFacts(signed=True, constant_init=False)

_ADAMS = ("ScaleByAdamState", "ScaleByAmsgradState", "ScaleByBeliefState", "ScaleByNovogradState",
          "ScaleByRStdDevState")  # fmt: skip
_ROOT_MEAN_SQUARES = ("ScaleByAdemamixState", "ScaleByRmsState", "ScaleByRmsWithCountState")
_AVERAGES = ("DAdaptAdamWState", "MomoAdamState", "ProdigyState")
SLOTS: dict[tuple[str, str], SlotFacts] = {
    **{(state, "mu"): _FIRST for state in (*_ADAMS, "ScaleByLionState", "MuonState")},
    **{(state, "nu"): _SECOND for state in (*_ADAMS, *_ROOT_MEAN_SQUARES)},
    **{(state, "exp_avg"): _FIRST for state in (*_AVERAGES, "MomoState")},
    **{(state, "exp_avg_sq"): _SECOND for state in _AVERAGES},
    ("DAdaptAdamWState", "grad_sum"): SlotFacts(signed=True),
    ("ProdigyState", "grad_sum"): SlotFacts(signed=True),
    ("ScaleByAdemamixState", "m1"): _FIRST,
    ("ScaleByAdemamixState", "m2"): _FIRST,
    ("ScaleBySimplifiedAdEMAMixState", "m"): _FIRST,
    ("ScaleBySimplifiedAdEMAMixState", "n"): _SECOND,
    ("MadgradState", "grad_sum_sq"): SlotFacts(signed=False, moment=2),
    ("MadgradState", "s"): SlotFacts(signed=True),
    ("SophiaState", "mu"): _FIRST,
    ("ScaleByAmsgradState", "nu_max"): SlotFacts(signed=False, running_maximum=True, moment=2),
    ("ScaleByAdanState", "m"): _FIRST,
    ("ScaleByAdanState", "v"): _FIRST,  # despite its name, signed: mean of gradient differences
    ("ScaleByAdanState", "n"): _SECOND,
    ("ScaleByAdanState", "g"): SlotFacts(signed=True),
    ("ScaleByRssState", "sum_of_squares"): SlotFacts(signed=False, moment=2),
    ("FactoredState", "v"): _SECOND,  # of parameters that are not factored; otherwise one element
    ("TraceState", "trace"): _FIRST,
    ("EmaState", "ema"): _FIRST,
}

_OURS_FIRST = SlotFacts(signed=True, constant_init=False, moment=1)
_OURS_SECOND = SlotFacts(signed=False, constant_init=False, moment=2)
# of this library's optimizers with f32 slots: scale_by_adam_mini and its variants
_OURS: dict[tuple[str, str], SlotFacts] = {
    ("FlashAdamState", "mu"): _OURS_FIRST,
    ("FlashAdamState", "nu"): _OURS_SECOND,
    ("FlashLionState", "mu"): _OURS_FIRST,
    ("FlashSgdState", "mu"): _OURS_FIRST,
    ("SoapState", "mu"): _OURS_FIRST,
    ("SoapState", "nu"): _OURS_SECOND,
}


def register_slot(
    state_type: str, field: str, *, signed: bool, running_maximum: bool = False
) -> None:
    """Register a slot of a custom optimizer for `compress_state`.

    Args:
      state_type: name of the state's NamedTuple.
      field: name of its field.
      signed: whether values may be negative; unsigned codecs raise an error for such a slot.
      running_maximum: whether it only grows (amsgrad's `nu_max`): then always rounded to nearest.

    Example:
      >>> register_slot("MyState", "second_moment", signed=False)
    """
    SLOTS[(state_type, field)] = SlotFacts(signed, running_maximum, constant_init=False)


# state type -> why its slots cannot be rounded
REFUSED = {
    "ScaleByRStdDevState": "it takes the root of nu - mu^2, which rounding can make negative: use "
    "rmsprop without centered=True"
}


def is_known(state: object, field: str) -> bool:
    """Return whether a field of a state is a known slot, of optax or this library."""
    name = type(state).__name__, field
    return name in SLOTS or name in _OURS


def facts(state: object, field: str, ours: bool = False) -> SlotFacts:
    """Return the facts about a field of a state; an unknown field counts as signed.

    The slots of this library's optimizers are known with `ours` only.
    """
    name = type(state).__name__, field
    return (_OURS.get(name) if ours else None) or SLOTS.get(name, _UNKNOWN)


def map_slots(
    function: Callable[[PyTree, str, PyTree], PyTree], state: optax.OptState, in_field: bool = False
) -> optax.OptState:
    """Replace every NamedTuple field of a state by function(state, field, value), in order.

    If `function` returns the same object, the field is not a slot, and its value is searched for
    inner states; NamedTuples of weights are not searched. Keys of a dict are visited in JAX's
    order, which is the same before and after jit.
    """
    if is_named_tuple(state):
        known = is_state(state) or any(type(state).__name__ == kind for kind, _ in SLOTS)
        if in_field and not known:
            return state
        fields = {}
        for name in state._fields:
            value = getattr(state, name)
            new = function(state, name, value)
            fields[name] = map_slots(function, value, True) if new is value else new
        kind: Any = type(state)  # mypy would take the call for the creation of a class
        return kind(**fields)
    if type(state) in (tuple, list):
        return type(state)(map_slots(function, part, in_field) for part in state)
    if type(state) in DICTS:
        keys = sorted(state) if type(state) is dict else state
        new = {key: map_slots(function, state[key], in_field) for key in keys}
        return type(state)((key, new[key]) for key in state)
    return state


def scale_name(slot: str, known: Mapping[str, PyTree]) -> str:
    """Return the key for the scales of a slot's next occurrence."""
    same = sum(name.startswith(f"{slot}_scale") for name in known)
    return f"{slot}_scale" + (f"_{same}" if same else "")
