"""Prediction of loss spikes by RMS spikes, compared with chance (StableAdamW, appendix E)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from optax_lowmem._src.diagnostics.spikes import IGNORE, LEAD


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
