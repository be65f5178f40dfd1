"""COAT's Table 13 on a Llama: FP8 activations, FP8 states, and both, against bf16 and AdamW.

All variants see the same batches, and but for one the same initial weights. Curves are stored in
benchmarks/results/coat_activations.npz after each variant.
"""

import dataclasses

from _llama.config import FP8, Shape
from _llama.config import PRESETS as LLAMAS

from benchmarks import llama, records
from benchmarks.llama import Variant
from benchmarks.training import SMALL, SMOKE, Curve, Run
from benchmarks.variants import Part, built, parser, usual

CURVES = records.RESULTS / "coat_activations.npz"
PART = "run"
_IN_FP8 = {"activations": FP8}

# 134m with half of its preset's batch: five runs of 16,384 tokens x 2000 steps are 0.11 EFLOP
PRESETS = {
    "gpu": Run(
        "llama-134m", LLAMAS["134m"].shape, 256, 64, 2_000, 50, 1e-3, "installed", 16, "bfloat16",
        "cudnn", "bpe",
    ),
    "cpu": dataclasses.replace(
        SMALL, shape=Shape(4, 96, 256, 3, 3, 256), steps=500, held_out_batches=64,
        compute="bfloat16",
    ),
    "smoke": SMOKE,
}  # fmt: skip


class Experiment(llama.Experiment):
    what, base = "activations", "standard"
    variants = {
        "standard": Variant(),
        "fp8-coat_adamw": Variant(_IN_FP8, "coat_adamw"),
        "fp8": Variant(_IN_FP8),
        "coat_adamw": Variant(optimizer="coat_adamw"),
        "standard-other-start": Variant(other_start=True),
    }


def main(arguments: list[str] | None = None) -> dict[str, Curve]:
    made = parser(__doc__, 530, CURVES, Experiment.variants)
    made.add_argument("--batch", type=int, help="windows in a step; default: the preset's")
    args = made.parse_args(arguments)

    def make() -> Experiment:
        found = built(args, Experiment, usual(PRESETS, args.preset))
        if args.batch is not None:  # in the case of records
            found.what += f"-b{args.batch}"
        return found

    return Part(args, make, args.variants or Experiment.variants, CURVES, PART).train_all()
