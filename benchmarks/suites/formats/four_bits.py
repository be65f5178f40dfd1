"""Moments in 4 bits, in closed loop beside a run of AdamW in f32: each map alone, and in pairs.

As `formats`, whose sample, errors and options it has. `--torchao` measures torchao's optimizers on
the same gradients, beside ours of about their bytes, and no other map; it needs torch and torchao.
"""

import importlib.util
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import records
from benchmarks.peers.in_torch import versions
from benchmarks.suites.formats import formats
from benchmarks.suites.formats.bench import CALLS, METRICS, UNITS, command_line, make_experiment
from benchmarks.suites.formats.formats import EXACT, FOUR_BITS, MU, NEAREST, NU, STOCHASTIC, Copy
from benchmarks.suites.formats.training import DECAYS
from benchmarks.training import say
from optax_lowmem import Storage, codecs
from optax_lowmem._src.update.plan import rounds_stochastically

GROUPS = (16, 32, 64, 128)
BASE = "flash_adamw"  # whose 8 bits are measured beside them
# name -> its copies, and what else its records have
Pairs = dict[str, tuple[formats.Pair, Mapping[str, Any]]]


def copies() -> list[Copy]:
    """Every map of either slot in every group, and one group size with either rounding."""
    ways = [(group, STOCHASTIC) for group in GROUPS] + [(64, NEAREST)]
    own = [Copy(slot, name, *way) for slot in (MU, NU) for name in FOUR_BITS for way in ways]
    return own + list(formats.OPTIMIZERS[BASE])


def compared() -> Pairs:
    """Return each copy beside the other slot in f32, then pairs of one group size."""
    pairs = [(c, EXACT[NU]) if c.slot == MU else (EXACT[MU], c) for c in copies()]
    pairs += [(Copy(MU, mu, 64, STOCHASTIC), Copy(NU, nu, 64, STOCHASTIC))
              for mu, nu in itertools.product(FOUR_BITS, repeat=2)]  # fmt: skip
    pairs.append(formats.OPTIMIZERS[BASE])
    return {f"{mu.key} {nu.key}": ((mu, nu), {}) for mu, nu in pairs}


def copy_of(storage: Storage, slot: str) -> Copy:
    """Return how a storage keeps a moment."""
    known = (formats.FORMATS | FOUR_BITS).items()
    name = next(name for name, how in known if getattr(how, slot) == getattr(storage, slot))
    stochastic = rounds_stochastically(storage.rounding, slot, in_table=False)
    return Copy(slot, name, storage.group_size, STOCHASTIC if stochastic else NEAREST)


# what is measured beside torchao's optimizers, as a user writes it
STORAGES = {
    "Storage(group_size=128)": Storage(group_size=128),
    "Storage.four_bit()": Storage.four_bit(),
    "Storage.four_bit(nu=codecs.sqrt4())": Storage.four_bit(nu=codecs.sqrt4()),
    'Storage.four_bit(rounding="nu")': Storage.four_bit(rounding=NU),
    'Storage.four_bit(rounding="nearest")': Storage.four_bit(rounding=NEAREST),
    "Storage.four_bit(group_size=128)": Storage.four_bit(group_size=128),
}


def ours() -> Pairs:
    names = ("flash_adamw", "coat_adamw", "q_adamw")
    found = {f"{name}(lr)": formats.OPTIMIZERS[name] for name in names}
    found |= {name: (copy_of(s, MU), copy_of(s, NU)) for name, s in STORAGES.items()}
    return {name: (pair, {"bytes": [c.bytes for c in pair]}) for name, pair in found.items()}


class Peer:
    """One optimizer of torchao with a single parameter, which is the sample of a closed loop.

    The step compiles for a CPU by the C++ compiler of the machine. Its learning rate is 0.

    Args:
      name: of the class of torchao.optim.
      shape: [chunks, length] of the sample.
    """

    def __init__(self, name: str, shape: tuple[int, int]):
        import torch
        from torchao import optim

        self.label, self.shape = f"torchao {name}", shape
        self.parameter = torch.nn.Parameter(torch.zeros(shape))
        betas = DECAYS[MU], DECAYS[NU]
        self.optimizer = getattr(optim, name)([self.parameter], lr=0.0, betas=betas)

    def follow(self, gradients: np.ndarray) -> None:
        """Step once for each of the gradients [steps, chunks, length]."""
        import torch

        for one in gradients:
            self.parameter.grad = torch.tensor(one)
            self.optimizer.step()

    def results(self) -> tuple[dict[Copy, np.ndarray], dict[str, Any]]:
        """Return both moments, decoded, by how they are stored, and fields of their records.

        Bytes are per value, of codes and scales; a tensor's map, 1 KB at most, is not counted.
        """
        state, values, sizes = self.optimizer.state[self.parameter], {}, []
        for slot, name in ((MU, "exp_avg"), (NU, "exp_avg_sq")):
            own = state[name]  # quantized from 4,096 elements on, in whole blocks
            if not hasattr(own, "codes") or self.shape[1] % own.block_size:
                raise SystemExit(f"{self.label}: too small a sample; larger --preset or --chunks")
            copy = Copy(slot, f"torchao's map of {own.qmap.numel()}", own.block_size, NEAREST)
            values[copy] = own.dequantize().numpy()
            stored = (x.numel() * x.element_size() for x in (own.codes, own.scale))
            sizes.append(sum(stored) / float(np.prod(self.shape)))
        return values, {"bytes": sizes, "version": versions("torchao")}


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--torchao", action="store_true", help="measure torchao's optimizers")
    args = parser.parse_args(arguments)
    if args.torchao and not all(map(importlib.util.find_spec, ("torch", "torchao"))):
        raise SystemExit("--torchao: pip install torch torchao")
    bench, pairs = ("four_bits_torchao", ours()) if args.torchao else ("four_bits", compared())
    kept = sorted({copy for pair, _ in pairs.values() for copy in pair} - {*EXACT.values()})
    experiment = make_experiment(args, kept, CALLS, gradients=args.torchao)
    shape = len(experiment.sample.leaf_of_chunk), experiment.sample.length
    names = ("AdamW4bit", "AdamW8bit") if args.torchao else ()
    peers = [Peer(name, shape) for name in names]
    experiment.seen = lambda snapshot: [peer.follow(snapshot.gradients) for peer in peers]
    experiment.train_copies(say)
    values = dict(experiment.last.values)
    for peer in peers:
        found, more = peer.results()
        values |= found
        pairs[peer.label] = tuple(found), more
    errors, rows = experiment.errors(values), []
    for name, (pair, more) in pairs.items():
        numbers = {m: (x, UNITS.get(m)) for m, x in zip(METRICS, errors[pair], strict=True)}
        own = {"mu": pair[0].key, "nu": pair[1].key, "seed": args.seed, **more}
        flags = experiment.flags()
        rows += records.records_of(bench, args.preset, name, numbers, **own, flags=flags)
    records.show(rows)
    records.keep(rows, args.record)
