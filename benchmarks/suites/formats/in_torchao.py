"""Moments of torchao's optimizers, on the gradients of a closed loop (for `four_bits`).

torch and torchao are imported where an optimizer is made, and nowhere else.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.peers.in_torch import versions
from benchmarks.suites.formats.formats import MU, NEAREST, NU, Copy

PACKAGE = "torchao"
CLASSES = ("AdamW4bit", "AdamW8bit")  # of torchao.optim
SLOTS = {MU: "exp_avg", NU: "exp_avg_sq"}


def missing_reason() -> str | None:
    """Return why torchao cannot be measured here; None: it can."""
    for name in ("torch", PACKAGE):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: pip install torch {PACKAGE}"
    return None


class Peer:
    """One optimizer of torchao with a single parameter, which is the sample of a closed loop.

    The step compiles for a CPU by the C++ compiler of the machine. Its learning rate is 0.

    Args:
      name: of the class.
      shape: [chunks, length] of the sample.
      decays: of both moments.
    """

    def __init__(self, name: str, shape: tuple[int, int], decays: Mapping[str, float]):
        import torch
        from torchao import optim

        self.label, self.version, self.shape = f"{PACKAGE} {name}", versions(PACKAGE), shape
        self.parameter = torch.nn.Parameter(torch.zeros(shape))
        betas = decays[MU], decays[NU]
        self.optimizer = getattr(optim, name)([self.parameter], lr=0.0, betas=betas)

    def follow(self, gradients: np.ndarray | None) -> None:
        """Step once for each of the gradients [steps, chunks, length]."""
        import torch

        assert gradients is not None
        for one in gradients:
            self.parameter.grad = torch.tensor(one)
            self.optimizer.step()

    def moments(self) -> dict[str, Any]:
        """Return the tensor of each moment, which has codes and scales."""
        state = self.optimizer.state[self.parameter]
        found = {slot: state[name] for slot, name in SLOTS.items()}
        for own in found.values():  # of 4,096 elements or more it quantizes whole blocks
            if not hasattr(own, "codes") or self.shape[1] % own.block_size:
                raise SystemExit(f"{self.label} stores no {self.shape}: larger --preset, --chunks")
        return found

    def values(self) -> dict[Copy, np.ndarray]:
        """Both moments as stored, decoded, by how they are stored."""
        return {
            Copy(slot, f"{PACKAGE}'s map of {own.qmap.numel()}", own.block_size, NEAREST):
            own.dequantize().numpy()
            for slot, own in self.moments().items()
        }  # fmt: skip

    def bytes(self) -> list[float]:
        """Per value, of codes and scales of each moment; a tensor's map, 1 KB at most, not."""
        parts = [(own.codes, own.scale) for own in self.moments().values()]
        total = float(np.prod(self.shape))
        return [sum(x.numel() * x.element_size() for x in own) / total for own in parts]
