"""The experiment on Q-Adam-mini: its model, its variants, and a run that takes seconds."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from benchmarks import curves as stored_curves
from benchmarks import training as shared
from benchmarks.suites.adam_mini import bench as bench_adam_mini
from benchmarks.suites.adam_mini import rounding as bench_rounding
from benchmarks.suites.adam_mini import training as adam_mini_training
from optax_lowmem import codecs

pytest.importorskip("flax")

SMOKE = adam_mini_training.PRESETS["smoke"]
SMALLER = dataclasses.replace(SMOKE.shape, layers=1)
CURVES = {"step", "train_loss", "embedding_norm", "head_norm", "mlp_norm", "mu_norm", "nu_norm",
          "val_step", "val_loss", "tokens_per_s"}  # fmt: skip


@pytest.fixture(autouse=True)
def as_users_do():
    """Models broadcast; only the library is held to explicit ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


def text(vocab: int = 256) -> shared.Text:
    """Tokens of which each follows from the one before, so that a few steps learn something."""
    tokens = jnp.asarray(np.arange(5000) * 7 % vocab, jnp.uint16)
    windows = tokens[jnp.arange(16)[:, None] * 100 + jnp.arange(SMOKE.context + 1)]
    return shared.Text(tokens, windows.reshape(2, 8, -1).astype(int), vocab, 0.5, 1.0)


def experiment(steps: int = 10) -> adam_mini_training.Experiment:
    changed = dataclasses.replace(SMOKE, shape=SMALLER, steps=steps)
    return adam_mini_training.Experiment(changed, text(), 5, adam_mini_training.ADAM, seed=0)


def test_the_model_is_what_the_paper_is_compared_with():
    settings = adam_mini_training.PRESETS["gpt-45m"]
    shape = settings.shape
    layers = 12 * shape.layers * shape.width**2
    assert 2 * settings.vocab * shape.width + layers > 45e6
    assert not shape.tied and not shape.fused
    assert (settings.vocab, settings.steps, settings.text) == (32_000, 10_000, "installed")
    assert settings.batch * settings.context < settings.vocab / 10  # most rows sleep


def test_blocks_are_adam_minis():
    found = {row.path: row for row in experiment().blocks().rows}
    width, vocab = SMOKE.shape.width, 256
    for path in ("embed", "lm_head"):
        assert found[path].block.mean_shape(found[path].shape) == (vocab, 1), path
    attention = "blocks/0/attention"
    assert found[f"{attention}/query/kernel"].values == SMOKE.shape.heads
    assert found[f"{attention}/key/kernel"].values == SMOKE.shape.heads
    assert found[f"{attention}/value/kernel"].values == width
    assert not experiment().blocks().unknown
    assert set(adam_mini_training.watched(SMALLER).values()) <= found.keys()


@pytest.mark.parametrize("name", adam_mini_training.VARIANTS)
def test_what_each_variant_stores(name):
    tx = adam_mini_training.build(
        name, optax.constant_schedule(1e-3), lowmem.blocks.Structure(), adam_mini_training.ADAM
    )
    params = {"embed": {"embedding": jnp.zeros((64, 256))}, "up": {"kernel": jnp.zeros((64, 256))}}
    state = tx.init(params)
    mu, nu = (optax.tree_utils.tree_get(state, slot) for slot in ("mu", "nu"))
    assert (mu["up"]["kernel"].dtype == jnp.int8) == name.startswith("q_")
    assert (nu["embed"]["embedding"].dtype == jnp.uint8) == ("case1" in name)
    rows = (64, 256) if name == "adamw" else (64, 1)
    assert nu["embed"]["embedding"].shape == rows
    if name.startswith("q_"):
        found = {d.path: d for d in lowmem.explain(tx, params).decisions if d.slot == "mu"}
        noisy = [path for path, how in found.items() if "stochastic" in how.reason]
        assert noisy == {
            "q_adam_mini": ["embed/embedding", "up/kernel"],
            "q_adam_mini-embeddings": ["embed/embedding"],
            "q_adam_mini-case1-guarded": ["embed/embedding"],
        }.get(name, [])
        assert ("paper" in found["up/kernel"].form) == name.endswith("-reference")


