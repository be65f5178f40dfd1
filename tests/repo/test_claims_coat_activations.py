"""Tests of the findings for COAT's claims on activations, with synthetic and stored records."""

import math

import numpy as np
import pytest

pytest.importorskip("flax")

from benchmarks import (  # noqa: E402
    claims,  # noqa: E402
    records,
    tables,
)
from benchmarks.claims import BETTER, NOT, SAME  # noqa: E402
from benchmarks.claims import coat_activations as paper  # noqa: E402
from benchmarks.suites.activations import tables as activation_tables  # noqa: E402
from benchmarks.suites.activations.tables import BF16, OURS, TWO_THIRDS  # noqa: E402
from tests import claims_cases  # noqa: E402
from tests.claims_cases import made  # noqa: E402


def layer(case, impl, metric, value, **more):
    return made("activations", case, impl, metric, value, **more)


def finding_of(where, rows):
    found = [claim.finding(rows) for claim in paper.CLAIMS if claim.where.startswith(where)]
    assert len(found) == 1, where
    return found[0]


def test_without_records_nothing_is_said():
    claims_cases.assert_nothing_is_said(paper)
    for name in activation_tables.TABLES:
        assert "Nothing is recorded yet" in tables.TABLES[name]([])


def test_the_stored_records():
    """Bytes and errors need no GPU and do not wait for one; the targets on bytes are reached."""
    rows = records.newest(records.all_records())
    for where in ("Table 2, COAT", "Tables 2 and 7", "Figure 4a", "Table 10, scales"):
        assert finding_of(where, rows).verdict in (SAME, BETTER)
    _, body, _ = activation_tables.targets(rows)
    assert [row[-1] for row in body if "kept by a layer" in row[0]] == ["yes"] * 3
    assert all(activation_tables.TABLES[name].make(rows)[1] for name in (
        "activation_units", "activation_groups", "activation_training"))  # fmt: skip


@pytest.mark.parametrize(("units", "verdict"), [(10.0, BETTER), (13.5, SAME), (14.5, NOT)])
def test_bytes(units, verdict):
    rows = [layer(TWO_THIRDS, OURS, "saved_units", units, columns={})]
    assert finding_of("Table 2, COAT", rows).verdict == verdict
    rows += [layer(TWO_THIRDS, BF16, "saved_units", 28.0, columns={})]
    _, ((_, asked, measured, reached),), _ = activation_tables.targets(rows)
    assert (reached == "yes") == (verdict != NOT) and "0.46 U of scales" in asked
    assert f"bf16 / {22.66 / units:.2f}" in measured and f"/ {28 / units:.2f}" in measured


@pytest.mark.parametrize(
    ("times", "verdict", "reached"),
    [(1.57, SAME, "yes"), (1.7, BETTER, "yes"), (1.42, NOT, "yes"), (1.39, NOT, "**no**")],
)
def test_speed(times, verdict, reached):
    case = "h4096-s2048-b4"
    rows = [layer(case, BF16, "device_ms", times), layer(case, OURS, "device_ms", 1.0)]
    assert finding_of(f"Table 7, forward and backward of a layer, {case}", rows).verdict == verdict
    assert [row[-1] for row in activation_tables.targets(rows)[1]] == [reached]
    for row in rows:
        row["device"] = "cpu-2-cores"
    assert activation_tables.targets(rows)[1] == []


@pytest.mark.parametrize(("ms", "reached"), [(1.29, "yes"), (1.31, "**no**")])
def test_a_norm_that_stores_codes(ms, reached):
    """The faster backend counts, of the device and commit that the plain norm was timed on."""
    plain = layer(f"norm-{activation_tables.NORM}", BF16, "device_ms", 1.0)
    case = f"fp8-norm/{activation_tables.NORM}"
    kernels = [made("kernels", case, impl, "device_ms", value)
               for impl, value in (("pallas", ms), ("triton", 2.0))]  # fmt: skip
    (row,) = activation_tables.targets([plain, *kernels])[1]
    assert (row[1], row[-1]) == ("≤ 1.30 x the plain norm", reached)
    elsewhere = [row | {"device": "another GPU"} for row in kernels]
    assert activation_tables.targets([plain, *elsewhere])[1] == []


