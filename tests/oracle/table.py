"""The float64 oracle of each entry of the codec table: what its codes stand for."""

from . import adam_mini, coat, codecs

_SIGNS = {"int8": True, "uint8": False}

# a `codecs.Codec`, a table of magnitudes, or a function of codes and a grid
ORACLES = {
    "softsign-int8": codecs.softsign,
    "softsign-int8-paper": codecs.softsign,
    "sqrt-uint8": codecs.sqrt,
    "sqrt-uint8-paper": codecs.sqrt,
    "linear-int8": codecs.linear,
    "linear-int8-paper": codecs.linear,
    "linear-uint8": codecs.linear_unsigned,
    "linear-uint8-paper": codecs.linear_unsigned,
    "linear-int4": codecs.linear4,
    "linear-uint4": codecs.linear4_unsigned,
    "softsign-int4": codecs.softsign4,
    "sqrt-uint4": codecs.sqrt4,
    "normal-int4": codecs.normal4,
    "log-uint4": codecs.log4,
    "affine-int8": adam_mini.dequantize,
    "affine-int8-paper": adam_mini.dequantize,
    **{
        f"{expanded}{kind}-{form}": coat.table_of(kind, signed)
        for expanded in ("", "expanded-")
        for kind in ("e4m3", "e5m2", "dynamic")
        for form, signed in _SIGNS.items()
    },
}


def named(kind: type) -> list[str]:
    """The entries whose oracle is of this kind, in order."""
    return [name for name, oracle in ORACLES.items() if isinstance(oracle, kind)]
