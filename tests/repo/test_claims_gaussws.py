"""Tests of the findings for GaussWS' claims, with synthetic and stored records."""

import math

import pytest

from benchmarks import claims, records, tables
from benchmarks.claims import NOT, SAME
from benchmarks.claims import gaussws as paper
from benchmarks.suites.noise import tables as noise_tables
from tests import claims_cases

FLAGS = {"parameters": 27_000_000, "steps": 5000, "tokens": 8192}
LOSSES = {
    paper.BASE: 1.0, paper.OTHER_START: 1.001, paper.OD: 1.002, paper.ALL: 1.005,
    paper.DIFFQ: 1.02,
}  # fmt: skip


def made(*given, **more):
    return claims_cases.made(*given, **{"seed": 0, "flags": FLAGS} | more)


def trained(metric="val_loss", **changes):
    losses = LOSSES | changes
    return [made("train", "llama-27m/gaussws", i, metric, v) for i, v in losses.items()]


def finding_of(where, rows):
    return claims_cases.finding_of(paper, where, rows)


def test_without_records_nothing_is_said():
    claims_cases.assert_nothing_is_said(paper, least=25)


def test_the_stored_records():
    rows = records.newest(records.all_records())
    found = {claim.where: claim.finding(rows) for claim in paper.CLAIMS}
    for where, verdict in (("Equation 8", SAME), ("§3.4", NOT), ("§3.5", SAME),
                           ("Equation 6, BF16", NOT),
                           ("Equation 6 with m + 1 - r, BF16", SAME)):  # fmt: skip
        assert found[where].verdict == verdict


@pytest.mark.parametrize(
    ("where", "impl", "same", "other"),
    [
        (f"Figures 1b and 4, {paper.OD}", paper.OD, 0.94, 1.06),
        (f"Figures 1b and 4, {paper.ALL}", paper.ALL, 0.94, math.nan),
        ("Figure 1b, [od]", paper.OD, 0.94, 1.07),
        (f"Figure 1b, {paper.ALL} against DiffQ[all]", paper.ALL, 0.94, 1.08),
    ],
)
def test_the_bounds(where, impl, same, other):
    for value, verdict in ((same, SAME), (other, NOT)):
        assert finding_of(where, trained(**{impl: value})).verdict == verdict
    on_a_cpu = [row | {"device": "cpu-2-cores"} for row in trained()]
    assert finding_of(where, on_a_cpu).verdict == claims.NOT_MEASURED


@pytest.mark.parametrize("loss", [0.99, 1.0099, 1.0101, 1.04])
def test_one_seed_decides_no_small_difference(loss):
    for name in (paper.OD, paper.ALL):
        found = finding_of(f"Figures 1b and 4, {name}", trained(**{name: loss}))
        assert (found.verdict, found.scale) == (claims.UNDECIDED, "one seed")
        assert "at most +1.00 % was to follow it" in found.measured


def rates(base, noisy):
    for name, losses in ((paper.BASE, base), (paper.ALL, noisy)):
        for factor, (last, least) in losses.items():
            for metric, value in (("val_loss", last), ("least_val_loss", least)):
                yield made("train", "llama-27m-rates/gaussws", f"{name} x{factor}", metric, value)


GOOD, NAN, ROSE, STUCK = (1.0, 1.0), (math.nan, 2.0), (1.2, 1.1), (1.6, 1.6)


@pytest.mark.parametrize(
    ("base", "noisy", "verdict"),
    [
        ({1: GOOD, 8: NAN}, {1: GOOD, 8: GOOD}, SAME),
        ({1: GOOD, 8: ROSE, 16: NAN}, {1: GOOD, 8: GOOD, 16: NAN}, SAME),
        ({1: GOOD, 8: STUCK}, {1: GOOD, 8: STUCK}, NOT),
        ({1: GOOD, 8: GOOD}, {1: GOOD, 8: NAN}, NOT),
    ],
)
def test_learning_rates(base, noisy, verdict):
    rows = [*trained(), *rates(base, noisy)]
    assert finding_of("Figure 1b, learning rates", rows).verdict == verdict
    assert (
        finding_of(f"Figures 1b and 4, {paper.OD}", rows).verdict == claims.UNDECIDED
    )  # not mixed


