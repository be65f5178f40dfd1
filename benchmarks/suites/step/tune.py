"""Finds how the fused step is best cut on this GPU, and writes it to tuned.json.

It works on weights and state of its own, made for the purpose: nothing live is tuned on.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks import records
from benchmarks.peers import cases, in_jax, processes
from optax_lowmem._src.arrays.groups import Tile
from optax_lowmem._src.optim import step as fused_update
from optax_lowmem._src.optim.step import tuning

TUNED = Path(fused_update.__file__).parent / "tuned.json"
TILES = (Tile(1024, 4), Tile(512, 2), Tile(2048, 4), Tile(2048, 8), Tile(4096, 8))
# a generated kernel has one copy of its code however many leaves share it
LEAVES = {"pallas": (1, 2, 4, 8), "triton": (8, 32)}
ELEMENTS = (1 << 22, 1 << 24, 1 << 25)


def cuts(kernel: str) -> list[tuning.Tuning]:
    """Return the tunings to try: every size of a launch with the usual tile, and other tiles."""
    sizes = itertools.product(LEAVES[kernel], ELEMENTS)
    tried = [tuning.Tuning(TILES[0], leaves, elements) for leaves, elements in sizes]
    usual = tuning.heuristic(kernel, group_size=1)
    return tried + [dataclasses.replace(usual, tile=tile) for tile in TILES[1:]]


def trials(
    cuts: Sequence[tuning.Tuning], case: processes.Case, kernel: str, repeats: int
) -> dict[tuning.Tuning, float]:
    tbps = 2.5  # only decides how many steps a call has
    base = processes.job(f"lowmem.step-{kernel}", case, repeats, None, tbps)
    times = {}
    for cut in cuts:
        outcome = processes.outcome(base | {"tuned": tuning.entry(cut)})
        if "times" not in outcome:
            raise SystemExit(f"{cut}: {outcome}")
        times[cut] = statistics.median(outcome["times"])
        print(f"{'/'.join(case)} {kernel} {cut} {times[cut]:8.3f} ms", flush=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--leaf-set", default="llama-3.2-1b", choices=cases.LEAF_SETS)
    add("--optimizer", nargs="+", default=["adamw"], choices=cases.OPTIMIZERS)
    add("--kernel", default="pallas", choices=("pallas", "triton"))
    add("--repeats", type=int, default=3)
    add("--write", type=Path, nargs="?", const=TUNED, help="default: the package's")
    args = parser.parse_args()
    entries = json.loads(TUNED.read_text(encoding="utf-8"))
    device = entries.setdefault(jax.local_devices()[0].device_kind, {})
    for optimizer in args.optimizer:
        case = (args.leaf_set, optimizer)
        times = trials(cuts(args.kernel), case, args.kernel, args.repeats)
        best = min(times, key=times.__getitem__)
        source = f"the tuner on {'/'.join(case)}, commit {records.commit()}"
        engine = in_jax.ours(optimizer, "tiny").engine
        slots = sum(not slot.blockwise for slot in engine.rule.slots)
        key = tuning.key(args.kernel, slots, engine.storage.group_size)
        device[key] = {**tuning.entry(best), "source": source}
    if args.write:
        text = json.dumps(entries, indent=2, sort_keys=True) + "\n"
        args.write.write_text(text, encoding="utf-8")
        print(f"wrote {args.write}")
