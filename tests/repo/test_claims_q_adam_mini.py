"""Tests of the findings for Q-Adam-mini's claims, with synthetic and stored records."""

import numpy as np
import pytest

from benchmarks import claims, records, tables
from benchmarks import curves as stored_curves
from benchmarks.claims import BETTER, NOT, SAME
from benchmarks.claims import q_adam_mini as paper

GPU = "some GPU"
LOSSES = {
    paper.ADAMW: 3.0, paper.MINI: 3.02, paper.AGAIN: 3.021, paper.OURS: 3.025,
    paper.NEAREST: 3.024, paper.EMBEDDINGS: 3.025, paper.REFERENCE: 3.2, paper.CASE_1: 5.0,
    paper.GUARDED: 3.02,
}  # fmt: skip
COMPUTED = {"Table 3", "Table 4"}  # from shapes, not from records


def made(impl, metric, value, **more):
    row = {"bench": "train", "case": "gpt-45m/q_adam_mini", "impl": impl, "metric": metric}
    about = {"device": GPU, "jax": "1", "commit": "c", "seed": 0}
    return row | about | {"value": value, "flags": {"parameters": 45_000_000}} | more


def trained(metric="val_loss", **changes):
    """Records of a metric: the losses above, or norms of 1, with some changed."""
    base = LOSSES if metric == "val_loss" else dict.fromkeys(LOSSES, 1.0)
    return [made(impl, metric, value) for impl, value in (base | changes).items()]


def verdict_of(where, rows):
    found = [claim.finding(rows) for claim in paper.CLAIMS if claim.where == where]
    assert len(found) == 1, where
    return found[0]


def test_without_records_only_shapes_speak():
    body, used = claims.table([], paper.CLAIMS)
    assert len(body) == len({(where, says) for where, says, *_ in body}) >= 20
    assert not used
    for where, says, measured, _, _, verdict in body:
        assert where and says
        computed = where.partition(",")[0] in COMPUTED
        assert (verdict == SAME) == computed, where
        if not computed:
            assert verdict in (claims.NOT_MEASURED, claims.NOT_TRIED)
            assert bool(measured) == (verdict == claims.NOT_TRIED)  # then the reason


def test_the_stored_records():
    """Of each row with records there is a verdict, and the embedding's explosion is seen."""
    rows = records.newest(records.all_records())
    found = {claim.where: claim.finding(rows) for claim in paper.CLAIMS}
    assert claims.NOT_MEASURED not in {one.verdict for one in found.values()}
    assert found["Figure 6a, embedding, nearest"].verdict == SAME


@pytest.mark.parametrize(
    ("where", "metric", "impl", "same", "other"),
    [
        ("Table 1, AdamW → Q-Adam-mini", "val_loss", paper.OURS, 2.8, 3.2),
        ("Figure 5, 8-bit m, f32 v (Case 2), nearest", "val_loss", paper.REFERENCE, 3.3, 3.8),
        ("Figure 8b, stochastic in the embedding", "val_loss", paper.EMBEDDINGS, 2.8, 3.3),
        ("Figure 6a, embedding, nearest", "embedding_norm", paper.REFERENCE, 11.0, 9.0),
        ("Figure 8a, stochastic in the embedding", "embedding_norm", paper.EMBEDDINGS, 1.009, 1.02),
        ("§2.3.2, embedding, nearest, without the reference's floor", "embedding_norm",
         paper.NEAREST, 11.0, 1.0),
        ("Figure 6b, a middle layer, nearest", "mlp_norm", paper.REFERENCE, 0.96, 1.14),
        ("Figure 6b, a middle layer, stochastic everywhere", "mlp_norm", paper.OURS, 1.04, 34.3),
    ],
)  # fmt: skip
def test_the_bounds(where, metric, impl, same, other):
    assert verdict_of(where, trained(metric, **{impl: same})).verdict == SAME
    assert verdict_of(where, trained(metric, **{impl: other})).verdict == NOT
    without = [row for row in trained(metric) if row["impl"] != impl]
    assert verdict_of(where, without).verdict == claims.NOT_MEASURED