def bits(mean, deeper=0.1, **kinds):
    for kind in paper.MATRICES:
        own = kinds.get(kind, mean)
        for what, value in (("mean", own), ("mean_first", own), ("mean_second", own + deeper),
                            ("least", own - 1), ("largest", own + 1)):  # fmt: skip
            yield made("train", "llama-27m/gaussws", paper.ALL, f"bits_{kind}_{what}", value)


def test_bitwidths():
    for mean, verdict in ((4.5, SAME), (5.2, NOT)):
        assert finding_of("Figure 6, b_t", list(bits(mean))).verdict == verdict
    for deeper, verdict in ((0.1, SAME), (-0.1, NOT)):
        assert finding_of("§4.4, depth", list(bits(4.5, deeper))).verdict == verdict
    where = "§4.4, w2 against the others of the feed-forward module"
    for own, verdict in ((4.6, SAME), (4.4, NOT)):
        assert finding_of(where, list(bits(4.5, down_proj=own))).verdict == verdict


def casts(name, **losses):
    return [made("gaussws", "llama-27m/gaussws", name, f"cast {k}", v) for k, v in losses.items()]


def test_casts():
    where = f"Table 2, {paper.ALL} cast to the formats of its b_t"
    for loss, verdict in ((1.0049, SAME), (1.0051, NOT)):
        own = {"clean": 1.0, "all safe": loss}
        rows = [*casts(paper.ALL, **own), *casts(paper.BASE, **own)]
        assert finding_of(where, rows).verdict == verdict
    assert finding_of(where, casts(paper.ALL, **own)).verdict == claims.NOT_MEASURED
    head, body, _ = noise_tables.casts(rows)
    assert head[1:] == [paper.ALL, paper.BASE] and body == [["all safe", "+0.51 %", "+0.51 %"]]


# ---- Speed and memory ----------------------------------------------------------------------------


def noise(gain, bm=1.1):
    for shape in ("2048x512", "16384x16384"):
        for metric in ("gelem_per_s", "noise_gelem_per_s"):
            for impl, value in (("gaussws", gain), ("jax-normal", 1.0), ("box-muller", gain / bm)):
                yield made("noise", shape, impl, metric, value)


def steps(od=0.004, every=0.015, extra=2.02):
    for name, share in ((paper.BASE, 0.0), (paper.OD, od), (paper.ALL, every)):
        values = {"overhead": share, "tokens_per_s": 1e5, "extra_bytes": extra, "peak_bytes": 2**30}
        for metric, value in values.items():
            yield made("train", "llama-134m/flash_adamw", name, metric, value)


def test_speed():
    where = "Figure 5, against the framework's normal numbers"
    for gain, verdict in ((3.0, SAME), (2.9, NOT)):
        found = finding_of(where, list(noise(gain)))
        assert (found.verdict, len(found.rows)) == (verdict, 4)
    where = f"Table 1, AdamW, {paper.OD}"
    for share, verdict in ((0.0047, SAME), (0.005, NOT)):
        assert finding_of(where, list(steps(od=share))).verdict == verdict
    for extra, verdict in ((2.1, SAME), (2.2, NOT)):
        assert finding_of("Table 1, memory", list(steps(extra=extra))).verdict == verdict


def test_targets():
    assert noise_tables.targets([])[1] == []
    _, body, _ = noise_tables.targets([*noise(4.0), *steps()])
    assert [row[-1] for row in body] == ["yes"] * 6
    _, body, _ = noise_tables.targets([*noise(2.0, bm=0.9), *steps(0.006, 0.03, 2.2)])
    assert [row[-1] for row in body] == ["**no**"] * 6
    _, body, _ = noise_tables.targets(list(noise(4.0)))
    assert len(body) == 3  # the others wait


def test_the_pages_have_the_tables():
    assert tables.TABLES["claims_gaussws"]([]).count("\n| ") == len(paper.CLAIMS)
    rows = [*noise(4.0), *steps()]
    for name, lines in (("noise_targets", 6), ("noise_forward", 2), ("noise_alone", 2),
                        ("noise_steps", 3)):  # fmt: skip
        assert tables.TABLES[name](rows).count("\n| ") == lines
        assert "Nothing is recorded yet" in tables.TABLES[name]([])
