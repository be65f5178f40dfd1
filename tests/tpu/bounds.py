"""Bounds of steps compiled for TPUs, which the optimized program is held to."""

import dataclasses
import math

from benchmarks.suites.tpu import cases
from optax_lowmem._src.update import dispatch

MB = 1 << 20
KERNEL = "pallas_tpu" in dispatch.IMPLEMENTATIONS  # the step on a TPU is a kernel


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of what a step may move and hold.

    Attributes:
      traffic: bytes to and from HBM, relative to those of its arguments and results, each once.
      temporaries: bytes of HBM beside these.
    """

    traffic: float
    temporaries: float


def of_step(case: str, impl: str) -> Bounds:
    """The bounds of a step, by what computes it.

    A kernel reads and writes each byte once, or twice what a mean is taken of before, which tiles
    at the edge of a leaf and hyperparameters exceed by less than 5 %; among the leaves of a layer
    are small ones, which XLA steps. Its temporaries are numbers, each in 16 KB of its own, on
    a mesh those of a mean over all devices too, and of rows and columns what was and what is, each
    vector in tiles of 8 rows. XLA's own step holds the transposed copies of one
    block of rows, or of a leaf no larger than that, and moves those of leaves that it does not keep
    in the chip's own memory; a stack of layers it also copies once.
    """
    if KERNEL and not impl.endswith(cases.XLA):
        layer = case.startswith("llama-layer")
        several = layer and case.endswith(cases.ON_FOUR) and bool(cases.prepares(impl))
        vectors = 0
        if "factored" in impl:
            matrices = [x.shape for x in cases.masters(case).values() if len(x.shape) > 1]
            vectors = sum(4 * math.prod(shape[:-2]) * sum(shape[-2:]) for shape in matrices)
        return Bounds(1.15 if layer else 1.05, (2 * MB if several else MB) + 2 * 8 * vectors)
    parameters = sum(x.size for x in cases.masters(case).values())
    return Bounds(2.5 if case == "stack-of-16" else 2.0, 3.0 * parameters)


# (case, implementation) of the library's other programs. Codes and scales of what is kept are
# written, and read again; what is quantized by one scale is read once more for its maximum. What is
# kept, 1.13 bytes per element of an input, is a temporary where both passes are in one program.
OF_PARTS = {
    **{
        ("group_codec/8192x8192", f"{work}-{codec}"): Bounds(1.05, MB)
        for work in ("encode", "decode")
        for codec in ("softsign-int8", "sqrt-uint8")
    },
    ("gaussws/2048x8192", "sample"): Bounds(1.05, MB),
    ("gaussws/2048x8192", "noise_sums"): Bounds(1.05, MB),
    ("fp8_flow/8192x2048x8192", "rms_norm"): Bounds(1.6, MB),
    ("fp8_flow/8192x2048x8192", "gated_product"): Bounds(1.6, 96 * MB),
    ("fp8_flow/32768x4096x14336", "rms_norm"): Bounds(1.6, 160 * MB),
    ("fp8_flow/32768x4096x14336", "gated_product"): Bounds(1.75, 1024 * MB),
}