@pytest.mark.parametrize(("ms", "verdict"), [(1.05, SAME), (1.1, BETTER), (0.99, NOT)])
def test_against_other_products(ms, verdict):
    case = "h64-s32-b2"
    rows = [layer(case, BF16, "device_ms", 2.0), layer(case, OURS, "device_ms", 1.0)]
    where = "Table 7, a layer against TransformerEngine"
    assert finding_of(where, rows).verdict == claims.NOT_MEASURED
    assert finding_of(where, [*rows, layer(case, paper.FLAX, "device_ms", ms)]).verdict == verdict
    where = "Appendix G.5"
    cached = layer(case, paper.CACHED, "device_ms", 1 / ms)
    assert finding_of(where, [*rows, cached]).verdict == (NOT if ms < 1 else SAME)


@pytest.mark.parametrize(("ratio", "verdict"), [(1.04, SAME), (1.06, NOT)])
def test_norms(ratio, verdict):
    rows = [layer("norm-8x8", BF16, "device_ms", 1.0), layer("norm-8x8", OURS, "device_ms", ratio)]
    assert finding_of("Appendix J", rows).verdict == verdict


def trained(steps=2000, seed=0, batch="", **over):
    flags = {"steps": steps, "parameters": 134_000_000, "preset": "llama-134m", "tokens": 16384}
    flags["seed"] = seed
    losses = {"standard": 3.0} | {name.replace("__", "-"): 3 * (1 + v) for name, v in over.items()}
    return [made("train", f"llama-134m/activations{batch}", name, "val_loss", value,
                 flags=flags, seed=seed)
            for name, value in losses.items()]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more", "reached"),
    [("fp8", 0.0029, "yes"), ("fp8", 0.0031, "**no**"), ("coat_adamw", 0.001, "yes"),
     ("fp8__coat_adamw", 0.0069, "yes"), ("fp8__coat_adamw", 0.0071, "**no**")],
)  # fmt: skip
def test_training(name, more, reached):
    """One seed reaches a target or not, and decides no claim."""
    rows = trained(**{name: more})
    found = finding_of_training(name, rows)
    assert (found.verdict, "one seed" in found.scale) == (claims.UNDECIDED, True)
    assert [row[-1] for row in activation_tables.targets(rows)[1]] == [reached]
    assert activation_tables.targets(trained(steps=500, **{name: more}))[1] == []  # too short


def finding_of_training(name, rows):
    where = f"Table 13, {activation_tables.SAYS[name.replace('__', '-')]}"
    (found,) = [c.finding(rows) for c in paper.CLAIMS if c.where == where]
    return found


@pytest.mark.parametrize(
    ("name", "mean", "apart", "verdict"),
    [("fp8", 0.0013, 0.0001, SAME), ("fp8", 0.003, 0.0001, NOT), ("fp8", -0.001, 0.0001, BETTER),
     ("fp8", 0.0013, 0.002, claims.UNDECIDED), ("coat_adamw", 0.0010, 0.0001, SAME),
     ("fp8__coat_adamw", 0.0043, 0.0001, SAME), ("fp8", math.nan, 0.0, NOT)],
)  # fmt: skip
def test_training_of_seeds(name, mean, apart, verdict):
    """An interval of three seeds, around the paper's own difference."""
    shares = (mean - apart, mean, mean + apart)
    rows = [r for i, more in enumerate(shares) for r in trained(seed=i, **{name: more})]
    found = finding_of_training(name, rows)
    assert (found.verdict, "3 seeds" in found.scale) == (verdict, True)


@pytest.mark.parametrize("reached", [True, False])
def test_paired_seeds(reached):
    """The mean difference decides, of runs that differ in the seed alone; another table's stay."""
    shares = (0.004, 0.001, 0.003 if reached else 0.005)
    rows = trained(fp8=0.0, coat_adamw=0.0)
    rows += [r for i, more in enumerate(shares) for r in trained(seed=i, batch="-b128", fp8=more)]
    rows = records.newest(rows)
    (mean, error), pairs = (f(activation_tables.paired(rows)) for f in
                            (activation_tables.differences, list))  # fmt: skip
    assert mean == pytest.approx(sum(shares) / 3) and len(pairs) == 3
    assert error == pytest.approx(np.std(shares, ddof=1) / 3**0.5)
    assert len(activation_tables.seeds(rows)[1]) == 4
    assert activation_tables.losses(rows).keys() == {"standard", "fp8", "coat_adamw"}
    says, asked, _, found = activation_tables.targets(rows)[1][-1]
    assert "3 seeds" in says and asked == "≤ 0.3%" and (found == "yes") == reached
    assert all("seeds" not in row[0] for row in activation_tables.targets(rows[:-1])[1])