@pytest.mark.parametrize(("guarded", "kept"), [("", 1), ("-guarded", 256)])
def test_case_1_loses_small_second_moments(guarded, kept):
    """Rows that share a group with one of 900 times their v get 0, or our codec's least code."""
    name = f"q_adam_mini-case1{guarded}"
    blocks = lowmem.blocks.Structure()
    tx = adam_mini_training.VARIANTS[name].make(
        optax.constant_schedule(1e-3), blocks=blocks, **adam_mini_training.ADAM
    )
    params = {"embed": jnp.zeros((256, 64))}
    scale = jnp.where(jnp.arange(256) == 3, 30.0, 1.0)[:, None]
    _, state = tx.update(jax.tree.map(lambda p: p + scale, params), tx.init(params), params)
    assert np.count_nonzero(state.nu["embed"]) == kept
    norm = float(adam_mini_training.moment_norm(state, "nu", "embed"))
    assert norm == pytest.approx(0.05 * 900, rel=1e-2)


def test_moment_norms_are_of_decoded_codes():
    params = {"embed": jnp.zeros((64, 128))}
    grads = {"embed": jax.random.normal(jax.random.key(0), (64, 128))}
    norms = []
    for tx in (lowmem.adam_mini(1e-3), lowmem.q_adam_mini(1e-3)):
        _, state = tx.update(grads, tx.init(params), params)
        norms.append(float(adam_mini_training.moment_norm(state, "mu", "embed")))
    assert norms[1] == pytest.approx(norms[0], rel=1e-3) and norms[1] != norms[0]


def test_trains_in_calls_of_many_steps():
    """The same as one step at a time, on the same batches."""
    run = experiment()
    program = run.lower("q_adam_mini")
    lines = []
    curves = run.train(program, program.compile(), lines.append)
    assert curves.keys() == CURVES
    assert curves["step"].tolist() == [5, 10] and curves["val_step"].tolist() == [0, 5, 10]
    assert curves["val_loss"][-1] < curves["val_loss"][0] - 0.5
    assert len(lines) == 2
    params, state = program.start()
    blocks = adam_mini_training.structure(SMALLER)
    tx = adam_mini_training.build("q_adam_mini", run.run.schedule(), blocks, run.arguments)

    @jax.jit
    def step(params, state, at):
        windows = run.text.tokens[at[:, None] + np.arange(SMOKE.context + 1)].astype(int)
        updates, state = tx.update(jax.grad(run.loss)(params, windows), state, params)
        return optax.apply_updates(params, updates), state

    for at in run.offsets.reshape(-1, SMOKE.batch):
        params, state = step(params, state, at)
    loss = float(program.compile()[1](params, run.text.held_out))
    assert loss == pytest.approx(float(curves["val_loss"][-1]), rel=1e-3)
    norm = float(jnp.linalg.norm(params["embed"]))
    assert norm == pytest.approx(float(curves["embedding_norm"][-1]), rel=1e-3)


def test_a_diverged_run_ends():
    run = experiment(steps=20)

    def diverges(params, state, tokens, starts):
        return None, None, {"train_loss": 0.0, "embedding_norm": jnp.nan}

    losses = iter([1.0, jnp.nan])
    program = shared.Program(lambda: (None, None), None, None, 0)
    curves = run.train(program, (diverges, lambda *_: next(losses)), lambda line: None)
    assert curves["step"].tolist() == [5]
    assert np.isfinite(curves["val_loss"][0]) and np.isnan(curves["val_loss"][-1])


