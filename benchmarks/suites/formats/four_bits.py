"""Moments in 4 bits, in closed loop beside a run of AdamW in f32: each map alone, and in pairs.

    python -m benchmarks.run four_bits --preset gpt-3m --steps 600 --record    # minutes on a CPU
    python -m benchmarks.run four_bits --record                                # gpt-42m, on a GPU
    python -m benchmarks.run four_bits --preset gpt-3m --steps 600 --torchao --record

As `formats`, whose sample, errors and options it has; no sample is stored. `--torchao` measures
torchao's optimizers on the same gradients, beside ours of about their bytes, and no other map.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import records
from benchmarks.records import Rows
from benchmarks.suites.formats import errors as fe
from benchmarks.suites.formats import formats, in_torchao
from benchmarks.suites.formats.bench import CALLS, command_line, make_experiment
from benchmarks.suites.formats.formats import (
    EXACT,
    FOUR_BITS,
    MU,
    NEAREST,
    NU,
    STOCHASTIC,
    Copy,
    Pair,
)
from benchmarks.suites.formats.training import Experiment, Snapshot
from benchmarks.training import about, say
from optax_lowmem import Storage, codecs
from optax_lowmem._src.update.plan import rounds_stochastically

GROUPS = (16, 32, 64, 128)
BASE = "flash_adamw"  # whose 8 bits are measured beside them


def copies() -> list[Copy]:
    """Every map of either slot in every group, and one group size with either rounding."""
    ways = [(group, STOCHASTIC) for group in GROUPS] + [(64, NEAREST)]
    own = [Copy(slot, name, *way) for slot in (MU, NU) for name in FOUR_BITS for way in ways]
    return own + list(formats.OPTIMIZERS[BASE])


def compared() -> list[tuple[Copy, Copy]]:
    """Return each copy beside the other slot in f32, then pairs of one group size."""
    alone = [(c, EXACT[NU]) if c.slot == MU else (EXACT[MU], c) for c in copies()]
    names = itertools.product(FOUR_BITS, repeat=2)
    pairs = [(Copy(MU, mu, 64, STOCHASTIC), Copy(NU, nu, 64, STOCHASTIC)) for mu, nu in names]
    return [*alone, *pairs, formats.OPTIMIZERS[BASE]]


def pair_of(storage: Storage) -> Pair:
    """Return how a storage keeps both moments."""
    known = formats.FORMATS | FOUR_BITS

    def copy(slot: str) -> Copy:
        own = getattr(storage, slot)
        name = next(name for name, how in known.items() if getattr(how, slot) == own)
        stochastic = rounds_stochastically(storage.rounding, slot, in_table=False)
        rounding = STOCHASTIC if stochastic else NEAREST
        return Copy(slot, name, storage.group_size, rounding)

    return copy(MU), copy(NU)


# what is measured beside torchao's optimizers, as a user writes it
OURS: dict[str, Pair] = {
    "flash_adamw(lr)": formats.OPTIMIZERS["flash_adamw"],
    "coat_adamw(lr)": formats.OPTIMIZERS["coat_adamw"],
    "Storage(group_size=128)": pair_of(Storage(group_size=128)),
    "q_adamw(lr)": formats.OPTIMIZERS["q_adamw"],
    "Storage.four_bit()": pair_of(Storage.four_bit()),
    "Storage.four_bit(nu=codecs.sqrt4())": pair_of(Storage.four_bit(nu=codecs.sqrt4())),
    'Storage.four_bit(rounding="nu")': pair_of(Storage.four_bit(rounding=NU)),
    'Storage.four_bit(rounding="nearest")': pair_of(Storage.four_bit(rounding=NEAREST)),
    "Storage.four_bit(group_size=128)": pair_of(Storage.four_bit(group_size=128)),
}


class Last:
    """The last snapshot of a run, and peers that are given the gradients up to it."""

    def __init__(self, peers: list[in_torchao.Peer]):
        self.peers = peers

    def __call__(self, snapshot: Snapshot, moments: dict[str, Any]) -> None:
        del moments
        self.snapshot = snapshot
        for peer in self.peers:
            assert snapshot.gradients is not None
            peer.follow(snapshot.gradients)


def train(
    args: argparse.Namespace, copies: list[Copy], torchao: bool
) -> tuple[Experiment, list[in_torchao.Peer], fe.Errors]:
    """Train once, and return the errors of every pair of copies and of peers' moments."""
    experiment = make_experiment(args, copies, gradients=torchao)
    sample = experiment.sample
    shape = len(sample.leaf_of_chunk), sample.length
    names = in_torchao.CLASSES if torchao else ()
    peers = [in_torchao.Peer(name, shape, experiment.decays) for name in names]
    last = Last(peers)
    experiment.train_copies(last, CALLS, say)
    snapshot = last.snapshot
    values = {Copy.of(key): x for key, x in snapshot.values.items()}
    values |= {copy: snapshot.true[slot] for slot, copy in EXACT.items()}
    for peer in peers:
        values |= peer.values()
    correction = fe.Correction.after(snapshot.step, experiment.decays)
    found = fe.errors(
        snapshot.true, values, sample.leaf_of_chunk, np.asarray(sample.sizes), correction
    )
    return experiment, peers, found


def rows_of(
    bench: str, args: argparse.Namespace, experiment: Experiment, errors: fe.Errors,
    pairs: Mapping[str, tuple[Pair, dict[str, Any]]],
) -> Rows:  # fmt: skip
    """Return the records of pairs by name, each with what else its records say."""
    flags = about(experiment, experiment.parameters)
    shared = {key: flags[key] for key in ("parameters", "steps", "decays", "chunks_of_a_leaf")}
    units, rows = {"mse": "lr^2", "median_nmse": None}, []
    for name, ((mu, nu), more) in pairs.items():
        numbers = zip(units, errors.at(mu, nu), strict=True)
        rows += records.records_of(
            bench, args.preset, name, {metric: (value, units[metric]) for metric, value in numbers},
            mu=mu.key, nu=nu.key, seed=args.seed, flags=shared, **more,
        )  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--torchao", action="store_true", help="measure torchao's optimizers")
    args = parser.parse_args(arguments)
    if args.torchao and (reason := in_torchao.missing_reason()):
        raise SystemExit(f"--torchao: {reason}")
    pairs: dict[str, tuple[Pair, dict[str, Any]]]
    if args.torchao:
        own = sorted({copy for pair in OURS.values() for copy in pair})
        experiment, peers, errors = train(args, own, torchao=True)
        pairs = {
            name: (pair, {"bytes": [copy.bytes for copy in pair]}) for name, pair in OURS.items()
        }
        for peer in peers:
            mu, nu = peer.values()
            pairs[peer.label] = (mu, nu), {"bytes": peer.bytes(), "version": peer.version}
        rows = rows_of("four_bits_torchao", args, experiment, errors, pairs)
    else:
        experiment, _, errors = train(args, copies(), torchao=False)
        pairs = {f"{mu.key} {nu.key}": ((mu, nu), {}) for mu, nu in compared()}
        rows = rows_of("four_bits", args, experiment, errors, pairs)
    records.show(rows)
    records.keep(rows, args.record)