def fitted(preset, plain, coat, planned=(2.0, 1.0)):
    case = f"llama-{preset}-s2048"
    rows = [made("fit", case, "all", "common_batch", min(plain, coat) or 1)]
    for name, most, size in (("optax.adamw", plain, planned[0]), (paper.fit_tables.COAT, coat,
                                                                  planned[1])):  # fmt: skip
        rows.append(made("fit", case, name, "max_batch", most))
        # at its largest batch, from which a line of this slope leads to the planned size of both
        rows.append(made("fit", case, name, "planned_bytes", size + most - min(plain, coat)))
        rows.append(made("fit", case, name, "sequence_bytes", 1.0))
        for batch in {most, min(plain, coat)} - {0}:
            at = f"{case}-b{batch}"
            rows.append(made("fit", at, name, "tokens_per_s", 100.0 + 10 * batch))
            rows.append(made("fit", at, name, "planned_bytes", size))
    return rows


def test_what_fits():
    where = "Table 8, Llama-2-7B on one GPU"
    assert finding_of(where, fitted("8b", 0, 2)).verdict == SAME
    assert finding_of(where, fitted("8b", 1, 2)).verdict == NOT
    assert finding_of(where, fitted("8b", 0, 0)).verdict == NOT


WHERES = (
    ("§6.2.2, micro-batch", fitted("3b", 2, 5), "x 2.50", "2 → 5: "),
    ("§6.2.2, peak memory at one batch", fitted("3b", 2, 8, planned=(1.56, 1.0)), "x 1.56", ""),
    ("§6.2.2, Table 11, speed at the largest batch", fitted("3b", 2, 8), f"x {180 / 120:.2f}",
     "120 → 180: "),
)  # fmt: skip


@pytest.mark.parametrize("what", paper.ALIKE)
@pytest.mark.parametrize(("where", "rows", "ratio", "values"), WHERES)
def test_unlike_weights_decide_nothing(where, rows, ratio, values, what):
    """Rows show what was measured; weights stored alike, by lean layers, decide; others no more."""
    where = f"{where}, FP8 states and activations, {what}"
    found = finding_of(where, rows)
    assert found.verdict == claims.NOT_MEASURED and found.rows
    says = f"with split weights against f32 ones, whose layers keep all, {ratio}"
    assert found.measured == says
    base, names = paper.ALIKE[what]
    renamed = {paper.fit_tables.BASE: base, paper.BOTH: names[paper.BOTH]}
    fair = [
        row | {"impl": renamed.get(row["impl"], row["impl"]),
               "case": row["case"].replace(paper.KEPT_ALL, paper.LEAN)}
        for row in rows
    ]  # fmt: skip
    found = finding_of(where, [*rows, *fair])
    assert found.verdict in (SAME, BETTER)
    assert found.measured == f"{values}{ratio}, against lean bf16 layers"


def test_fsdp_on_simulated_devices():
    """Bytes per device and losses are said; a speed is not decided; a GPU's rows are others."""
    run = {"run": {"steps": 60, "batch": 8, "sequence": 64}}
    common = {"model": "llama-tiny", "device": "cpu-2-cores"}
    rows = [
        made("mesh", f"llama-tiny fsdp={n}/adamw", "coat_adamw+fp8", metric, value, devices=n,
             **common, **more)
        for n, metric, value, more in (
            (1, "train_device_bytes", 800.0, {}), (8, "train_device_bytes", 110.0, {}),
            (8, "train_loss", 2.5, run), (8, "loss_difference", 0.004, {}),
        )
    ]  # fmt: skip
    found = finding_of("Table 8, Llama-2-7B, 13B", rows)
    assert (found.verdict, found.scale) == (
        claims.NOT_TRIED, "llama-tiny, 60 steps of 512 tokens, one seed"
    )  # fmt: skip
    assert "8 simulated devices" in found.measured and "x 7.3 less" in found.measured
    assert "within 0.4 % of one's" in found.measured
    assert finding_of("Table 8, Llama-2-7B, 13B", rows[1:]).verdict == claims.NOT_MEASURED


@pytest.mark.parametrize(
    ("times", "verdict"), [(1.2, NOT), (1.3, SAME), (1.6, SAME), (1.7, BETTER)]
)
def test_activations_alone(times, verdict):
    where = "Table 11, speed at the largest batch, FP8 activations alone, weights split in both"
    case, rows = "llama-3b-s2048", fitted("3b", 2, 8)
    assert finding_of(where, rows).verdict == claims.NOT_MEASURED
    rows += [made("fit", case, "coat_adamw", "max_batch", 4),
             made("fit", f"{case}-b4", "coat_adamw", "tokens_per_s", 180 / times)]  # fmt: skip
    assert finding_of(where, rows).verdict == verdict
