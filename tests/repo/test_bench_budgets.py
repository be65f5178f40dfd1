"""Losses against bytes per parameter: the table and the picture, with and without records."""

import math

import pytest

pytest.importorskip("flax.nnx")
pytest.importorskip("matplotlib", reason="the extra `examples` is not installed")

from benchmarks.claims import NOT, SAME, UNDECIDED  # noqa: E402
from benchmarks.suites.pairs import budgets, figures, sizes  # noqa: E402
from benchmarks.suites.pairs.presets import VARIANTS  # noqa: E402
from tests.training_cases import as_users_do as as_users_do  # noqa: E402 (a fixture)

BASE = {"adamw": (12.0, (3.0, 3.1, 3.2))}
KEPT = {
    "flash_adamw": (5.19, (3.001, 3.101, 3.201)),  # + 0.03 %
    "flash_adamw-four-bit": (4.06, (3.0, 3.13, 3.2)),  # + 0.32 %, of which one seed has all
    "flash_adamw-four-bit-sqrt": (4.07, (3.02, 3.12, 3.22)),  # + 0.65 %
}


def rows_of(found):
    """Records of variants: name -> bytes per parameter, losses of seeds 0, 1, ..., either None."""
    about = {"device": "a GPU", "jax": "1", "commit": "c", "case": budgets.CASE}
    rows = []
    for name, (size, losses) in found.items():
        own = about | {"impl": name}
        if size is not None:
            rows.append(own | {"bench": "memory", "metric": "total", "value": size, "says": name})
        for seed, loss in enumerate(losses):
            flags = {"parameters": 1, "steps": 1}
            more = {"metric": "val_loss", "value": loss, "seed": seed, "flags": flags}
            rows.append(own | {"bench": "pairs"} | more)
    return rows


def test_bytes_are_those_of_the_memory_report():
    """Codes, scales and corrections of 41,558,528 weights; 0.2 % of these are vectors in f32."""
    bytes_ = {
        "adamw": 4 + 4 + 4,
        "flash_adamw": 2 + 1 + (1 + 2 / 32) + (1 + 4 / 32),
        "coat_adamw": 2 + 1 + 2 * (1 + 4 / 128),
        "flash_adamw-four-bit": 2 + 1 + 2 * (0.5 + 2 / 64),
    }
    for name, expected in bytes_.items():
        found = sizes.report(budgets.PRESET, name)
        assert found.parameters == 41_558_528
        # a vector has 12 bytes, at most 9 more than its share here
        assert expected <= found.bytes_per_param < expected + 9 * 0.002


def test_every_variant_of_the_rule_is_measured():
    rows = sizes.measure("smoke-gpt", budgets.RULE)
    names = {name for name, one in VARIANTS.items() if one.rule == "adam" and "+fp8" not in name}
    assert {row["impl"] for row in rows} == names >= {budgets.BASE, *budgets.CHOICES}
    by = {(row["impl"], row["metric"]): row["value"] for row in rows}
    for name in names:
        parts = by[name, "weights"] + by[name, "state"]
        assert by[name, "total"] == pytest.approx(parts, rel=1e-12)


def test_table():
    """By bytes, each with its own margin; AdamW comes first."""
    text = budgets.TABLES["budget_losses"](rows_of(BASE | KEPT))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:6]]
    assert [line[:3] for line in lines] == [
        ["adamw", "12.00", ""],
        ["flash_adamw", "5.19", "3"],
        ["flash_adamw-four-bit-sqrt", "4.07", "3"],
        ["flash_adamw-four-bit", "4.06", "3"],
    ]
    assert lines[0][3] == "baseline"
    assert [line[4:] for line in lines[1:]] == [
        ["± 0.1 % of the loss", SAME],
        ["± 0.15 % of the loss", NOT],
        ["± 0.15 % of the loss", UNDECIDED],
    ]
    assert lines[1][3] == "+0.03 % (+0.03 to +0.03)"


def test_what_has_no_record_is_left_out():
    def names(found):
        return [one.name for one in budgets.choices(rows_of(found))]

    whole = BASE | KEPT
    assert names(whole) == ["flash_adamw", "flash_adamw-four-bit-sqrt", "flash_adamw-four-bit"]
    size, losses = KEPT["flash_adamw-four-bit"]
    assert names(whole | {"flash_adamw-four-bit": (size, ())}) == names(whole)[:2]
    assert names(whole | {"flash_adamw-four-bit": (None, losses)}) == names(whole)[:2]
    assert names(whole | {"flash_adamw-paper": (5.12, losses)}) == names(whole)
    assert names(KEPT) == []  # without AdamW's losses
    assert "pairs --preset gpt-42m --record" in budgets.TABLES["budget_losses"](rows_of(KEPT))


def drawn(monkeypatch, found):
    """The names in the picture, bars of intervals, and its message."""
    monkeypatch.setattr(figures, "all_records", lambda: rows_of(found))
    figure = figures.bytes_and_losses()
    (axes,) = figure.axes
    lines = [line.get_xydata() for line in axes.get_lines()]
    bars = [xy for xy in lines if len(xy) == 2 and xy[0][0] == xy[1][0]]
    figures.plt.close(figure)
    return {text.get_text().split(":")[0] for text in axes.texts}, bars, figure.get_suptitle()


def test_picture(monkeypatch):
    names, bars, message = drawn(monkeypatch, BASE | KEPT)
    assert names == {"adamw", *KEPT} and len(bars) == len(KEPT)
    assert "1 of 1 states of 8 bits and\nnone of 2 states of 4 bits" in message
    better = {"flash_adamw-four-bit": (4.06, (2.9, 3.0, 3.1))}
    assert "1 of 2 states of 4 bits" in drawn(monkeypatch, BASE | KEPT | better)[2].replace(
        "\n", " "
    )


def test_picture_of_what_is_there(monkeypatch):
    """One seed has no interval; what diverged has no place."""
    found = BASE | {name: KEPT[name] for name in ("flash_adamw",)}
    found |= {"flash_adamw-four-bit": (4.06, (3.0,))}
    names, bars, message = drawn(monkeypatch, found)
    assert names == {"adamw", "flash_adamw", "flash_adamw-four-bit"} and len(bars) == 1
    assert "none of 1 states of 4 bits" in message.replace("\n", " ")
    found |= {"flash_adamw-four-bit": (4.06, (3.0, math.nan))}
    names, bars, _ = drawn(monkeypatch, found)
    assert names == {"adamw", "flash_adamw"} and len(bars) == 1
