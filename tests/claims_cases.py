"""Records for the tests of the papers' claims."""

from typing import Any

GPU = "some GPU"


def made(bench: str, case: str, impl: str, metric: str, value: float, **more: Any) -> dict:
    """A record."""
    row = {"bench": bench, "case": case, "impl": impl, "metric": metric, "value": value}
    return row | {"unit": "", "device": GPU, "jax": "1", "commit": "c"} | more
