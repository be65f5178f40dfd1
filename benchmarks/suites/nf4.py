"""Frozen matrices in NF4: their error beside that of group codecs at equal bytes, and times.

Without `--times` the relative errors |decoded - w| / |w| of random matrices, on any device; with
it, the device time of decoding one matrix, and of its product in bf16 and in NF4.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import optax_lowmem as lowmem
from benchmarks import records
from benchmarks.records import Rows
from benchmarks.render import Rendered, Table
from benchmarks.timing import Timed, in_turns, middle
from optax_lowmem.layers import nf4

SHAPE = (2048, 4096)
DRAWS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "normal": lambda key: jax.random.normal(key, SHAPE),
    "Student's t, 5 degrees": lambda key: jax.random.t(key, 5.0, SHAPE),
}
GROUPS = (32, 64, 128)
CODECS = {name: getattr(lowmem.codecs, name) for name in ("normal4", "softsign4", "linear4")}
TOKENS, MATRIX = 2048, (14_336, 4096)


def _grouped(codec: Any, group: int) -> Callable[[jax.Array], tuple[jax.Array, Any]]:
    def stored(w: jax.Array) -> tuple[jax.Array, Any]:
        parts = lowmem.codecs.encode_array(codec, w, group)
        return lowmem.codecs.decode_array(codec, *parts, group, length=w.shape[-1]), parts

    return stored


def _nf4(w: jax.Array) -> tuple[jax.Array, Any]:
    q = nf4.quantize(w)
    return nf4.dequantize(q), q


FORMATS: dict[str, Callable[[jax.Array], tuple[jax.Array, Any]]] = {"NF4": _nf4} | {
    f"`{name}`, groups of {group}": _grouped(make(), group)
    for name, make in CODECS.items()
    for group in GROUPS
}


def errors() -> Iterator[Rows]:
    for draw, of_key in DRAWS.items():
        w = of_key(jax.random.key(0))
        for name, stored in FORMATS.items():
            decoded, parts = jax.jit(stored)(w)
            error = jnp.linalg.norm(decoded - w) / jnp.linalg.norm(w)
            bits = 8 * sum(x.nbytes for x in jax.tree.leaves(parts)) / w.size
            metrics = {"relative_error": (float(error), None), "bits": (bits, "bits/weight")}
            yield records.records_of("nf4", draw, name, metrics)


def times() -> Rows:
    """Device times with one matrix and 2,048 tokens."""
    key, (outputs, inputs) = jax.random.key(0), MATRIX
    w = 0.02 * jax.random.normal(key, MATRIX, jnp.bfloat16)
    x, q = jax.random.normal(key, (TOKENS, inputs), jnp.bfloat16), nf4.quantize(w)
    timed = {
        "decode": Timed(lambda q: nf4.dequantize(q, jnp.bfloat16), (q,), 1e-4),
        "product, bf16": Timed(lambda x, w: x @ w.T, (x, w), 4e-4),
        "product, NF4": Timed(lambda x, q: nf4.matmul(x, q, True), (x, q), 5e-4),
    }
    rows, case = [], f"{TOKENS} x {inputs} x {outputs}"
    for name, found in in_turns(timed, 5).items():
        value, spread = middle(found)
        rows += records.records_of("nf4", case, name, {"device_ms": value}, **spread)
    return rows


@records.suite(times={"action": "store_true", "help": "of products, instead of errors"})
def main(args: argparse.Namespace) -> Iterator[Rows]:
    if args.times:
        yield times()
    else:
        yield from errors()


def table(rows: Rows) -> Table:
    """Each format's bits, and its error on each kind of matrix."""
    found = records.grouped(records.select(rows, bench="nf4"), "impl", "metric", "case")
    body, used = [], []
    for name in FORMATS:
        of = found.get(name, {})
        if DRAWS.keys() <= of.get("relative_error", {}).keys():
            each, bits = of["relative_error"], of["bits"]["normal"]
            body.append([name, f"{bits['value']:.3f}", *(f"{each[d]['value']:.4f}" for d in DRAWS)])
            used += [bits, *(each[draw] for draw in DRAWS)]
    return ["", "bits per weight", *(f"relative error, {draw}" for draw in DRAWS)], body, used


TABLES = {"nf4": Rendered(table, "nf4")}
