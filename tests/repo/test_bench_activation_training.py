"""The experiment on FP8 activations and states: what differs, and runs that take seconds."""

import json

import jax
import jax.numpy as jnp
import pytest

nnx = pytest.importorskip("flax.nnx")

from benchmarks import curves as stored_curves  # noqa: E402
from benchmarks import records  # noqa: E402
from benchmarks import training as shared  # noqa: E402
from benchmarks.suites.activations import tables as paper  # noqa: E402
from benchmarks.suites.activations import training  # noqa: E402
from optax_lowmem import layers  # noqa: E402
from tests.training_cases import as_users_do as as_users_do  # noqa: E402 (a fixture)
from tests.training_cases import text_for  # noqa: E402

SMOKE = training.PRESETS["smoke"]


def text():
    return text_for(SMOKE.context)


def test_the_run_is_what_is_asked_for():
    """Llama-134m, 2000 steps; all variants within minutes of an H100 at a third of its speed."""
    run = training.PRESETS["gpu"]
    experiment = training.Experiment(SMOKE, text(), seed=0)
    params = jax.eval_shape(
        lambda: training.Remedied(run.shape).weights(jax.random.key(0), lambda path: jnp.float32)
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert size >= paper.WEIGHTS and run.steps >= paper.STEPS
    matrices = size - run.shape.width * (run.shape.vocab + 2 * run.shape.layers + 1)
    attention = run.shape.layers * run.shape.width * run.context
    assert training.flops(run) == 6 * (matrices + attention) * run.tokens * run.steps
    assert len(training.VARIANTS) * training.flops(run) / 280e12 < 420
    for one in training.PRESETS.values():
        assert one.steps % one.every == 0
    assert set(paper.LOSSES) | {"standard", "standard-other-start"} == set(training.VARIANTS)
    assert {experiment.settings(name).seed for name in training.VARIANTS} == {0, 1000}


@pytest.mark.parametrize("name", training.VARIANTS)
def test_variants(name):
    """FP8 blocks where activations are in FP8; bf16 weights with 8-bit states, or f32 ones."""
    chosen, experiment = (
        training.VARIANTS[name],
        training.Experiment(SMOKE, text(), seed=0),
    )
    graph = experiment.model(name)._graphs[1]
    assert (graph.nodes[0].type is layers.Fp8LlamaBlock) == (chosen.activations == "fp8")
    program = experiment.lower(name)
    params, state = jax.eval_shape(program.start)
    kinds = {leaf.dtype for leaf in jax.tree.leaves(params) if leaf.ndim == 3}
    coat = chosen.optimizer == "coat_adamw"
    assert kinds == {jnp.dtype("bfloat16" if coat else "float32")}
    # unsigned codes of v, signed ones of m; no code where states are in f32
    codes = [x for x in jax.tree.leaves(state) if x.dtype.itemsize == 1 and x.ndim > 1]
    assert bool(codes) == coat


def test_trains_and_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shared, "load_text", lambda run, cache: text())
    curves, rows = tmp_path / "curves.npz", tmp_path / "rows.jsonl"
    names = "standard fp8-coat_adamw"
    flags = f"--preset smoke --variants {names} --curves {curves} --record {rows}"
    runs = training.main(flags.split())
    for of in runs.values():
        assert of["val_loss"][-1] < of["val_loss"][0] - 0.3
        assert of["step"].tolist() == [5, 10]
    assert abs(paper.over({k: {"value": v["val_loss"][-1]} for k, v in runs.items()},
                          "fp8-coat_adamw")) < 0.05  # fmt: skip
    stored = stored_curves.load(curves)
    assert stored.runs.keys() == {"run/standard", "run/fp8-coat_adamw"}
    found = records.newest([json.loads(line) for line in rows.read_text().splitlines()])
    assert {row["case"] for row in found} == {"smoke/activations"}
    losses = paper.losses(found, on_gpu=False)
    assert losses.keys() == set(runs)
    assert losses["standard"]["value"] == pytest.approx(float(runs["standard"]["val_loss"][-1]))
    assert paper.losses(found) == {} or not records.device().startswith("cpu")
    assert "fp8-coat_adamw" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="not a multiple"):
        training.main("--preset smoke --steps 7".split())