@pytest.mark.parametrize(
    ("where", "impl", "losses"),
    [
        ("Table 1, AdamW → Q-Adam-mini", paper.OURS, (3.035, 3.04)),
        ("Table 1, AdamW → Adam-mini", paper.MINI, (3.02, 3.03)),
        ("Figure 8b, stochastic in the embedding", paper.EMBEDDINGS, (3.03, 3.04)),
    ],
)
def test_one_seed_decides_no_small_difference(where, impl, losses):
    for loss in losses:
        found = verdict_of(where, trained("val_loss", **{impl: loss}))
        assert (found.verdict, found.scale) == (claims.UNDECIDED, "one seed")


def test_other_devices_and_cases_are_not_mixed():
    rows = [*trained(), made(paper.MINI, "val_loss", 1.0, device="another")]
    where = "Figure 8b, stochastic in the embedding"
    assert verdict_of(where, rows).verdict == claims.NOT_MEASURED
    demo = made(paper.MINI, "val_loss", 1.0, case="demo/adamw")
    assert verdict_of(where, [*trained(), demo]).verdict == claims.UNDECIDED


@pytest.fixture
def curves(tmp_path, monkeypatch):
    """Stores curves where the claims look for them."""
    path = tmp_path / "curves.npz"
    monkeypatch.setattr(stored_curves, "CURVES", path)
    monkeypatch.setattr(stored_curves.load, "__defaults__", (path,))

    def store(**runs):
        stored_curves.Curves({}, runs).save(path)

    return store


def run(mu, nu, train_loss=(9.0, 3.0)):
    found = {"mu_norm": mu, "nu_norm": nu, "train_loss": train_loss, "step": (50, 100)}
    return {name: np.asarray(values, np.float32) for name, values in found.items()}


@pytest.mark.parametrize(("late", "verdict"), [(0.8, SAME), (3.0, NOT)])
def test_figure_7(curves, late, verdict):
    plain = run((9.0, 1.0), (9.0, 1.0))
    exploding = run((1.0, 1.0), (1.0, late))
    where, rows = "Figure 7, m and v of the embedding", trained("embedding_norm")
    assert verdict_of(where, rows).verdict == claims.NOT_MEASURED
    curves(**{paper.MINI: plain, paper.OURS: plain, paper.REFERENCE: exploding})
    found = verdict_of(where, rows)
    assert (found.verdict, f"v x {late:.2f}" in found.measured) == (verdict, True)


@pytest.mark.parametrize(("loss", "verdict"), [(5.0, SAME), (float("nan"), SAME), (3.1, NOT)])
def test_figure_3(curves, loss, verdict):
    where, rows = "Figure 3, 8-bit m and v (Case 1)", trained(**{paper.CASE_1: loss})
    assert verdict_of(where, rows).verdict == claims.NOT_MEASURED
    curves(**{paper.CASE_1: run((1, 1), (1, 1), train_loss=(9.0, 700.0))})
    found = verdict_of(where, rows)
    assert found.verdict == verdict
    assert "training loss up to 700 at step 100" in found.measured


@pytest.mark.parametrize(("ms", "verdict"), [(1.04, BETTER), (1.9, SAME), (2.5, NOT)])
def test_table_5(ms, verdict):
    rows = [
        made(impl, "device_ms", value, bench="rounding", device=device)
        for device, base in ((GPU, 1.0), ("cpu-2-cores", 9.0))
        for impl, value in (("nearest", base), ("stochastic", base * ms if base == 1 else 99.0))
    ]
    where = "Table 5, stochastic rounding of [1,000,000, 2048]"
    found = verdict_of(where, rows)
    assert (found.verdict, len(found.rows)) == (verdict, 2)
    assert f"(x {ms:.2f})" in found.measured
    assert verdict_of(where, rows[1:]).verdict == claims.NOT_MEASURED


def test_the_page_has_the_table():
    page = tables.TABLES["claims_q_adam_mini"]([])
    assert page.count("\n| ") == len(paper.CLAIMS)
    assert NOT not in page  # nothing is said where nothing is measured
