"""Loss spikes and RMS spikes (StableAdamW, appendix E), in recorded series or during training."""

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

# ---- recorded series -----------------------------------------------------------------------------

# Constants of appendix E; DECAY, of the running statistics, is ours, since the paper gives none.
RMS_THRESHOLD = 2.3
DEVIATIONS = 3.2
IGNORE = 1000
INTERVAL = 10
LEAST = 2
LEAD = 8
DECAY = 0.99


def check_constants(decay: float = 0.0, **steps: int) -> None:
    """Raise ValueError unless the constants of the heuristics are in range."""
    for name, value in steps.items():
        low = 0 if name == "ignore" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{name} must be a number of steps, at least {low}, got {value!r}")
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
    """Update the running mean and variance with a loss, as numbers or (with jnp.maximum) arrays.

    The first 1 / (1 - decay) losses have equal weights, later ones exponential weights.
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
    r"""Find the steps where RMS spikes start: :math:`\{t : \mathrm{RMS}_t \ge 2.3\}`, deduplicated.

    Args:
      rms: RMS_t of one tensor at steps 0, 1, ... NaN and inf count as spikes.
      threshold: RMS_t from which a step is a spike.
      ignore: number of initial steps, with a low learning rate, without spikes.
      interval: spikes at steps t, ..., t + interval - 1 are one spike, at t. The next spike may
        start another interval.

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
    check_constants(ignore=ignore, interval=interval)
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
    """Find the steps where loss spikes start: 3.2 running standard deviations over the mean.

    A step deviates if its loss is over the running mean by `deviations` running standard
    deviations. `least` deviating steps within `interval` steps are a spike.

    Args:
      losses: losses at steps 0, 1, ... NaN and inf deviate, and are not in the statistics.
      deviations: number of running standard deviations over the running mean.
      ignore: number of initial steps without spikes; they are in the statistics.
      interval: deviating steps within t, ..., t + interval - 1 are one spike, at t.
      least: minimum number of deviating steps in an interval; fewer are noise.
      decay: decay of the running mean and variance, over the steps *before* t.

    Returns:
      Step numbers, ascending.

    Raises:
      ValueError: for a series that is not one-dimensional, or constants out of range.

    Not specified in the paper: the running statistics are exponential, over about 100 steps (over
    all steps, a falling loss would hide its spikes), and exclude the step being tested.

    Example:
      >>> import numpy as np, optax_lowmem as lowmem
      >>> losses = 2 + 0.1 * np.sin(np.arange(2000.0))
      >>> losses[[1300, 1500, 1504]] = 4.0  # the first one alone
      >>> lowmem.diagnostics.loss_spikes(losses).tolist()
      [1500]
    """
    check_constants(decay, ignore=ignore, interval=interval, least=least)
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
            f"{name} must be one value per step, an array of one axis, got shape {series.shape}"
        )
    return series


def _events(hits: np.ndarray, interval: int, least: int) -> np.ndarray:
    """Return the starts of intervals with at least `least` hits; an interval starts at a hit."""
    starts: list[int] = []
    free = 0  # end of the last interval
    for step in np.flatnonzero(hits).tolist():
        if step >= free:
            free = step + interval
            if np.count_nonzero(hits[step:free]) >= least:
                starts.append(step)
    return np.asarray(starts, np.int64)


# ---- during training: a few scalars of state, under jit or scan ----------------------------------

_NEVER = -(2**30)


class SpikeState(NamedTuple):
    """State of a `SpikeDetector`: 29 bytes."""

    count: jax.Array  # type: ignore[assignment]  # shape=(), dtype=jnp.int32; steps so far
    seen: jax.Array  # int32: number of finite losses
    mean: jax.Array  # f32
    variance: jax.Array  # f32
    rms_start: jax.Array  # int32: step of the last RMS spike
    loss_start: jax.Array  # int32: step where the current interval of deviations started
    hits: jax.Array  # int32: number of deviations in that interval
    warned: jax.Array  # bool: whether an RMS spike preceded it by 1 to `lead` steps


