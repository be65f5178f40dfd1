"""Tests of the findings for SwitchBack's claims, with synthetic and stored records."""

import math

import pytest

from benchmarks import claims, records, tables
from benchmarks.claims import BETTER, NOT, SAME
from benchmarks.claims import switchback as paper
from tests import claims_cases

LOSSES = {
    paper.STANDARD: 1.0, paper.OTHER_START: 1.001, paper.INT8: 1.001, paper.FP8: 1.002,
    paper.M: 1.001, paper.Q: 1.001, paper.ALL_INT8: 1.02, paper.TENSORWISE: 1.1, paper.UNIT: 1.2,
    paper.CLIPPED: 1.2, paper.KQ_NORM: 1.2, paper.SCALED: 1.11, paper.STANDARD_SCALED: 1.1,
}  # fmt: skip
FLAGS = {"parameters": 27_000_000, "steps": 2000, "tokens": 8192}


def made(*given, **more):
    return claims_cases.made(*given, **{"seed": 0} | more)


def trained(metric="val_loss", large=False, **changes):
    """Records of a metric: the losses above, or others for some."""
    case = f"llama-27m{'-large' if large else ''}/switchback"
    base = LOSSES | {name.replace("__", "-"): value for name, value in changes.items()}
    return [made("train", case, i, metric, v, flags=FLAGS) for i, v in base.items()]


def finding_of(where, rows):
    return claims_cases.finding_of(paper, where, rows)


def test_without_records_nothing_is_said():
    claims_cases.assert_nothing_is_said(paper)


def test_the_stored_records():
    """Each row has a verdict or waits for its records; appendix D does not wait."""
    rows = records.newest(records.all_records())
    found = {claim.where: claim.finding(rows) for claim in paper.CLAIMS}
    assert {one.verdict for one in found.values()} <= {*claims.VERDICTS}
    assert found["Appendix D.1, equation 12"].verdict == SAME


@pytest.mark.parametrize(
    ("where", "impl", "same", "other"),
    [
        ("Figure 1, SwitchBack, int8", paper.INT8, 0.94, 1.06),
        ("Figure 1, SwitchBack, fp8", paper.FP8, 0.94, math.nan),
        ("Figure 1, LLM.int8()", paper.ALL_INT8, 1.06, 0.94),
        ("Figure 1, tensor-wise fp8, scaled to its range", paper.TENSORWISE, 1.051, 1.049),
        ("Figure 1, tensor-wise fp8, scaled to 1", paper.UNIT, math.nan, 1.049),
        ("Figure 2, with gradient clipping", paper.CLIPPED, 1.051, 1.049),
        ("Figure 2, with KQ layer norm", paper.KQ_NORM, 1.051, 1.049),
        ("Figure 2, with zero-init layer scale", paper.SCALED, 1.15, 1.16),
    ],
)
def test_the_bounds(where, impl, same, other):
    for value, verdict in ((same, SAME), (other, NOT)):
        assert finding_of(where, trained(**{impl: value})).verdict == verdict
    without = [row for row in trained() if row["impl"] != impl]
    assert finding_of(where, without).verdict == claims.NOT_MEASURED


def test_speed_beside_llm_int8():
    """At both batches."""
    where = "Figure 8, a whole model, SwitchBack against LLM.int8()"
    small = trained("tokens_per_s", **{paper.INT8: 1.2, paper.ALL_INT8: 0.9})
    assert finding_of(where, small).verdict == claims.NOT_MEASURED
    for ours, theirs, verdict in ((1.1, 0.9, SAME), (0.8, 0.9, NOT), (1.2, 1.1, NOT)):
        speeds = {paper.INT8: ours, paper.ALL_INT8: theirs}
        found = finding_of(where, small + trained("tokens_per_s", large=True, **speeds))
        assert found.verdict == verdict
        assert f"x 1.20 and x 0.90 of bf16's tokens/s; 8,192 tokens a step: x {ours:.2f} and" in (
            found.measured
        )


