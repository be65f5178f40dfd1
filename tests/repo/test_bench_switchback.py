"""The experiment on SwitchBack: its models and variants, appendix D, and runs that take seconds."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from benchmarks import curves as stored_curves  # noqa: E402
from benchmarks import training as shared  # noqa: E402
from benchmarks.suites.switchback import bench as bench_switchback  # noqa: E402
from benchmarks.suites.switchback import training  # noqa: E402
from benchmarks.suites.switchback import variance as switchback_variance  # noqa: E402
from tests.contract_cases import QUICK_COMPILE  # noqa: E402
from tests.training_cases import as_users_do as as_users_do  # noqa: E402 (a fixture)
from tests.training_cases import text_for  # noqa: E402

SMOKE = training.PRESETS["smoke"]["run"]
EIGHT_BITS = [name for name, one in training.VARIANTS.items() if one.dot_general is not None]


def text():
    return text_for(SMOKE.context)


def smallest(name: str) -> training.Remedied:
    return training.model(name, SMOKE.shape, "float32", "xla")


def f32(path: str):
    return jnp.float32


def test_the_runs_are_what_is_asked_for():
    run, large = (training.PRESETS["gpu"][part] for part in ("run", "large"))
    assert run.steps >= 2000 and large.tokens >= 65_536
    assert run.shape == large.shape and large.preset == f"{run.preset}-large"
    sizes = (run.shape.width, run.shape.hidden, run.tokens, large.tokens)
    assert not any(size % 128 for size in sizes)  # which kernels take
    for parts in training.PRESETS.values():
        for run in parts.values():
            assert run.steps % run.every == 0 and run.shape.vocab == 256


@pytest.mark.parametrize("name", training.VARIANTS)
def test_what_each_variant_multiplies(name):
    """Every matrix of the layers in its dot_general, and none of the ends."""
    model, chosen = smallest(name), training.VARIANTS[name]
    params = jax.eval_shape(lambda: model.weights(jax.random.key(0), f32))
    own = {key: tree for key, tree in params.items() if key != "layers"}
    ends, block = (
        [
            layer.dot_general
            for _, layer in nnx.iter_modules(nnx.merge(graph, tree))
            if isinstance(layer, nnx.Linear)
        ]
        for graph, tree in zip(model._graphs, (own, params["layers"]), strict=True)
    )
    assert (len(ends), len(block)) == (1, 7) and chosen.dot_general not in ends
    if name in EIGHT_BITS:
        assert block == [chosen.dot_general] * 7
    else:
        assert set(block) == set(ends)
    plain = jax.eval_shape(lambda: smallest("standard").weights(jax.random.key(0), f32))
    more = len(jax.tree.leaves(params)) - len(jax.tree.leaves(plain))
    assert more == 2 * chosen.kq_norm + 2 * chosen.layer_scale


def test_layer_scale_is_the_identity_at_first():
    """Features are those of the embedding throughout, and blocks learn nothing but their scales."""
    tokens = text().held_out[0]
    model = smallest("standard-layer-scale")
    params = model.weights(jax.random.key(0), f32)
    _, sizes = jax.jit(model.measured, compiler_options=QUICK_COMPILE)(params, tokens)
    np.testing.assert_allclose(sizes, jnp.full_like(sizes, sizes[0]), rtol=1e-6)
    grads = jax.jit(jax.grad(model), compiler_options=QUICK_COMPILE)(params, tokens)["layers"]
    assert float(jnp.abs(grads["mlp"]["layers"][1]["scale"]).max()) > 0
    assert not any(jnp.any(g) for g in jax.tree.leaves(grads["mlp"]["layers"][0]))
    model = smallest("standard")
    params = model.weights(jax.random.key(0), f32)
    _, sizes = jax.jit(model.measured, compiler_options=QUICK_COMPILE)(params, tokens)
    assert float(sizes[-1]) > 2 * float(sizes[0])


def test_normed_queries_do_not_depend_on_their_size():
    tokens = text().held_out[0]
    for name, same in (("tensorwise-unit-kq-norm", True), ("tensorwise-unit", False)):
        model = smallest(name)
        params = model.weights(jax.random.key(0), f32)
        attention = params["layers"]["self_attn"]
        own = attention["q_proj"]
        own = own["layers"][0] if "layers" in own else own
        loss = jax.jit(model, compiler_options=QUICK_COMPILE)
        before = loss(params, tokens)
        own["kernel"] = own["kernel"] * 4  # a power of two: nothing rounds otherwise
        assert bool(jnp.abs(loss(params, tokens) - before) < 1e-4) == same


def test_measured_is_the_loss():
    model, tokens = smallest("llm_int8"), text().held_out[0]
    params = model.weights(jax.random.key(0), f32)
    both = jax.jit(lambda p: (model.measured(p, tokens)[0], model(p, tokens)))
    measured, loss = map(float, both(params))
    assert measured == pytest.approx(loss)


def test_trains_in_calls_of_many_steps():
    """The same as one step at a time, on the same batches."""
    run = training.Experiment(SMOKE, text(), seed=0)
    program, lines = run.lower("switchback-int8"), []
    curves = run.train(program, program.compile(), lines.append)
    assert curves["step"].tolist() == [5, 10] and curves["val_step"].tolist() == [0, 5, 10]
    assert curves["val_loss"][-1] < curves["val_loss"][0] - 0.5
    assert curves["features"].shape == (3, SMOKE.shape.layers + 1)
    assert curves["tokens_per_s"][0] > 0 and len(lines) == 2
    model, tx = smallest("switchback-int8"), run.optimizer("switchback-int8")
    params, state = program.start()

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def step(params, state, at):
        windows = text().tokens[at[:, None] + np.arange(SMOKE.context + 1)].astype(int)
        updates, state = tx.update(jax.grad(model)(params, windows), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for at in run.offsets.reshape(-1, SMOKE.batch):
        params, state = step(params, state, at)
    losses = [float(model(params, batch)) for batch in text().held_out]
    assert np.mean(losses) == pytest.approx(float(curves["val_loss"][-1]), rel=1e-3)


def test_a_diverged_run_ends():
    run = training.Experiment(SMOKE, text(), seed=0)
    sizes = jnp.ones(SMOKE.shape.layers + 1)
    program = training.Program(lambda: (None, None), None, None, 0)

    def diverges(params, state, tokens, starts):
        return params, state, {"train_loss": jnp.nan}

    curves = run.train(program, (diverges, lambda *_: (jnp.nan, sizes)), lambda line: None)
    assert curves["step"].tolist() == [5] and np.isnan(curves["val_loss"][-1])


def test_only_the_clipped_variant_clips():
    run = training.Experiment(SMOKE, text(), seed=0)
    params = {"w": jnp.ones((4, 4))}
    grads = {"w": jnp.full((4, 4), 1e3)}
    kept = {}
    for name in ("tensorwise-unit", "tensorwise-unit-clipped"):
        tx = run.optimizer(name)
        state = tx.update(grads, tx.init(params), params)[1]
        kept[name] = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(state))
    assert kept["tensorwise-unit"] > 1e3 * kept["tensorwise-unit-clipped"]


# ---- the command ---------------------------------------------------------------------------------


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shared, "load_text", lambda run, cache: text())
    monkeypatch.setattr(bench_switchback, "LARGE", ["standard"])
    curves, rows = tmp_path / "curves.npz", tmp_path / "rows.jsonl"
    names = "standard switchback-int8"
    where = f"--preset smoke --curves {curves} --record {rows}"
    bench_switchback.main(f"--part run --variants {names} {where}".split())
    bench_switchback.main(f"--part large {where}".split())
    found = stored_curves.load(curves)
    assert found.runs.keys() == {"run/standard", "run/switchback-int8", "large/standard"}
    assert found.about["run"]["tokens"] == 64 and found.about["large"]["tokens"] == 256
    stored = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {(r["bench"], r["case"]) for r in stored} == {
        ("train", "smoke/switchback"), ("train", "smoke-large/switchback")
    }  # fmt: skip
    value = {(r["case"], r["impl"], r["metric"]): r["value"] for r in stored}
    assert value["smoke/switchback", "switchback-int8", "val_loss"] == pytest.approx(
        float(found.runs["run/switchback-int8"]["val_loss"][-1])
    )
    assert value["smoke-large/switchback", "standard", "done"] == 4
    assert "switchback-int8" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="not a multiple"):
        bench_switchback.main("--preset smoke --steps 7".split())


def test_parts_are_stored_side_by_side(tmp_path):
    file, curves = tmp_path / "curves.npz", {"step": np.arange(3)}
    stored_curves.store(file, "run", {"steps": 3}, {"a": curves})
    stored_curves.store(file, "large", {"steps": 1}, {"a": curves})
    stored_curves.store(file, "run", {"steps": 3}, {"b": curves})
    assert stored_curves.load(file).runs.keys() == {"run/a", "run/b", "large/a"}
    stored_curves.store(file, "run", {"steps": 4}, {"b": curves})  # other settings
    found = stored_curves.load(file)
    assert found.runs.keys() == {"run/b", "large/a"}
    assert found.about == {"run": {"steps": 4}, "large": {"steps": 1}}


def test_no_variant_starts_too_late(monkeypatch, capsys):
    monkeypatch.setattr(shared, "load_text", lambda run, cache: text())
    flags = "--preset smoke --variants standard llm_int8 --limit 0".split()
    monkeypatch.setattr(shared, "compile_all", lambda *_: {
        name: (training.Program(None, None, None, 1), ()) for name in ("standard", "llm_int8")
    })  # fmt: skip
    bench_switchback.main(flags)
    assert "llm_int8 is left out after" in capsys.readouterr().out


def test_a_whole_models_runs(tmp_path, monkeypatch):
    """The example with each --linear, and the same file for all records; failures are said."""
    commands, record = [], tmp_path / "rows.jsonl"

    def run(command, **more):
        commands.append(command)
        return dataclasses.make_dataclass("Done", ["returncode"])(int("fp8" in command[-1]))

    monkeypatch.setattr(bench_switchback.subprocess, "run", run)
    flags = ["--part", "llama", "--llama", "--preset tiny", "--record", str(record)]
    with pytest.raises(SystemExit, match="failed: switchback-fp8-auto"):
        bench_switchback.main(flags)
    assert [command[-1] for command in commands] == bench_switchback.LINEARS
    for command in commands:
        assert command[1:] == ["examples/train_llama.py", "--preset", "tiny", "--record",
                               str(record), "--linear", command[-1]]  # fmt: skip


# ---- appendix D ----------------------------------------------------------------------------------


@pytest.mark.parametrize("product", switchback_variance.PRODUCTS)
def test_equation_12(product):
    """The variance of an error is what its quantizers' variances make of it, and grows."""
    short, long = (switchback_variance.spread("llm_int8", product, n) for n in (256, 2048))
    for found in (short, long):
        assert found.error == pytest.approx(found.predicted, rel=0.05)
    assert 8 < long.error / short.error < 16  # the length, and its maxima
    assert long.exact / short.exact == pytest.approx(8, rel=0.05)
    assert long.relative == pytest.approx(long.error / long.exact)


def test_which_products_switchback_quantizes():
    for product, none in (("forward", False), ("input gradient", False), ("weight gradient", True)):
        assert (switchback_variance.spread("switchback", product, 256).error == 0) == none


def test_heavy_tails_are_of_variance_1_and_worse():
    draw = switchback_variance.DRAWS["student-t(4)"]
    assert np.var(draw(np.random.default_rng(0), (1000, 1000))) == pytest.approx(1, rel=0.05)
    normal, heavy = (
        switchback_variance.spread("llm_int8", "weight gradient", 4096, name)
        for name in switchback_variance.DRAWS
    )
    assert heavy.relative > 2 * normal.relative


def test_variance_records(tmp_path):
    rows = tmp_path / "rows.jsonl"
    bench_switchback.main(f"--part variance --preset smoke --record {rows}".split())
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {r["length"] for r in found} == {256, 1280}
    wanted = {f"{name}_variance" for name in ("error", "predicted", "relative")}
    assert {r["metric"] for r in found} == wanted
    assert len({(r["case"], r["impl"], r["metric"]) for r in found}) == len(found) == 3 * 2 * 2 * 3
