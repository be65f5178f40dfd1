"""AdamW, Lion and SGD in float64: optax's formulas and the exact parts of Algorithms 4, 5 and 6.

A rule maps (slots, gradient, t) to (direction, slots), t from 1; `step` adds decay and rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from .codecs import Array

Slots = dict[str, Array]


def adam_direction(
    slots: Slots, g: Array, t: int, *, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, nesterov=False
) -> tuple[Array, Slots]:
    """optax.scale_by_adam; Algorithm 4's lines 14 to 17 when eps_root = 0 and not nesterov."""
    mu = b1 * slots["mu"] + (1 - b1) * g
    nu = b2 * slots["nu"] + (1 - b2) * g**2
    mu_hat = mu / (1 - b1**t)
    if nesterov:  # the momentum is debiased one step ahead of the gradient
        mu_hat = b1 * mu / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
    nu_hat = nu / (1 - b2**t)
    return mu_hat / (np.sqrt(nu_hat + eps_root) + eps), {"mu": mu, "nu": nu}


def lion_direction(slots: Slots, g: Array, t: int, *, b1=0.9, b2=0.99) -> tuple[Array, Slots]:
    """Algorithm 6, lines 9 and 10; sign(0) = 0."""
    del t
    mu = slots["mu"]
    return np.sign(b1 * mu + (1 - b1) * g), {"mu": b2 * mu + (1 - b2) * g}


def sgd_direction(
    slots: Slots, g: Array, t: int, *, momentum: float | None = 0.9, nesterov=False
) -> tuple[Array, Slots]:
    """Algorithm 5, line 9 (optax.trace); momentum=None has no slot and passes the gradient on."""
    del t
    if momentum is None:
        return g, {}
    mu = momentum * slots["mu"] + g
    return (g + momentum * mu if nesterov else mu), {"mu": mu}


@dataclasses.dataclass(frozen=True)
class Rule:
    name: str
    slots: tuple[str, ...]
    direction: Callable[..., tuple[Array, Slots]]


adamw = Rule("adamw", ("mu", "nu"), adam_direction)
lion = Rule("lion", ("mu",), lion_direction)
sgd = Rule("sgd", ("mu",), sgd_direction)
RULES = {r.name: r for r in (adamw, lion, sgd)}


def init_slots(rule: Rule, theta: Array) -> Slots:
    return {name: np.zeros(np.shape(theta)) for name in rule.slots}


def step(
    rule: Rule,
    theta: Array,
    slots: Slots,
    g: Array,
    t: int,
    *,
    lr: float | Callable[[int], float],
    weight_decay: float = 0.0,
    decoupled: bool = True,
    peak_lr: float | None = None,
    **hyper,
) -> tuple[Array, Slots]:
    """One step from the given state: theta - lr (u + wd theta), or wd theta added to g.

    A schedule is called with t - 1, optax's count. peak_lr: weight decay is scaled by
    lr / peak_lr instead of by lr, so that it does not depend on the learning rate's size.
    """
    theta, g = np.asarray(theta, np.float64), np.asarray(g, np.float64)
    rate = lr(t - 1) if callable(lr) else lr
    if not decoupled:
        g = g + weight_decay * theta
    u, slots = rule.direction(
        {k: np.asarray(s, np.float64) for k, s in slots.items()}, g, t, **hyper
    )
    decay = 0.0
    if decoupled:
        decay = weight_decay * (rate if peak_lr is None else rate / peak_lr)
    return theta - rate * u - decay * theta, slots


def fed_back(
    rule: Rule, slots: Slots, error: Array, exact: Array, t: int, *, lr: float,
    b1=0.9, b2=0.999, eps=1e-8, momentum=0.9, least=2.0**-11,
) -> Array:  # fmt: skip
    """The momentum after a step to `exact`, which was rounded to exact - error.

    As ECO (arXiv 2601.22101), m + (1 - 1/b) e / lr for a direction m / d, in units of d; but a rate
    counts as `least` of the weight or more.
    """
    b, divisor = momentum, 1.0
    if rule.name == "adamw":
        b, divisor = b1, (np.sqrt(slots["nu"] / (1 - b2**t)) + eps) * (1 - b1**t)
    rate = np.maximum(lr, np.abs(exact) * least)
    return slots["mu"] + (1 - 1 / b) * error / rate * divisor


def trajectory(
    rule: Rule, theta: Array, grads: Sequence[Array], **hyper
) -> list[tuple[Array, Slots]]:
    """[(theta, slots)] before the first and after every step on a fixed stream of gradients."""
    states = [(np.asarray(theta, np.float64), init_slots(rule, theta))]
    for t, g in enumerate(grads, start=1):
        states.append(step(rule, *states[-1], g, t, **hyper))
    return states


def teacher_forced(
    rule: Rule, states: Sequence[tuple[Array, Slots]], grads: Sequence[Array], **hyper
) -> list[tuple[Array, Slots]]:
    """The state one exact step after each recorded one, to compare the next recorded with."""
    return [
        step(rule, *state, g, t, **hyper)
        for t, (state, g) in enumerate(zip(states, grads, strict=False), start=1)
    ]


def stable_adamw(
    theta: Array,
    g: Array,
    v: Array,
    u: Array,
    t: int,
    *,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    threshold: float = 1.0,
) -> tuple[Array, Array, Array, float]:
    """Algorithm 2 of Wortsman et al. with the maximum of appendix F.2: weights, v, u, RMS_t.

    `v` and `u` are the debiased averages themselves, by debiased betas.
    """
    beta1 = b1 * (1 - b1 ** (t - 1)) / (1 - b1**t)
    beta2 = b2 * (1 - b2 ** (t - 1)) / (1 - b2**t)
    v = beta1 * v + (1 - beta1) * g
    u = beta2 * u + (1 - beta2) * g**2
    rms = np.sqrt(np.mean(g**2 / np.maximum(u, eps**2)))
    rate = lr / max(1, rms / threshold)
    theta = theta - rate * weight_decay * theta - rate * v / (np.sqrt(u) + eps)
    return theta, v, u, rms
