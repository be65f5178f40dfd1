"""COAT's Table 13 on a Llama: FP8 activations, FP8 states, and both, against bf16 and AdamW.

    python -m benchmarks.run activation_training --record                # Llama-134m, on a GPU
    python -m benchmarks.run activation_training --preset cpu --record   # a small one, minutes

All variants see the same batches, and but for one the same initial weights. Curves are stored in
benchmarks/results/coat_activations.npz after each variant.
"""

from __future__ import annotations

from benchmarks import records
from benchmarks.suites.activations.training import PRESETS, VARIANTS, Experiment, flops
from benchmarks.training import Curve, Part, load_text, parser, say, usual

CURVES = records.RESULTS / "coat_activations.npz"
PART = "run"


def main(arguments: list[str] | None = None) -> dict[str, Curve]:
    made = parser(__doc__, 530, CURVES, VARIANTS)
    made.add_argument("--batch", type=int, help="windows in a step; default: the preset's")
    args = made.parse_args(arguments)
    run = usual(PRESETS, args.preset).changed(
        steps=args.steps, learning_rate=args.lr, attention=args.attention, batch=args.batch
    )
    say(f"{run.preset}: {flops(run):.3g} operations a variant")

    def make() -> Experiment:
        found = Experiment(run, load_text(run, args.cache), args.seed)
        if args.batch is not None:  # in the case of records
            found.what += f"-b{args.batch}"
        return found

    return Part(args, make, args.variants or VARIANTS, CURVES, PART).train_all()
