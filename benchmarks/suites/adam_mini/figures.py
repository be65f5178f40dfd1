"""The picture of docs/ on Q-Adam-mini, from the curves of `adam_mini`."""

from typing import Any

from benchmarks import curves
from benchmarks.style import BLACK, BLUE, ORANGE, SKY, VERMILION, headline, name_lines, plt

_LINES = {
    "q_adam_mini-reference": ("published code: floor, nearest", VERMILION),
    "q_adam_mini-embeddings": ("no floor, stochastic in the embedding", ORANGE),
    "q_adam_mini-nearest": ("no floor, nearest", SKY),
    "q_adam_mini": ("q_adam_mini: no floor, stochastic", BLUE),
    "adam_mini-again": ("f32, once more", BLACK),
}


def norms() -> Any:
    runs = curves.load().runs
    fig, axes = plt.subplots(2, 1, figsize=(7.2, 5), sharex=True)
    titles = {"embedding": "the embedding", "mlp": "a kernel of a middle layer"}
    for ax, (of, title) in zip(axes, titles.items(), strict=True):
        plain = runs["adam_mini"][f"{of}_norm"]
        for name, (label, color) in _LINES.items():
            ratio = runs[name][f"{of}_norm"] / plain
            ax.plot(runs[name]["step"] / 1000, ratio, color=color, label=label)
        ax.set(yscale="log", title=f"norm of {title}, relative to Adam-mini in f32")
        ax.set_yticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
        ax.minorticks_off()
        name_lines(ax)
    axes[0].set_ylim(0.7, 600)
    axes[1].set_ylim(0.7, 60)
    axes[1].set_xlabel("thousand steps")
    last = {name: runs[name]["embedding_norm"][-1] for name in _LINES}
    assert last["q_adam_mini-reference"] > 100 * last["q_adam_mini-nearest"]
    headline(fig, "The missing floor keeps the embedding's norm, and stochastic rounding "
                  "everywhere that of other layers")  # fmt: skip
    return fig


FIGURES = {"q_adam_mini_norms": norms}