@pytest.mark.parametrize("loss", [0.96, 1.0049, 1.0051, 1.04])
@pytest.mark.parametrize(
    ("where", "impl"),
    [("Figure 1, SwitchBack, int8", paper.INT8), ("Figure 1, LLM.int8()", paper.ALL_INT8),
     ("§2.2.1, SwitchBackM", paper.M)],
)  # fmt: skip
def test_one_seed_decides_no_small_difference(where, impl, loss):
    found = finding_of(where, trained(**{impl: loss}))
    assert (found.verdict, found.scale) == (claims.UNDECIDED, "one seed")


def test_what_chance_does_is_not_worse():
    """A difference as other initial weights make is none."""
    where = "Figure 1, LLM.int8()"
    rows = trained(**{paper.OTHER_START: 1.04, paper.ALL_INT8: 1.06})
    assert finding_of(where, rows).verdict == NOT
    found = finding_of(where, trained(**{paper.OTHER_START: 1.02, paper.ALL_INT8: 1.06}))
    assert found.verdict == SAME and "other initial weights +2.00 %" in found.measured


def test_a_large_batch_without_another_start():
    """Chance is then the smaller batch's."""
    where = "Figure 1, LLM.int8(), a large batch (appendix D.3)"
    large = [row for row in trained(large=True) if row["impl"] != paper.OTHER_START]
    assert finding_of(where, large).verdict == claims.NOT_MEASURED
    found = finding_of(where, [*large, *trained(**{paper.OTHER_START: 1.011})])
    assert found.verdict == claims.UNDECIDED and "+1.10 %, with the smaller batch" in found.measured


def test_batches_and_devices_are_not_mixed():
    small, large = "Figure 1, SwitchBack, int8", "Figure 1, SwitchBack, int8, a large batch"
    assert finding_of(large, trained()).verdict == claims.NOT_MEASURED
    assert finding_of(small, trained(large=True)).verdict == claims.NOT_MEASURED
    rows = [*trained(), *trained(large=True, **{paper.INT8: 1.5})]
    assert (finding_of(small, rows).verdict, finding_of(large, rows).verdict) == (
        claims.UNDECIDED,
        NOT,
    )
    on_a_cpu = [row | {"device": "cpu-2-cores"} for row in trained()]
    assert finding_of(small, on_a_cpu).verdict == claims.NOT_MEASURED
    other = [row | {"device": "another"} for row in trained() if row["impl"] == paper.STANDARD]
    assert finding_of(small, [*trained(), *other]).verdict == claims.NOT_MEASURED


@pytest.mark.parametrize(
    ("metric", "when"), [("first_features", "init"), ("last_features", "the end")]
)
def test_features(metric, when):
    for value, verdict in ((0.3, SAME), (3.0, NOT)):
        rows = trained(metric, **{paper.STANDARD: 2.0, paper.STANDARD_SCALED: value})
        assert finding_of(f"Figure 2, features at {when}", rows).verdict == verdict


# ---- Appendix D ----------------------------------------------------------------------------------


def spreads(power, error=1.0):
    """Records of errors that grow with a power of the length, beside what was predicted."""
    for product in ("forward", "input gradient", "weight gradient"):
        for length in (256, 1280, 5120, 65536):
            case, value = f"variance/{product} of {length}", float(length) ** power
            values = {
                "error": value * error,
                "predicted": value,
                "relative": value * error / length,
            }
            for name, found in values.items():
                metric = f"{name}_variance"
                yield made("switchback", case, "normal", metric, found, length=length)


@pytest.mark.parametrize(("power", "verdict"), [(1.0, SAME), (1.2, SAME), (0.8, NOT)])
def test_growth(power, verdict):
    rows = list(spreads(power))
    found = finding_of("Appendix D.2, variance of the error", rows)
    assert found.verdict == verdict and f"power of {power:.2f} to {power:.2f}" in found.measured
    assert f"{power - 1:.2f} to {power - 1:.2f} (normal)" in found.measured
    clip = "Appendix D.3, CLIP ViT-Huge's weight gradient against its forward products"
    found = finding_of(clip, rows)
    assert found.verdict == verdict
    if power == 1:
        assert found.measured.startswith("x 51.2 and x 12.8 ")