@dataclasses.dataclass(frozen=True)
class SpikeDetector:
    """Detect loss spikes and RMS spikes during a run (StableAdamW, appendix E).

    Finds the same spikes as `loss_spikes`, `rms_spikes` and `predicted` in the whole series, except
    for losses within f32 rounding of the threshold. A loss spike is reported at its second
    deviation (`least`), at most `interval` - 1 steps after its start.

    Attributes:
      threshold: RMS_t from which a step is an RMS spike.
      deviations: number of running standard deviations over the running mean of the loss.
      ignore: number of initial steps without spikes.
      interval: number of steps that are one spike.
      least: minimum number of deviations in an interval for a loss spike.
      lead: maximum number of steps by which an RMS spike predicts a loss spike.
      decay: decay of the running mean and variance of the loss.

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
        steps = {name: getattr(self, name) for name in ("ignore", "interval", "least", "lead")}
        check_constants(self.decay, **steps)

    def init(self) -> SpikeState:
        """Return the state before the first step."""
        zero, never = jnp.zeros((), jnp.int32), jnp.full((), _NEVER, jnp.int32)
        none = jnp.zeros((), jnp.float32)
        return SpikeState(zero, zero, none, none, never, never, zero, jnp.zeros((), bool))

    def update(
        self, state: SpikeState, loss: ArrayLike, rms: ArrayLike
    ) -> tuple[SpikeState, dict[str, jax.Array]]:
        """Process one step; return the new state and flags.

        Args:
          state: state before the step.
          loss: loss of the step, a scalar.
          rms: RMS_t of one tensor at the step, a scalar (`rms(...)["embed/kernel"]`).

        Returns:
          (state, flags); flags is a dict of scalars: `rms_spike` (an RMS spike starts now),
          `loss_deviation` (this loss deviates), `loss_spike` (a loss spike is detected now),
          `loss_spike_start` (the step where it started, else -1), `predicted` (an RMS spike
          preceded it).
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
        finite, seen = jnp.isfinite(loss), state.seen.astype(jnp.float32)
        before = state.mean, state.variance
        after = advance(seen, *before, loss, self.decay, jnp.maximum)
        mean, variance = (jnp.where(finite, a, b) for a, b in zip(after, before, strict=True))
        rms_start = jnp.where(rms_spike, now, state.rms_start)
        seen = state.seen + finite
        return SpikeState(now + 1, seen, mean, variance, rms_start, start, hits, warned), flags


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
      p_value: probability that at least as many loss spikes would follow one if they occurred at
        random steps: the upper tail of a binomial distribution.
    """

    spikes: np.ndarray
    follows: np.ndarray
    flagged: float
    chance: float
    p_value: float

    @property
    def share(self) -> float:
        """Return the share of loss spikes that follow an RMS spike; NaN without loss spikes."""
        return float(self.follows.mean()) if self.follows.size else math.nan

    def scalars(self) -> dict[str, float]:
        """Return name -> number, for a logger."""
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
      losses: steps of loss spikes, from `loss_spikes`.
      rms: steps of RMS spikes of one tensor, from `rms_spikes`.
      steps: length of the run.
      lead: maximum number of steps between an RMS spike and the loss spike it predicts.
      ignore: number of initial steps without spikes.

    Returns:
      A `Prediction`.

    Raises:
      ValueError: for spikes outside [ignore, steps), or if `ignore` is the whole run.

    Example:
      >>> import optax_lowmem as lowmem
      >>> found = lowmem.diagnostics.predicted([1503, 1709], [1500, 1700, 1900], steps=4000)
      >>> found.follows.tolist(), found.chance, round(found.p_value, 4)
      ([True, False], 0.008, 0.0159)
    """
    if not 0 <= ignore < steps:
        raise ValueError(f"a run of {steps} steps has none left after ignore={ignore}")
    check_constants(lead=lead)
    loss_steps, rms_steps = (np.asarray(s, np.int64).reshape(-1) for s in (losses, rms))
    for name, result in (("losses", loss_steps), ("rms", rms_steps)):
        if result.size and not ignore <= result.min() <= result.max() < steps:
            raise ValueError(
                f"{name} must be steps in [{ignore}, {steps}), got {result.min()} to "
                f"{result.max()}: pass the results of loss_spikes and rms_spikes, and their "
                "`ignore`."
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
    """Return P(X >= hits) of a binomial X."""
    if hits == 0 or probability == 1:
        return 1.0
    if probability == 0:
        return 0.0
    log_yes, log_no = math.log(probability), math.log1p(-probability)
    terms = []
    for k in range(hits, trials + 1):
        ways = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        terms.append(math.exp(ways + k * log_yes + (trials - k) * log_no))
    return min(1.0, math.fsum(terms))
