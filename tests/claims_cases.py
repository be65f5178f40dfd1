"""Records and assertions shared by the tests of the papers' claims."""

from typing import Any

from benchmarks import claims

GPU = "some GPU"


def made(bench: str, case: str, impl: str, metric: str, value: float, **more: Any) -> dict:
    """A record."""
    row = {"bench": bench, "case": case, "impl": impl, "metric": metric, "value": value}
    return row | {"unit": "", "device": GPU, "jax": "1", "commit": "c"} | more


def finding_of(paper: Any, where: str, rows: list[dict]) -> Any:
    """Return the finding of the one claim at `where`, computed from records."""
    found = [claim.finding(rows) for claim in paper.CLAIMS if claim.where == where]
    assert len(found) == 1, where
    return found[0]


def assert_nothing_is_said(paper: Any, least: int = 20) -> None:
    """Without records: each claim is not measured yet, or not tried for a reason that is given."""
    body, used = claims.table([], paper.CLAIMS)
    assert len(body) == len({where for where, *_ in body}) > least
    assert not used
    for _, says, measured, _, _, verdict in body:
        assert says
        assert verdict in (claims.NOT_MEASURED, claims.NOT_TRIED)
        assert bool(measured) == (verdict == claims.NOT_TRIED)  # then the reason
