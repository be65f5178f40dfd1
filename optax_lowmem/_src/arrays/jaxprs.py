"""Parts of jaxprs whose description differs between versions of JAX."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn


def scan_counts(eqn: JaxprEqn, body: Jaxpr) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a scan.

    The ranks inside and outside differ for stacked operands and results, but not for these.
    """
    carried = _of_equal_rank(eqn.outvars, body.outvars)
    return _of_equal_rank(eqn.invars, body.invars) - carried, carried


def _of_equal_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True))
