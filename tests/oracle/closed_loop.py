"""Closed-loop probes of the codecs: decode, update, encode, beside exact moments."""

from __future__ import annotations

import numpy as np

from . import codecs, scales
from .codecs import Array, Codec

STORAGES = ("fp16", "e8m8", "f32", "stochastic", "stochastic_f32", "stochastic_up")


def store(
    codec: Codec,
    x: Array,
    storage: str,
    rng: np.random.Generator,
    *,
    codes_by: str = "stored",
    floor: bool = False,
) -> Array:
    """decode(encode(x)) on a group view (n_groups, G).

    'stochastic': codes and 8+8-bit scale both stochastic; 'stochastic_f32': codes only;
    'stochastic_up': stochastic codes, 8+8-bit scale rounded up, so that no ratio exceeds 1.
    """
    exact = codecs.exact_scale(codec, x)
    noise = rng.random(x.shape) if storage.startswith("stochastic") else None
    if storage == "stochastic":
        stored = scales.round_scale(exact, "e8m8", rng.random(exact.shape))
    elif storage == "stochastic_up":
        stored = scales.round_scale(exact, "e8m8", np.zeros(exact.shape))
    else:
        stored = scales.round_scale(exact, storage.removeprefix("stochastic_"))
    used = stored if codes_by == "stored" else exact
    codes, _ = codecs.encode(codec, x, used, noise=noise, floor=floor)
    return codecs.decode(codec, codes, stored)


# -- the table: how well a stored second moment follows the true one ---------------------------


def variance_ratio(
    case: str, storage: str, *, groups=64, group_size=32, steps=None, change=3000, seed=0
) -> Array:
    """sqrt(v stored / v true) of the watched elements at the end; take its median.

    "constant": |g| is one number in a group. "shrink", "one_drops": normal gradients with
    log-normal scales (sigma 1) inside a group, times 0.1 from step `change` on, all of them or
    the first of a group.
    """
    rng = np.random.default_rng(seed)
    steps = steps or (6000 if case == "constant" else 9000)
    spread = np.exp(rng.normal(size=(groups, group_size)))
    base = 2.0 ** rng.uniform(
        -12, -8, size=(groups, 1)
    )  # so that scales fall everywhere in a binade
    stored, true = np.zeros((2, groups, group_size))
    for t in range(steps):
        g = base if case == "constant" else base * spread * rng.normal(size=spread.shape)
        if t >= change and case == "shrink":
            g = g * 0.1
        elif t >= change and case == "one_drops":
            g[:, 0] *= 0.1
        true = 0.999 * true + 0.001 * g**2
        stored = store(codecs.sqrt, 0.999 * stored + 0.001 * g**2, storage, rng)
    ratio = np.sqrt(stored / true)
    return ratio[:, 0] if case == "one_drops" else ratio


def code_space_bias(root: float = 1e-3, levels: int = 255) -> float:
    """E[decoded] / v of a sqrt code rounded stochastically on the code axis, at root x maximum."""
    code = root * levels
    lo, p_up = np.floor(code), code - np.floor(code)
    return float((p_up * (lo + 1) ** 2 + (1 - p_up) * lo**2) / code**2)


# -- the variance floor ------------------------------------------------------------------------


def lonely_gradient(
    *, floor: bool, storage="fp16", codes_by="exact", size=0.01, share=0.03, steps=1000, eps=1e-8
) -> tuple[Array, Array]:
    """(stored, exact) Adam updates / lr of an element after one gradient share * size, then 0.

    Its 31 neighbours stay at |g| = size; debiasing is over (t is large). Index 0 is the step
    after that gradient.
    """
    rng = np.random.default_rng(0)
    g = np.full((1, 32), size)
    g[0, 0] = 0.0
    mu, nu = g.copy(), g**2
    exact_mu, exact_nu = mu.copy(), nu.copy()
    updates = np.zeros((2, steps + 1))
    for t in range(steps + 1):
        g[0, 0] = share * size if t == 0 else 0.0
        mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g**2
        exact_mu, exact_nu = 0.9 * exact_mu + 0.1 * g, 0.999 * exact_nu + 0.001 * g**2
        updates[0, t] = (mu / (np.sqrt(nu) + eps))[0, 0]
        updates[1, t] = (exact_mu / (np.sqrt(exact_nu) + eps))[0, 0]
        mu = store(codecs.softsign, mu, storage, rng, codes_by=codes_by)
        nu = store(codecs.sqrt, nu, storage, rng, codes_by=codes_by, floor=floor)
    return updates[0, 1:], updates[1, 1:]


def lognormal_direction(
    *, floor: bool, mu_storage="fp16", nu_storage="fp16", codes_by="exact", groups=512, steps=4000,
    size=1e-3, eps=1e-8, seed=0, warm=False,
) -> dict[str, float]:  # fmt: skip
    """NMSE and maximum of decoded m / sqrt(v) under log-normal gradient scales (sigma 1).

    warm: start at v = E[g^2], for short runs.
    """
    rng = np.random.default_rng(seed)
    spread = size * np.exp(rng.normal(size=(groups, 32)))
    mu, true_mu = np.zeros((2, groups, 32))
    nu, true_nu = np.stack([spread**2 * warm] * 2)
    for _ in range(steps):
        g = spread * rng.normal(size=spread.shape)
        true_mu, true_nu = 0.9 * true_mu + 0.1 * g, 0.999 * true_nu + 0.001 * g**2
        mu = store(codecs.softsign, 0.9 * mu + 0.1 * g, mu_storage, rng, codes_by=codes_by)
        nu = store(
            codecs.sqrt, 0.999 * nu + 0.001 * g**2, nu_storage, rng, codes_by=codes_by, floor=floor
        )
    stored, true = mu / (np.sqrt(nu) + eps), true_mu / (np.sqrt(true_nu) + eps)
    return {
        "nmse": float(np.sum((stored - true) ** 2) / np.sum(true**2)),
        "max": float(np.abs(stored).max()),
        "true_max": float(np.abs(true).max()),
        "zero_codes": int(np.sum(nu == 0)),
    }


# -- stuck momentum codes ----------------------------------------------------------------------


def sleeping_drift(
    storage: str = "e8m8",
    *,
    start: float = 0.003,
    steps: int = 2400,
    groups: int = 64,
    decay=0.9,
    seed=0,
) -> float:
    """Mean drift sum(m) of elements asleep beside a live neighbour, over the exact drift.

    The neighbours' momentum is 1, the sleeper starts at `start` (stored once) and gets no
    gradient. A stuck code's drift grows with `steps`: at the defaults (one gradient of 0.03
    under Adam) it is 316.
    """
    rng = np.random.default_rng(seed)
    mu = np.ones((groups, 32))
    mu[:, 0] = start
    mu = store(codecs.softsign, mu, storage, rng)
    drift = np.zeros(groups)
    for _ in range(steps):
        mu[:, 0] *= decay
        mu[:, 1:] = 1.0  # a steady gradient: m = decay * 1 + (1 - decay) * 1
        drift += mu[:, 0]
        mu = store(codecs.softsign, mu, storage, rng)
    exact = start * decay * (1 - decay**steps) / (1 - decay)
    return float(drift.mean() / exact)
