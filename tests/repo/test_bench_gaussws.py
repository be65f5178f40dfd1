"""The experiment on GaussWS: what is trained, what is stored of bits and casts, the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax.nnx")

from benchmarks import curves as stored_curves  # noqa: E402
from benchmarks import training as shared  # noqa: E402
from benchmarks.suites.gaussws import analysis as gaussws_analysis  # noqa: E402
from benchmarks.suites.gaussws import bench as bench_gaussws  # noqa: E402
from benchmarks.suites.gaussws import casts as gaussws_casts  # noqa: E402
from benchmarks.suites.gaussws import training  # noqa: E402
from benchmarks.suites.gaussws.training import ALL, BASE, OD  # noqa: E402
from optax_lowmem import gaussws  # noqa: E402
from tests.training_cases import as_users_do as as_users_do  # noqa: E402 (a fixture)
from tests.training_cases import text_for  # noqa: E402

SMOKE = training.PRESETS["smoke"]["run"]


def text():
    return text_for(SMOKE.context)


def test_the_runs_are_what_is_asked_for():
    run = training.PRESETS["gpu"]["run"]
    assert run.steps >= 5000 and run.compute == "bfloat16"
    for parts in training.PRESETS.values():
        for one in parts.values():
            assert one.steps % one.every == 0 and one.shape.vocab == 256
    assert set(bench_gaussws.RATES) <= set(training.VARIANTS) and 1 in bench_gaussws.FACTORS


def test_decay_alone_takes_bits_where_it_is_said_to():
    steps = 500
    tx, b = training.bits_optimizer(steps), jnp.ones(())

    def step(carry, _):
        b, state = carry
        change, state = tx.update(jnp.zeros(()), state, b)
        return (b + change, state), None

    (b, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, None, steps))((b, tx.init(b)))
    assert float(b) == pytest.approx(np.exp(-training.DECAYED), rel=0.05)


def test_statistics_and_histograms():
    bits = np.stack([np.linspace(4, 6, 12).reshape(3, 4), np.full((3, 4), 1.5)])
    found = training.statistics(bits)
    row = dict(zip(training.STATISTICS, found[0], strict=True))
    assert (row["min"], row["max"], row["50 %"], row["mean"]) == pytest.approx((4, 6, 5, 5))
    assert found[1][-1] == 0
    counts = training.histograms(bits)
    assert counts.shape == (2, 60) and (counts.sum(1) == 12).all() and counts[1][0] == 12


def test_casts_of_parts(monkeypatch):
    monkeypatch.setattr(gaussws_casts, "FORMATS", ((2, 1), (3, 4)))
    rng = np.random.default_rng(0)
    weights = {name: {"kernel": jnp.asarray(rng.normal(size=(32, 32)), jnp.float32)}
               for name in ("down_proj", "up_proj")}  # fmt: skip
    seen = []
    bits = {"down_proj/kernel": jnp.full((1, 1), 4.2)}
    found = gaussws_casts.losses(weights, {"od": bits}, lambda w: seen.append(w) or len(seen))
    assert list(found) == ["clean", "od safe", "od e2m1", "od e3m4"]
    for tree in seen:
        np.testing.assert_array_equal(tree["up_proj"]["kernel"], weights["up_proj"]["kernel"])
    safe, wanted = seen[1], gaussws.safe_format(4.2)
    assert tuple(wanted)[::2] == (3, 3)
    own = weights["down_proj"]["kernel"]
    np.testing.assert_array_equal(safe["down_proj"]["kernel"], gaussws.fake_cast(own, wanted))


def test_section_3(monkeypatch):
    monkeypatch.setattr(gaussws_analysis, "SHAPE", (256, 256))
    shares = gaussws_analysis.shares(elements=2**16)
    assert shares[0] == pytest.approx(gaussws_analysis.P0, abs=0.01)
    assert sum(gaussws_analysis.NORMAL) == pytest.approx(1)
    assert gaussws_analysis.nullified(-8) == 0
    assert gaussws_analysis.nullified(-20) == pytest.approx(0.284, abs=0.01)
    assert gaussws_analysis.underflow(1.5, "bfloat16", 9) > 0.01
    assert gaussws_analysis.underflow(1.5, "bfloat16", 8) == 0


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shared, "load_text", lambda run, cache: text())
    monkeypatch.setattr(gaussws_casts, "FORMATS", ())
    monkeypatch.setattr(training, "OPTIMIZER", "optax.adamw")  # which compiles in less time
    compiled, compile_all = {}, shared.compile_all

    def once(experiment, names):  # the smoke rates' program is that of the run
        compiled.update(compile_all(experiment, [name for name in names if name not in compiled]))
        return {name: compiled[name] for name in names}

    monkeypatch.setattr(shared, "compile_all", once)
    curves, rows = tmp_path / "curves.npz", tmp_path / "rows.jsonl"
    where = ["--preset", "smoke", "--curves", str(curves), "--record", str(rows)]
    bench_gaussws.main(["--part", "run", "--variants", BASE, OD, *where])
    bench_gaussws.main(["--part", "rates", "--variants", BASE, "--factors", "1", "64", *where])
    found = stored_curves.load(curves)
    assert found.runs.keys() == {
        f"run/{BASE}",
        f"run/{OD}",
        f"rates/{BASE} x1",
        f"rates/{BASE} x64",
    }
    own = found.runs[f"run/{OD}"]
    assert own["val_loss"][-1] < own["val_loss"][0] and own["sampled_loss"][0] != own["val_loss"][0]
    assert {k for k in own if k.startswith("bits_")} == {"bits_o_proj", "bits_down_proj"}
    bits = own["bits_down_proj"]  # at first, in the middle, at the end
    assert bits.shape == (3, SMOKE.shape.layers, len(training.STATISTICS))
    assert (bits[0][:, :-1] == 6).all() and (bits[-1][:, -2] != 6).all()
    for name in (BASE, OD):  # the control too
        of = found.runs[f"run/{name}"]
        assert {k for k in of if k.startswith("cast_")} == {"cast_clean", "cast_od safe"}
    stored = [json.loads(line) for line in rows.read_text().splitlines()]
    value = {(r["bench"], r["case"], r["impl"], r["metric"]): r["value"] for r in stored}
    assert len(value) == len(stored)
    end = float(own["val_loss"][-1])
    assert value["train", "smoke/gaussws", OD, "val_loss"] == pytest.approx(end)
    assert value["train", "smoke/gaussws", OD, "bits_down_proj_mean"] == pytest.approx(
        float(bits[-1][:, -2].mean())
    )
    # the f32 weights rounded to bf16 are those that were evaluated without noise
    assert value["gaussws", "smoke/gaussws", OD, "cast clean"] == pytest.approx(end, rel=1e-4)
    assert value["train", "smoke-rates/gaussws", f"{BASE} x64", "done"] == 5
    assert "od safe" in capsys.readouterr().out
    losses = [float(found.runs[f"rates/{BASE} x{x}"]["val_loss"][-1]) for x in (1, 64)]
    assert losses[0] != losses[1]
    with pytest.raises(SystemExit, match="not a multiple"):
        bench_gaussws.main(["--preset", "smoke", "--steps", "7"])


def test_no_run_starts_too_late(monkeypatch, capsys):
    monkeypatch.setattr(shared, "load_text", lambda run, cache: text())
    monkeypatch.setattr(shared, "compile_all", lambda experiment, names: {
        name: (training.Program(None, None, None, 1), ()) for name in names
    })  # fmt: skip
    bench_gaussws.main(["--preset", "smoke", "--variants", BASE, ALL, "--limit", "0"])
    assert f"{ALL} is left out after" in capsys.readouterr().out
