"""Moments in 4 bits, in closed loop beside a run of AdamW in f32: each map alone, and in pairs.

    python -m benchmarks.run four_bits --preset gpt-3m --steps 600 --record    # minutes on a CPU
    python -m benchmarks.run four_bits --preset gpt-3m --steps 600 --torchao --record

As `formats`, whose sample, errors and options it has. `--torchao` measures
torchao's optimizers on the same gradients, beside ours of about their bytes, and no other map.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from benchmarks import records
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
from benchmarks.suites.formats.training import Snapshot
from benchmarks.training import say
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


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--torchao", action="store_true", help="measure torchao's optimizers")
    args = parser.parse_args(arguments)
    if args.torchao and (reason := in_torchao.missing_reason()):
        raise SystemExit(f"--torchao: {reason}")
    own = sorted({copy for pair in OURS.values() for copy in pair}) if args.torchao else copies()
    experiment = make_experiment(args, own, CALLS, gradients=args.torchao)
    shape = len(experiment.sample.leaf_of_chunk), experiment.sample.length
    names = in_torchao.CLASSES if args.torchao else ()
    peers = [in_torchao.Peer(name, shape, experiment.decays) for name in names]

    def seen(snapshot: Snapshot) -> None:
        for peer in peers:
            peer.follow(snapshot.gradients)

    experiment.seen = seen
    experiment.train_copies(say)
    values = dict(experiment.last.values)
    pairs: dict[str, tuple[Pair, Mapping[str, Any]]]  # name -> its copies, what its records have
    if args.torchao:
        pairs = {
            name: (pair, {"bytes": [copy.bytes for copy in pair]}) for name, pair in OURS.items()
        }
    else:
        pairs = {f"{mu.key} {nu.key}": ((mu, nu), {}) for mu, nu in compared()}
    for peer in peers:
        found = peer.values()
        values |= found
        mu, nu = found
        pairs[peer.label] = (mu, nu), {"bytes": peer.bytes(), "version": peer.version}
    bench, errors = "four_bits_torchao" if args.torchao else "four_bits", experiment.errors(values)
    rows: records.Rows = []
    for name, ((mu, nu), more) in pairs.items():
        mse, nmse = errors[mu, nu]
        rows += records.records_of(
            bench, args.preset, name, {"mse": (mse, "lr^2"), "median_nmse": (nmse, None)},
            mu=mu.key, nu=nu.key, seed=args.seed, flags=experiment.flags(), **more,
        )  # fmt: skip
    records.show(rows)
    records.keep(rows, args.record)
