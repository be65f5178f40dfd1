"""The formats of optimizer states that are compared: group sizes, roundings."""

import dataclasses
import itertools

from optax_lowmem import codecs
from optax_lowmem._src.arrays.codecs.base import Float32Scale
from optax_lowmem._src.arrays.codecs.float8 import MinifloatCodec
from optax_lowmem.codecs import GroupCodec

MU, NU = "mu", "nu"
NEAREST, STOCHASTIC = "nearest", "stochastic"
PAPER_GROUP = 128  # of COAT's tables, for every format
BUDGET = 1.03125  # bytes per value at which formats are compared: COAT's, a word for 128 values

E4M3, E5M2, DE8 = "E4M3", "E5M2", "DE8"
E4M3_X, E5M2_X, DE8_X = (f"{name} + expansion" for name in (E4M3, E5M2, DE8))
FLASH, FLASH_PAPER = "companded", "companded, paper"
AFFINE, AFFINE_PAPER, LINEAR, BNB = "affine", "affine, paper", "linear", "bitsandbytes"
FINE, FINE_X = "E3M4, UE4M4", "E3M4, UE4M4 + expansion"  # trials, not in the package


@dataclasses.dataclass(frozen=True)
class E3M4Codec(MinifloatCodec):
    """One bit from the exponent to the mantissa: 1/1792 of the maximum is code 1."""

    mantissa, lowest, highest = 4, -2, 4


@dataclasses.dataclass(frozen=True)
class UE4M4Codec(MinifloatCodec):
    """E4M3 with one more mantissa bit in the place of the sign, which v does not have."""

    mantissa, lowest, highest = 4, -6, 8


_E3M4, _UE4M4 = E3M4Codec(scale=codecs.e4m3().scale), UE4M4Codec(signed=False)


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to store each slot; None where nobody stores that slot so."""

    mu: GroupCodec | None  # the codecs
    nu: GroupCodec | None
    group: int = PAPER_GROUP  # the group size it comes with
    roundings: tuple[str, ...] = (NEAREST, STOCHASTIC)  # those that it is used with in closed loop


def _pair(build) -> Format:
    return Format(build(), build(signed=False))


FORMATS: dict[str, Format] = {
    E4M3: _pair(codecs.e4m3),
    E4M3_X: _pair(codecs.expanded_e4m3),
    E5M2: _pair(codecs.e5m2),
    E5M2_X: _pair(codecs.expanded_e5m2),
    DE8: _pair(codecs.dynamic),
    DE8_X: _pair(codecs.expanded_dynamic),
    FLASH: Format(codecs.softsign(), codecs.sqrt(), 32),
    FLASH_PAPER: Format(codecs.softsign_paper(), codecs.sqrt_paper(), 32, (NEAREST,)),
    AFFINE: Format(codecs.affine(), None, 256),
    AFFINE_PAPER: Format(codecs.affine_paper(), None, 256, (NEAREST,)),
    LINEAR: Format(codecs.linear(), codecs.linear(signed=False), 256),
    BNB: Format(
        dataclasses.replace(codecs.dynamic(), scale=Float32Scale()), codecs.dynamic(signed=False),
        256, (NEAREST,),
    ),
    FINE: Format(_E3M4, _UE4M4),
    FINE_X: Format(codecs.expanded(_E3M4), codecs.expanded(_UE4M4)),
}  # fmt: skip


def _linear4(signed: bool) -> GroupCodec:
    return dataclasses.replace(codecs.linear4(signed), scale=codecs.softsign4().scale)


# In 4 bits with 16-bit scales: for `four_bits`, in no table of 8-bit formats.
FOUR_BITS: dict[str, Format] = {
    "4 bits: linear": Format(_linear4(True), _linear4(False), 64),
    "4 bits: softsign, sqrt": Format(codecs.softsign4(), codecs.sqrt4(), 64),
    "4 bits: quantiles, octaves": Format(codecs.normal4(), codecs.log4(), 64),
}


@dataclasses.dataclass(frozen=True, order=True)
class Copy:
    """One way to keep one slot through training."""

    slot: str
    format: str
    group: int
    rounding: str

    @property
    def codec(self) -> GroupCodec:
        return getattr((FORMATS | FOUR_BITS)[self.format], self.slot)

    @property
    def bytes(self) -> float:
        return self.codec.bits / 8 + self.codec.scale.dtype.itemsize / self.group

    @property
    def key(self) -> str:
        return f"{self.slot}|{self.format}|{self.group}|{self.rounding}"

    @staticmethod
    def of(key: str) -> "Copy":
        slot, name, group, rounding = key.split("|")
        return Copy(slot, name, int(group), rounding)


Pair = tuple[Copy, Copy]


def column(slot: str, rounding: str) -> list[Copy]:
    """Every format of a slot at equal bytes, rounded the same way where it is ever rounded so."""
    return [
        Copy(slot, name, round(codec.scale.dtype.itemsize / (BUDGET - 1)), rounding)
        for name, how in FORMATS.items()
        if (codec := getattr(how, slot)) is not None and rounding in how.roundings and name != BNB
    ]


def papers(slot: str) -> list[Copy]:
    """The formats of COAT's tables in its groups."""
    return [
        Copy(slot, name, PAPER_GROUP, NEAREST) for name in (E4M3, E4M3_X, E5M2, E5M2_X, DE8, DE8_X)
    ]


def _own(mu: str, nu: str, group: int, rounding: str) -> Pair:
    return Copy(MU, mu, group, rounding), Copy(NU, nu, group, rounding)


# What optimizers keep: ours by their names, others by whose they are.
OPTIMIZERS: dict[str, Pair] = {
    "flash_adamw": _own(FLASH, FLASH, 32, STOCHASTIC),
    "FlashOptim": _own(FLASH_PAPER, FLASH_PAPER, 32, NEAREST),
    "coat_adamw": _own(E4M3_X, E4M3_X, 128, STOCHASTIC),
    "COAT": _own(E4M3_X, E4M3_X, 128, NEAREST),
    "COAT without expansion": _own(E4M3, E4M3, 128, NEAREST),
    "q_adamw": _own(AFFINE, FLASH, 256, STOCHASTIC),
    "bitsandbytes": _own(BNB, BNB, 256, NEAREST),
}


def copies() -> list[Copy]:
    """All that are kept in closed loop: at equal bytes, and in optimizers."""
    found = {copy for pair in OPTIMIZERS.values() for copy in pair}
    for slot, rounding in itertools.product((MU, NU), (NEAREST, STOCHASTIC)):
        found |= {*column(slot, rounding)}
    return sorted(found)


# The f32 moments themselves, for what one slot does alone.
EXACT = {slot: Copy(slot, "f32", 1, NEAREST) for slot in (MU, NU)}
