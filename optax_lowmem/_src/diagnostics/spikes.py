"""Loss spikes and RMS spikes (StableAdamW, appendix E), of recorded series and while training."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

Number = float | jax.Array

# ---- of whole recorded series --------------------------------------------------------------------

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
    seen: Number,
    mean: Number,
    variance: Number,
    loss: Number,
    decay: float,
    maximum: Callable[[Number, Number], Number] = max,
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
            f"{name} is one value per step, a series of one axis, got shape {series.shape}"
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


# ---- while training: a few scalars of state, under jit or scan -----------------------------------

_NEVER = -(2**30)


class SpikeState(NamedTuple):
    """State of a `SpikeDetector`: 29 bytes."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32; steps so far
    seen: jax.Array  # int32: finite losses
    mean: jax.Array  # f32
    variance: jax.Array  # f32
    rms_start: jax.Array  # int32: step of the last RMS spike
    loss_start: jax.Array  # int32: step at which the current interval of deviations started
    hits: jax.Array  # int32: deviations in it
    warned: jax.Array  # bool: whether an RMS spike came 1 to `lead` steps before it


@dataclasses.dataclass(frozen=True)
class SpikeDetector:
    """Loss spikes and RMS spikes of a run as it goes (StableAdamW, appendix E).

    The same spikes as `loss_spikes`, `rms_spikes` and `predicted` find in the whole series, but for
    a loss within f32 rounding of its threshold. A loss spike is known by its second deviation, at
    most `interval` - 1 steps after its start.

    Attributes:
      threshold: of RMS_t.
      deviations: running standard deviations over the running mean of the loss.
      ignore: steps at the beginning without spikes.
      interval: steps that are one spike.
      least: deviations in an interval that make a loss spike.
      lead: by how many steps at most an RMS spike predicts a loss spike.
      decay: of the running mean and variance of the loss.

    Example:
      >>> import optax_lowmem as lowmem
      >>> detector = lowmem.diagnostics.SpikeDetector(ignore=2)
      >>> state = detector.init()
      >>> for loss, rms in [(2.0, 1.0), (2.1, 1.0), (2.0, 4.0), (3.0, 1.0), (5.0, 1.0)]:
      ...     state, flags = detector.update(state, loss, rms)
      >>> {name: int(flag) for name, flag in flags.items() if name != "loss_deviation"}
      {'rms_spike': 0, 'loss_spike': 1, 'loss_spike_start': 3, 'predicted': 1}
    """

    threshold: float = RMS_THRESHOLD
    deviations: float = DEVIATIONS
    ignore: int = IGNORE
    interval: int = INTERVAL
    least: int = LEAST
    lead: int = LEAD
    decay: float = DECAY

    def __post_init__(self) -> None:
        check_constants(self.ignore, self.interval, self.least, self.decay)
        if isinstance(self.lead, bool) or not isinstance(self.lead, int) or self.lead < 1:
            raise ValueError(f"lead is a number of steps, at least 1, got {self.lead!r}")

    def init(self) -> SpikeState:
        """Before the first step."""
        zero, never = jnp.zeros((), jnp.int32), jnp.full((), _NEVER, jnp.int32)
        none = jnp.zeros((), jnp.float32)
        return SpikeState(zero, zero, none, none, never, never, zero, jnp.zeros((), bool))

    def update(
        self, state: SpikeState, loss: ArrayLike, rms: ArrayLike
    ) -> tuple[SpikeState, dict[str, Any]]:
        """The state after a step, and its flags.

        Args:
          state: of the steps before.
          loss: of the step, a scalar.
          rms: RMS_t of one tensor at the step, a scalar (`rms(...)["embed/kernel"]`).

        Returns:
          The state and the flags, (state, flags), which are a dict of scalars: `rms_spike` (one
          starts now), `loss_deviation` (this loss deviates), `loss_spike` (one is known by now),
          `loss_spike_start` (its step, else -1), `predicted` (an RMS spike preceded it).
        """
        loss, rms = jnp.asarray(loss, jnp.float32), jnp.asarray(rms, jnp.float32)
        now, counts = state.count, state.count >= self.ignore
        rms_spike = counts & ~(rms < self.threshold) & (now - state.rms_start >= self.interval)
        bound = state.mean + self.deviations * jnp.sqrt(state.variance)
        deviates = counts & (state.seen > 0) & ~(loss <= bound)
        first = deviates & (now - state.loss_start >= self.interval)
        start = jnp.where(first, now, state.loss_start)
        hits = jnp.where(first, 1, state.hits + deviates)
        warned = jnp.where(first, now - state.rms_start <= self.lead, state.warned)
        spike = deviates & (hits == self.least)
        flags = {
            "rms_spike": rms_spike,
            "loss_deviation": deviates,
            "loss_spike": spike,
            "loss_spike_start": jnp.where(spike, start, -1),
            "predicted": spike & warned,
        }
        new = SpikeState(
            now + 1,
            *self._statistics(state, loss),
            jnp.where(rms_spike, now, state.rms_start),
            start,
            hits,
            warned,
        )
        return new, flags

    def _statistics(
        self, state: SpikeState, loss: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(seen, mean, variance) with a loss, unchanged by one that is not finite."""
        seen = state.seen.astype(jnp.float32)
        new = advance(seen, state.mean, state.variance, loss, self.decay, jnp.maximum)
        finite = jnp.isfinite(loss)
        mean, variance = (
            jnp.where(finite, a, b) for a, b in zip(new, (state.mean, state.variance), strict=True)
        )
        return state.seen + finite, mean, variance


# ---- prediction of loss spikes by RMS spikes, compared with chance -------------------------------


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Loss spikes that follow an RMS spike, with the share expected by chance.

    Attributes:
      spikes: steps of the loss spikes.
      follows: for each, whether an RMS spike precedes it by 1 to `lead` steps.
      flagged: share of the steps at which an RMS spike starts.
      chance: share of the steps that follow an RMS spike by 1 to `lead`: the paper's probability
        that a loss spike does so by chance (under 1 % for its 76 RMS spikes).
      p_value: probability that as many loss spikes or more would, if they fell anywhere: the upper
        tail of a binomial distribution.
    """

    spikes: np.ndarray
    follows: np.ndarray
    flagged: float
    chance: float
    p_value: float

    @property
    def share(self) -> float:
        """Of the loss spikes that are predicted; NaN without any."""
        return float(self.follows.mean()) if self.follows.size else math.nan

    def scalars(self) -> dict[str, float]:
        """Name -> number, for a logger."""
        return {
            "loss_spikes": float(self.spikes.size),
            "predicted": float(self.follows.sum()),
            "share": self.share,
            "flagged": self.flagged,
            "chance": self.chance,
            "p_value": self.p_value,
        }


def predicted(
    losses: Sequence[int] | np.ndarray,
    rms: Sequence[int] | np.ndarray,
    steps: int,
    *,
    lead: int = LEAD,
    ignore: int = IGNORE,
) -> Prediction:
    """Find the loss spikes that follow an RMS spike by 1 to 8 steps (appendix E, Figures 15 to 20).

    Args:
      losses: steps of loss spikes, of `loss_spikes`.
      rms: steps of RMS spikes of one tensor, of `rms_spikes`.
      steps: length of the run.
      lead: how many steps ahead an RMS spike may be.
      ignore: steps at the beginning without spikes.

    Returns:
      A `Prediction`.

    Raises:
      ValueError: for steps outside of [ignore, steps), and where nothing is left of the run.

    Example:
      >>> import optax_lowmem as lowmem
      >>> found = lowmem.diagnostics.predicted([1503, 1709], [1500, 1700, 1900], steps=4000)
      >>> found.follows.tolist(), found.chance, round(found.p_value, 4)
      ([True, False], 0.008, 0.0159)
    """
    if not 0 <= ignore < steps:
        raise ValueError(f"a run of {steps} steps has none left after ignore={ignore}")
    if lead < 1:
        raise ValueError(f"lead is a number of steps, at least 1, got {lead!r}")
    loss_steps, rms_steps = (np.asarray(s, np.int64).reshape(-1) for s in (losses, rms))
    for name, found in (("losses", loss_steps), ("rms", rms_steps)):
        if found.size and not ignore <= found.min() <= found.max() < steps:
            raise ValueError(
                f"{name} are steps in [{ignore}, {steps}), got {found.min()} to {found.max()}: "
                "pass what loss_spikes and rms_spikes return, and their `ignore`."
            )
    follows_rms = np.zeros(steps + lead, bool)
    for ahead in range(1, lead + 1):
        follows_rms[rms_steps + ahead] = True
    chance = float(follows_rms[ignore:steps].mean())
    follows = follows_rms[loss_steps]
    return Prediction(
        spikes=loss_steps,
        follows=follows,
        flagged=rms_steps.size / (steps - ignore),
        chance=chance,
        p_value=_upper_tail(int(follows.sum()), loss_steps.size, chance),
    )


def _upper_tail(hits: int, trials: int, probability: float) -> float:
    """P(X >= hits) of a binomial X."""
    if hits == 0 or probability == 1:
        return 1.0
    if probability == 0:
        return 0.0
    log_yes, log_no = math.log(probability), math.log1p(-probability)
    ways = math.lgamma(trials + 1)
    terms = (
        math.exp(
            ways
            - math.lgamma(k + 1)
            - math.lgamma(trials - k + 1)
            + k * log_yes
            + (trials - k) * log_no
        )
        for k in range(hits, trials + 1)
    )
    return min(1.0, math.fsum(terms))
