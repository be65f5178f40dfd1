"""The examples as a user runs them, in a process of their own; and parts of them."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from benchmarks import records
from tests.compilation import QUICK_FLAGS
from tests.tolerances import SEEDS_TOGETHER

ROOT = Path(__file__).parents[2]


def run_script(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    where = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS}
    return subprocess.run(
        [sys.executable, f"examples/{name}", *flags],
        cwd=ROOT,
        env=os.environ | where | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_trains_a_gpt_both_ways(tmp_path):
    """The curves agree, the bytes are those of the formats, and a picture and records are there."""
    records = tmp_path / "records.jsonl"
    flags = f"--out {tmp_path} --preset smoke --record {records}"
    done = run_script("train_gpt.py", *flags.split())
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "train_gpt.json").read_text())["runs"]
    for run in runs.values():
        one = run["by_seed"][0]
        (first_step, first), *_, (last_step, last) = one["val_curve"]
        assert (first_step, last_step, len(one["train_loss"])) == (0, 60, 60)
        assert 4.5 < first < 8  # at random: log(256) = 5.5 and what the untrained logits add
        assert 1.5 < last < 3.0  # letter frequencies alone give about 3.3
    plain, ours = (runs[impl]["by_seed"][0]["val_curve"] for impl in ("optax-f32", "lowmem"))
    assert plain != ours
    assert abs(plain[0][1] - ours[0][1]) < 0.02  # the rounding to bf16 alone
    assert abs(plain[-1][1] - ours[-1][1]) < 0.03
    plain, ours = (runs[impl]["bytes_per_param"] for impl in ("optax-f32", "lowmem"))
    assert plain["total"] == pytest.approx(16, abs=1e-3)
    # Weights 2, gradients 2, correction 1, mu 1 + 2/32, nu 1 + 4/32; the norms stay f32.
    assert ours["total"] == pytest.approx(7.1875, abs=0.03)
    assert (tmp_path / "train_gpt.png").read_bytes()[:4] == b"\x89PNG"
    found = [json.loads(line) for line in records.read_text().splitlines()]
    assert {record["case"] for record in found} == {"smoke/adamw"}
    losses = {r["impl"]: r["value"] for r in found if r["metric"] == "val_loss"}
    assert losses == {impl: run["val_loss"] for impl, run in runs.items()}
    assert "nu_scale" in done.stdout


def test_every_optimizer_of_the_table_is_a_choice(example):
    config = example("_gpt.config")
    assert {r.short_name for r in lowmem.OPTIMIZERS.values()} < config.OPTIMIZERS.keys()
    params = {"w": jax.ShapeDtypeStruct((64, 128), jnp.float32)}
    for pair in config.OPTIMIZERS.values():
        for make in (pair.plain, pair.lowmem):
            assert jax.tree.leaves(jax.eval_shape(make(1e-3, **pair.arguments).init, params))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data no/such/text", "no such file or folder"),
        (f"--data {ROOT}/examples/_gpt/__init__.py", "too little text"),
        ("--steps 0", "must be at least 1"),
        ("--implementation abacus", "--implementation abacus: "),
    ],
)
def test_says_what_is_wrong(example, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        example("train_gpt").main(f"--preset smoke --out {tmp_path} {flags}".split())
    assert message in f"{stopped.value} {capsys.readouterr().err}"


WORDS = "--steps 3 --batch 8 --seeds 2 --compute float32".split()


def test_trains_digits(tmp_path):
    """Two seeds in one program end as each does alone."""
    together = tmp_path / "together.jsonl"
    digits = importlib.import_module("benchmarks.suites.digits")
    digits.main([*WORDS, "--record", str(together)])
    pair = digits.Together("digits-convnet steps=3/sgd").pair(records.load(together))
    assert all(0.01 < abs(a - b) for a, b in (pair.plain, pair.ours))  # seeds differ
    convnet = importlib.import_module("benchmarks.convnet")
    args = argparse.Namespace(steps=3, batch=8, compute="float32", implementation="xla")
    for found, impl in ((pair.plain, "optax-f32"), (pair.ours, "lowmem")):
        tx = convnet.optimizer(impl, args.steps)
        run = convnet.trainer(impl, tx, convnet.load(), args)
        for seed in (0, 1):
            key = jax.random.fold_in(jax.random.key(seed), 1)
            loss, _ = run(*convnet.start(impl, tx, seed), key)
            assert found[seed] == pytest.approx(float(loss), rel=SEEDS_TOGETHER)
    assert pair.plain != pair.ours
    assert np.abs(np.subtract(pair.plain, pair.ours)).max() < 0.1


@pytest.mark.parametrize(("impl", "expected"), [("optax-f32", 12.0), ("lowmem", 6.0625)])
def test_bytes_of_digits(example, impl, expected):
    """Weights 2, gradients 2, correction 1, mu 1 + 2/32; biases and two small layers stay f32."""
    convnet = importlib.import_module("benchmarks.convnet")
    tx = convnet.optimizer(impl, 10)
    params, _ = jax.eval_shape(lambda: convnet.start(impl, tx, 0))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    total = example("_gpt.train").bytes_by_slot(tx, params)["total"]
    assert total / count == pytest.approx(expected, abs=0.15)
