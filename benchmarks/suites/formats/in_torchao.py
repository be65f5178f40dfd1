"""Moments of torchao's optimizers, on the gradients of a closed loop (for `four_bits`).

torch and torchao are imported where an optimizer is made, and nowhere else.
"""

from __future__ import annotations

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

        self.name, self.shape = name, shape
        self.parameter = torch.nn.Parameter(torch.zeros(shape))
        self.optimizer = getattr(optim, name)(
            [self.parameter], lr=0.0, betas=(decays[MU], decays[NU])
        )

    @property
    def label(self) -> str:
        return f"{PACKAGE} {self.name}"

    @property
    def version(self) -> str:
        return versions(PACKAGE)

    def follow(self, gradients: np.ndarray) -> None:
        """Step once for each of the gradients [steps, chunks, length]."""
        import torch

        for one in gradients:
            self.parameter.grad = torch.tensor(one)
            self.optimizer.step()

    def moment(self, slot: str) -> Any:
        """Return the tensor of a moment, which has codes and scales."""
        found = self.optimizer.state[self.parameter][SLOTS[slot]]
        if not hasattr(found, "codes"):
            raise SystemExit(
                f"{self.label} keeps {SLOTS[slot]} of {self.shape} in f32: it quantizes tensors of "
                "4,096 elements or more, in whole blocks; sample more with --chunks"
            )
        if self.shape[1] % found.block_size:
            raise SystemExit(
                f"blocks of {found.block_size} of {self.label} go over several chunks of "
                f"{self.shape[1]} neighbours: take a larger --preset"
            )
        return found

    def values(self) -> dict[Copy, np.ndarray]:
        """Both moments as stored, decoded, by how they are stored."""
        found = {slot: self.moment(slot) for slot in SLOTS}
        return {
            Copy(
                slot, f"{PACKAGE}'s map of {own.qmap.numel()}", own.block_size, NEAREST
            ): own.dequantize().numpy()
            for slot, own in found.items()
        }

    def bytes(self) -> list[float]:
        """Per value, of codes and scales of each moment; a tensor's map, 1 KB at most, not."""
        parts = [(own.codes, own.scale) for own in map(self.moment, SLOTS)]
        total = float(np.prod(self.shape))
        return [sum(x.numel() * x.element_size() for x in own) / total for own in parts]
