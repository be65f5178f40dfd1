"""The picture of docs/ on paired runs of GPT-2 124M, from the curves of `pairs`."""

from typing import Any

import numpy as np

from benchmarks import curves
from benchmarks.claims.findings import MARGIN
from benchmarks.records import RESULTS
from benchmarks.style import BLUE, GREY, ORANGE, band, headline, name_lines, plt

PAIRS = {"adam": ("adamw", "flash_adamw", BLUE), "lion": ("lion", "flash_lion", ORANGE)}
FROM = 100  # steps: before, losses fall too steeply to be compared


def gpt2() -> Any:
    """Draw held-out losses of both pairs, and by how much ours is over optax's."""
    figure, (losses, over) = plt.subplots(1, 2, figsize=(8.4, 3))
    ends = {}
    for rule, (base, ours, color) in PAIRS.items():
        runs = curves.load(RESULTS / f"pairs-gpt2-124m-{rule}.npz").runs
        plain, own = (runs[f"{name} seed 0"] for name in (base, ours))
        steps = plain["val_step"]
        kept = steps >= FROM
        losses.plot(steps[kept], plain["val_loss"][kept], color=GREY, label=base)
        losses.plot(steps[kept], own["val_loss"][kept], color=color, label=ours, ls="--")
        more = 100 * (own["val_loss"] / plain["val_loss"] - 1)
        over.plot(steps[kept], more[kept], color=color, label=f"{ours} over {base}")
        ends[ours] = more[-1]
    band(over, steps[kept], -MARGIN.size, MARGIN.size, GREY)
    over.axhline(0, color=GREY, lw=1)
    losses.set(xlabel="step", title="held-out loss, nats per token")
    over.set(xlabel="step", title=f"difference, %; shaded: ± {MARGIN.size:g} %")
    for axes in (losses, over):
        name_lines(axes)
    said = ", ".join(
        f"{ours} {abs(end):.1f} % {'above' if end > 0 else 'below'} {base}"
        for (base, ours, _), end in zip(PAIRS.values(), ends.values(), strict=True)
    )
    assert np.isfinite(list(ends.values())).all()
    headline(figure, f"GPT-2 124M, one seed: {said}")
    return figure


FIGURES = {"gpt2_pairs": gpt2}
