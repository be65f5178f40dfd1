"""Codecs for optimizer slots and splits for master weights, and dicts of both by name."""

from optax_lowmem._src.codecs import CODECS as CODECS
from optax_lowmem._src.codecs import NAMES as NAMES
from optax_lowmem._src.codecs import SPLITS as SPLITS
from optax_lowmem._src.codecs import BitSplit as BitSplit
from optax_lowmem._src.codecs import CompandedCodec as CompandedCodec
from optax_lowmem._src.codecs import GroupCodec as GroupCodec
from optax_lowmem._src.codecs import MasterSplit as MasterSplit
from optax_lowmem._src.codecs import StoredSlot as StoredSlot
from optax_lowmem._src.codecs import UlpSplit as UlpSplit
from optax_lowmem._src.codecs import affine as affine
from optax_lowmem._src.codecs import affine_paper as affine_paper
from optax_lowmem._src.codecs import decode_array as decode_array
from optax_lowmem._src.codecs import dynamic as dynamic
from optax_lowmem._src.codecs import e4m3 as e4m3
from optax_lowmem._src.codecs import e5m2 as e5m2
from optax_lowmem._src.codecs import encode_array as encode_array
from optax_lowmem._src.codecs import expanded as expanded
from optax_lowmem._src.codecs import expanded_dynamic as expanded_dynamic
from optax_lowmem._src.codecs import expanded_e4m3 as expanded_e4m3
from optax_lowmem._src.codecs import expanded_e5m2 as expanded_e5m2
from optax_lowmem._src.codecs import linear as linear
from optax_lowmem._src.codecs import linear4 as linear4
from optax_lowmem._src.codecs import linear_paper as linear_paper
from optax_lowmem._src.codecs import log4 as log4
from optax_lowmem._src.codecs import master_split as master_split
from optax_lowmem._src.codecs import normal4 as normal4
from optax_lowmem._src.codecs import softsign as softsign
from optax_lowmem._src.codecs import softsign4 as softsign4
from optax_lowmem._src.codecs import softsign_paper as softsign_paper
from optax_lowmem._src.codecs import split_of as split_of
from optax_lowmem._src.codecs import sqrt as sqrt
from optax_lowmem._src.codecs import sqrt4 as sqrt4
from optax_lowmem._src.codecs import sqrt_paper as sqrt_paper

__all__ = [
    "BitSplit",
    "CODECS",
    "CompandedCodec",
    "GroupCodec",
    "MasterSplit",
    "NAMES",
    "SPLITS",
    "StoredSlot",
    "UlpSplit",
    "affine",
    "affine_paper",
    "decode_array",
    "dynamic",
    "e4m3",
    "e5m2",
    "encode_array",
    "expanded",
    "expanded_dynamic",
    "expanded_e4m3",
    "expanded_e5m2",
    "linear",
    "linear4",
    "linear_paper",
    "log4",
    "master_split",
    "normal4",
    "softsign",
    "softsign4",
    "softsign_paper",
    "split_of",
    "sqrt",
    "sqrt4",
    "sqrt_paper",
]