@pytest.mark.parametrize(
    ("error", "verdict"), [(1.09, SAME), (0.95, SAME), (1.11, NOT), (0.8, NOT)]
)
def test_equation_12(error, verdict):
    found = finding_of("Appendix D.1, equation 12", list(spreads(1.0, error)))
    assert (found.verdict, f"x {error:.2f} to" in found.measured) == (verdict, True)


# ---- Speed and memory ----------------------------------------------------------------------------


def layers(gains, impl=paper.INT8, **more):
    for shape, gain in enumerate(gains):
        yield made("linear", str(shape), "bf16", "device_ms", 1 + gain, **more)
        yield made("linear", str(shape), impl, "device_ms", 1.0, **more)


@pytest.mark.parametrize(
    ("gains", "verdict"), [((0.06, 0.3), SAME), ((0.06, 0.4), BETTER), ((0.04, 0.4), NOT)]
)
def test_layers(gains, verdict):
    where = "Figures 6, right, and 10, a layer in int8"
    found = finding_of(where, list(layers(gains)))
    assert (found.verdict, len(found.rows)) == (verdict, 4)
    assert "over 2 shapes" in found.measured
    on_a_cpu = list(layers(gains, device="cpu-2-cores"))
    assert finding_of(where, on_a_cpu).verdict == claims.NOT_MEASURED


@pytest.mark.parametrize(("ms", "verdict"), [(0.4, BETTER), (0.55, SAME), (0.7, NOT)])
def test_products(ms, verdict):
    rows = [made("linear", "a", "bf16 forward", "operation_ms", 1.0)]
    where = "Figure 6, left, int8 products"
    assert finding_of(where, rows).verdict == claims.NOT_MEASURED
    rows.append(made("linear", "a", "int8 forward", "operation_ms", ms))
    assert finding_of(where, rows).verdict == verdict


@pytest.mark.parametrize(("ms", "verdict"), [(0.2, SAME), (0.3, NOT)])
def test_quantizing(ms, verdict):
    names = [f"int8 quantize {of}" for of in ("x", "g", "w", "w transposed")]
    rows = [made("linear", "a", name, "operation_ms", ms / 4) for name in names]
    for name in ("int8 forward", "int8 input gradient", "bf16 weight gradient"):
        rows.append(made("linear", "a", name, "operation_ms", (1 - ms) / 3))
    found = finding_of("Figure 7, left, quantizing", rows)
    assert (found.verdict, found.measured.startswith(f"{100 * ms:.0f} to")) == (verdict, True)


@pytest.mark.parametrize(("size", "verdict"), [(54, SAME), (100, NOT)])
def test_saved_bytes(size, verdict):
    rows = [
        made("linear", "a", impl, "saved_bytes", n) for impl, n in (("bf16", 100), (paper.M, size))
    ]
    where = "Algorithm 3, what SwitchBackM keeps for the backward pass"
    assert finding_of(where, rows).verdict == verdict


@pytest.mark.parametrize(("gain", "verdict"), [(1.14, SAME), (1.12, NOT)])
def test_a_whole_model(gain, verdict):
    def run(linear, value, **more):
        flags = {"linear": linear, "batch": 8} | more
        case = f"llama-1b linear={linear}/flash_adamw"
        return made("train", case, "lowmem", "tokens_per_s", value, flags=flags)

    where = "Figure 7, right, a whole model in int8 (ours: Llama-3.2-1B)"
    plain, ours = run(paper.STANDARD, 1000.0), run(paper.INT8, 1000.0 * gain)
    assert finding_of(where, [plain, ours]).verdict == verdict
    assert finding_of(where, [ours]).verdict == claims.NOT_MEASURED
    slower = [plain, run(paper.INT8, 900.0), run(f"{paper.INT8}-auto", 1000.0 * gain)]
    found = finding_of(where, slower)  # where 8 bits are taken only if faster
    assert (found.verdict, len(found.rows)) == (verdict, 3) and "-10.0 %" in found.measured
    other = run(paper.STANDARD, 1.0, batch=4)  # not the same run
    assert finding_of(where, [plain, other, ours]).verdict == verdict


def test_the_page_has_the_table():
    page = tables.TABLES["claims_switchback"]([])
    assert page.count("\n| ") == len(paper.CLAIMS)
    assert NOT not in page
