"""Loss spikes and RMS spikes (StableAdamW, appendix E) of whole recorded series."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

# Appendix E's constants; the decay of the running statistics is ours, the paper gives none.
RMS_THRESHOLD = 2.3
DEVIATIONS = 3.2
IGNORE = 1000
INTERVAL = 10
LEAST = 2
LEAD = 8
DECAY = 0.99


def check_constants(ignore: int, interval: int, least: int, decay: float) -> None:
    """Raises unless the constants of the heuristics are in range."""
    for name, value, low in (("ignore", ignore, 0), ("interval", interval, 1), ("least", least, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{name} is a number of steps, at least {low}, got {value!r}")
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be in [0, 1), got {decay!r}")


def advance(
    seen: Any, mean: Any, variance: Any, loss: Any, decay: Any, maximum: Callable = max
) -> tuple[Any, Any]:
    """Running mean and variance with one more loss, of numbers or (with jnp.maximum) of arrays.

    Exact weighted moments: plain ones of the first 1 / (1 - decay) losses, exponential after.
    """
    weight = maximum(1 / (seen + 1), 1 - decay)
    change = loss - mean
    return mean + weight * change, (1 - weight) * (variance + weight * change * change)


def rms_spikes(
    rms: npt.ArrayLike,
    *,
    threshold: float = RMS_THRESHOLD,
    ignore: int = IGNORE,
    interval: int = INTERVAL,
) -> np.ndarray:
    r"""Steps at which an RMS spike starts: :math:`\{t : \mathrm{RMS}_t \ge 2.3\}`, deduplicated.

    Args:
      rms: RMS_t of one tensor at steps 0, 1, ... NaN and inf count as spikes.
      threshold: of RMS_t.
      ignore: steps at the beginning, when the learning rate is low, that have no spikes.
      interval: what spikes t, ..., t + interval - 1 is one spike, at t; the next one may start
        another.

    Returns:
      Step numbers, ascending.

    Raises:
      ValueError: for a series that is not one-dimensional, or constants out of range.

    Example:
      >>> import numpy as np, optax_lowmem as lowmem
      >>> rms = np.ones(2000)
      >>> rms[[500, 1200, 1203, 1500]] = 3.0
      >>> lowmem.diagnostics.rms_spikes(rms).tolist()
      [1200, 1500]
    """
    check_constants(ignore, interval, 1, 0.0)
    series = _series("rms", rms)
    hits = ~(series < threshold)
    hits[:ignore] = False
    return _events(hits, interval, 1)


def loss_spikes(
    losses: npt.ArrayLike,
    *,
    deviations: float = DEVIATIONS,
    ignore: int = IGNORE,
    interval: int = INTERVAL,
    least: int = LEAST,
    decay: float = DECAY,
) -> np.ndarray:
    """Steps at which a loss spike starts: the loss is 3.2 running deviations over its running mean.

    Args:
      losses: of steps 0, 1, ... NaN and inf count as deviations and stay out of the statistics.
      deviations: running standard deviations over the running mean that are a deviation.
      ignore: steps at the beginning without spikes; they do count in the statistics.
      interval: what deviates within t, ..., t + interval - 1 is one spike, at t.
      least: deviations in an interval that make a spike: fewer are noise.
      decay: of the running mean and variance, which are of the steps *before* t.

    Returns:
      Step numbers, ascending.

    Raises:
      ValueError: for a series that is not one-dimensional, or constants out of range.

    Where the paper does not say: the running statistics are exponential, over about 100 steps (of
    all steps, a falling loss would hide its spikes), and leave out the step that is judged.

    Example:
      >>> import numpy as np, optax_lowmem as lowmem
      >>> losses = 2 + 0.1 * np.sin(np.arange(2000.0))
      >>> losses[[1300, 1500, 1504]] = 4.0  # the first one alone
      >>> lowmem.diagnostics.loss_spikes(losses).tolist()
      [1500]
    """
    check_constants(ignore, interval, least, decay)
    series = _series("losses", losses)
    hits = np.zeros(series.shape, bool)
    seen, mean, variance = 0, 0.0, 0.0
    for step, loss in enumerate(series.tolist()):
        hits[step] = seen > 0 and not loss <= mean + deviations * math.sqrt(variance)
        if math.isfinite(loss):
            mean, variance = advance(seen, mean, variance, loss, decay)
            seen += 1
    hits[:ignore] = False
    return _events(hits, interval, least)


def _series(name: str, values: npt.ArrayLike) -> np.ndarray:
    series = np.asarray(values, np.float64)
    if series.ndim != 1:
        raise ValueError(
            f"{name} is one value a step, a series of one axis, got shape {series.shape}"
        )
    return series


def _events(hits: np.ndarray, interval: int, least: int) -> np.ndarray:
    """Starts of the intervals that hold at least `least` hits; each starts with its first."""
    starts: list[int] = []
    free = 0  # where the last interval has ended
    for step in np.flatnonzero(hits).tolist():
        if step >= free:
            free = step + interval
            if np.count_nonzero(hits[step:free]) >= least:
                starts.append(step)
    return np.asarray(starts, np.int64)
