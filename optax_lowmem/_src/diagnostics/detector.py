"""The spikes of `spikes`, found while training: a few scalars of state, under jit or scan."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lowmem._src.diagnostics import spikes

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

    threshold: float = spikes.RMS_THRESHOLD
    deviations: float = spikes.DEVIATIONS
    ignore: int = spikes.IGNORE
    interval: int = spikes.INTERVAL
    least: int = spikes.LEAST
    lead: int = spikes.LEAD
    decay: float = spikes.DECAY

    def __post_init__(self) -> None:
        spikes.check_constants(self.ignore, self.interval, self.least, self.decay)
        if isinstance(self.lead, bool) or not isinstance(self.lead, int) or self.lead < 1:
            raise ValueError(f"lead is a number of steps, at least 1, got {self.lead!r}")

    def init(self) -> SpikeState:
        """Before the first step."""
        zero, never = jnp.zeros((), jnp.int32), jnp.full((), _NEVER, jnp.int32)
        none = jnp.zeros((), jnp.float32)
        return SpikeState(zero, zero, none, none, never, never, zero, jnp.zeros((), bool))

    def update(self, state: SpikeState, loss: Any, rms: Any) -> tuple[SpikeState, dict[str, Any]]:
        """The state after a step, and its flags.

        Args:
          state: of the steps before.
          loss: of the step, a scalar.
          rms: RMS_t of one tensor at the step, a scalar (`rms(...)["embed/kernel"]`).

        Returns:
          (state, flags), the flags a dict of scalars for a logger: `rms_spike` (one starts now),
          `loss_deviation` (this loss deviates), `loss_spike` (one is known by now),
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
        new = spikes.advance(seen, state.mean, state.variance, loss, self.decay, jnp.maximum)
        finite = jnp.isfinite(loss)
        mean, variance = (
            jnp.where(finite, a, b) for a, b in zip(new, (state.mean, state.variance), strict=True)
        )
        return state.seen + finite, mean, variance
