"""Finds how the fused step is best cut on this GPU, and writes it to tuned.json.

python -m benchmarks.tune_step --leaf-set llama-3.2-1b --optimizer adamw lion --write

It works on weights and state of its own, made for the purpose: nothing live is tuned on.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path

import jax

import optax_lowmem as lowmem
from benchmarks.peers import cases, device_loop, in_jax
from optax_lowmem.kernels import fused_update
from optax_lowmem.kernels.fused_update import tuning
from optax_lowmem.kernels.tiles import Tile

TUNED = Path(fused_update.__file__).parent / "tuned.json"
TILES = ((1024, 4), (512, 2))
LEAVES = (4, 8)
ELEMENTS = (1 << 24, 1 << 25)


def slots(optimizer: str) -> int:
    """How many slots the optimizer's rule has: what tuned.json tells apart."""
    tx = getattr(lowmem, f"flash_{optimizer}")(**cases.OPTIMIZERS[optimizer])
    return len(tx.engine.rule.slots)


def trial(leaf_set: str, optimizer: str, kernel: str, tuned: tuning.Tuning, repeats: int) -> float:
    """Milliseconds of a step that is cut like this."""
    jax.clear_caches()
    with tuning.trying(tuned):
        made = in_jax.make(f"lowmem.step-{kernel}", leaf_set, optimizer)
        tbps = 2.5  # only decides how many steps a call has
        runner = device_loop.Runner(made, leaf_set, lambda n: device_loop.steps_for(n, tbps))
        return statistics.median(runner.time() for _ in range(repeats))


def main() -> None:
    """Tries every cut, prints them and, with --write, keeps the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaf-set", default="llama-3.2-1b", choices=cases.LEAF_SETS)
    parser.add_argument("--optimizer", nargs="+", default=["adamw"], choices=cases.OPTIMIZERS)
    parser.add_argument("--kernel", default="pallas", choices=("pallas", "triton"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, nargs="?", const=TUNED, help="default: the package's")
    args = parser.parse_args()
    entries = json.loads(TUNED.read_text(encoding="utf-8"))
    device = entries.setdefault(jax.local_devices()[0].device_kind, {})
    for optimizer in args.optimizer:
        times = {}
        for tile, leaves, elements in itertools.product(TILES, LEAVES, ELEMENTS):
            tuned = tuning.Tuning(Tile(*tile), leaves, elements)
            times[tuned] = trial(args.leaf_set, optimizer, args.kernel, tuned, args.repeats)
            print(f"{optimizer:<6} {tuned} {times[tuned]:8.3f} ms", flush=True)
        best = min(times, key=times.__getitem__)
        device[f"{args.kernel}/{slots(optimizer)}-slots"] = tuning.entry(best)
    if args.write:
        text = json.dumps(entries, indent=2, sort_keys=True) + "\n"
        args.write.write_text(text, encoding="utf-8")
        print(f"wrote {args.write}")


if __name__ == "__main__":
    main()