def test_curves_are_kept_by_settings(tmp_path):
    file = tmp_path / "curves.npz"
    one = {"step": np.arange(3), "loss": np.array([1.5, 2.5, np.nan])}
    about = {"steps": 3, "betas": (0.9, 0.95)}  # a tuple is read back as a list
    stored_curves.Curves(about, {"a": one}).save(file)
    stored_curves.Curves(about, {"b": one}).save(file)
    found = stored_curves.load(file)
    assert found.about["steps"] == 3 and found.runs.keys() == {"a", "b"}
    np.testing.assert_array_equal(found.runs["a"]["loss"], one["loss"])
    assert found.runs["a"]["loss"].dtype == np.float32
    here = {"device": "this GPU", "commit": "abc"}
    for label in ("c seed 0", "c seed 1", "d seed 0"):
        stored_curves.Curves(about | here, {label: one}).save(file)
    found = stored_curves.load(file)
    assert found.runs.keys() == {"a", "b", "c seed 0", "c seed 1", "d seed 0"}
    assert found.about["merged"] == [here | {"variants": ["c", "d"]}]
    stored_curves.Curves(about, {"e": one}).save(file)
    assert stored_curves.load(file).about == found.about
    again = dict.fromkeys(stored_curves.load(file).runs, one)
    stored_curves.Curves(about | here, again).save(file)  # none of the earlier runs is left
    assert stored_curves.load(file).about == {"steps": 3, "betas": [0.9, 0.95]} | here
    stored_curves.Curves({"steps": 4}, {"b": one}).save(file)
    assert stored_curves.load(file).runs.keys() == {"b"}


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_adam_mini, "load_text", lambda settings, cache: text())
    curves, rows = tmp_path / "curves.npz", tmp_path / "rows.jsonl"
    flags = "--preset smoke --steps 10 --variants adam_mini q_adam_mini"
    bench_adam_mini.main(f"{flags} --curves {curves} --record {rows}".split())
    found = stored_curves.load(curves)
    assert found.runs.keys() == {"adam_mini", "q_adam_mini"}
    assert found.about["steps"] == 10 and found.about["b2"] == 0.95
    stored = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {(r["bench"], r["case"]) for r in stored} == {("train", "smoke/q_adam_mini")}
    value = {(r["impl"], r["metric"]): r["value"] for r in stored}
    assert value["q_adam_mini", "val_loss"] == pytest.approx(
        float(found.runs["q_adam_mini"]["val_loss"][-1])
    )
    assert value["adam_mini", "state_bytes_per_param"] == pytest.approx(4, abs=0.1)
    assert value["q_adam_mini", "state_bytes_per_param"] == pytest.approx(1.1, abs=0.1)
    assert "embed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="not a multiple"):
        bench_adam_mini.main("--preset smoke --steps 7".split())


def test_no_variant_starts_too_late(capsys):
    """The second is left out: as long again as the first is more than the limit."""
    run, args = experiment(), bench_adam_mini.parse_arguments("--preset smoke --limit 800".split())
    program = shared.Program(None, None, None, 1)
    run.train = lambda *_: {"val_loss": np.zeros(1)} | dict.fromkeys(CURVES, np.zeros(1))
    with pytest.MonkeyPatch.context() as patch:
        names = {"adamw": (program, ()), "adam_mini": (program, ())}
        patch.setattr(shared, "compile_all", lambda *_: names)
        ticks = itertools.count(0, 300)
        patch.setattr(shared.time, "perf_counter", lambda: next(ticks))
        part = shared.Part(args, lambda: run, names, None, began=1e-9)
        assert part.train_all().keys() == {"adamw"}
    assert "adam_mini is left out after 900 s" in capsys.readouterr().out


def test_rounding_is_timed():
    times = bench_rounding.measure(rows=16, trials=2)
    assert times.keys() == {"nearest", "stochastic", "convert"}
    assert all(len(found) == 2 and min(found) > 0 for found in times.values())
    rows = {row["impl"]: row for row in bench_rounding.as_records(16, times)}
    assert rows["nearest"]["ratio_to_nearest"] == 1
    assert rows["stochastic"]["case"] == "affine-int8/16x2048"


def test_rounding_is_what_the_library_does():
    x = jax.random.normal(jax.random.key(0), (16, 2048))
    plain, _ = bench_rounding.encoder("nearest")(x, jnp.uint32(0))
    noisy, scales = bench_rounding.encoder("stochastic")(x, jnp.uint32(0))
    other, _ = bench_rounding.encoder("stochastic")(x, jnp.uint32(1))
    assert 0.2 < float(jnp.mean(plain != noisy)) < 0.3  # E min(f, 1 - f), f uniform: 1/4
    assert bool(jnp.any(noisy != other))
    decoded = codecs.decode_array(codecs.affine(), noisy, scales, bench_rounding.GROUP)
    assert float(jnp.abs(decoded - x).max()) < 8 / 254
