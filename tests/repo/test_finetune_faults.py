"""Errors of the fine-tuning example: one line each, before or during training."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.repo.test_examples import ROOT
from tests.repo.tiny_model import flags, log_of, weights_of

pytestmark = pytest.mark.usefixtures("finetune")


# ---- before training -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--clip -1", "--clip: must be at least 0, got '-1'"),
        ("--clip nan", "--clip: must be at least 0, got 'nan'"),
        ("--temperature -1", "--temperature: must be at least 0, got '-1'"),
        ("--warmup 2", "--warmup: must be at least 0 and below 1, got '2'"),
        ("--sequence 0", "--sequence: must be at least 1, got '0'"),
        ("--held-out 1", "--held-out: must be at least 0 and below 1, got '1'"),
        ("--lr 0", "--lr: must be above 0, got '0'"),
        ("--epochs inf", "--epochs: must be above 0, got 'inf'"),
        ("--seed -1", "--seed: must be an integer from 0 to 2^32 - 1, got '-1'"),
        ("--budget 8", "--budget: '8' is neither a size"),
        ("--freeze (", "--freeze: no regular expression: missing ), "),
        ("--lora q_projj", "--lora: no matrix of the layers is named 'q_projj': write q_proj"),
        ("--lora q_proj,lm_head", "--lora: no matrix of the layers is named 'lm_head'"),
        (
            "--optimizer flash_adam --weight-decay 0.1",
            "--weight-decay does not go with --optimizer flash_adam",
        ),
        ("--batch 8 --micro-batch 3", "--batch 8 is no multiple of --micro-batch 3"),
        ("--release --micro-batch 1", "--release does not go with --micro-batch without --offload"),
        ("--release --skip-nonfinite", "--release does not go with --skip-nonfinite"),
        ("--lora q_proj --offload", "--lora does not go with --release, but for --offload weights"),
        ("--lora q_proj --freeze embed", "--lora does not go with --freeze"),
        ("--base nf4", "--base nf4 is for frozen weights: add --lora all-linear"),
    ],
)
def test_arguments_that_are_refused(finetune, folder, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as stopped:
        finetune.parse_arguments(flags(folder, tmp_path, more))
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last


def test_help_says_in_which_dtype_micro_batches_are_added(finetune, capsys):
    with pytest.raises(SystemExit):
        finetune.parse_arguments(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "in bf16 with stochastic rounding, with optax.adamw and split_adamw in f32" in text


def refused(finetune, arguments, message):
    with pytest.raises(SystemExit, match=message) as stopped:
        finetune.main(arguments)
    assert len(str(stopped.value).splitlines()) == 1


def test_freeze_must_match(finetune, folder, tmp_path):
    refused(finetune, flags(folder, tmp_path / "out", "--freeze up_projj"), "near it are: up_proj")
    refused(finetune, flags(folder, tmp_path / "out", "--freeze ."), "matches every parameter")
    assert not (tmp_path / "out").exists()


def test_model_is_a_folder(finetune, folder, tmp_path):
    more = "--model HuggingFaceTB/SmolLM2-135M-Instruct"
    refused(
        finetune,
        flags(folder, tmp_path / "out", more),
        "is no folder: download .*`hf download NAME",
    )


def test_out_is_of_a_run(finetune, folder, tmp_path):
    """Other files and finished runs are left alone."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    refused(finetune, flags(folder, out), r"has other files \(notes.txt\): choose another --out")
    refused(finetune, flags(folder, out / "notes.txt"), "is a file")
    refused(finetune, flags(folder, folder), "would replace the model")
    copied = out / "model"
    shutil.copytree(folder, copied)
    refused(finetune, flags(copied, out), "would replace the model .*: choose another --out")
    (out / "run.json").write_text("{}")
    refused(finetune, flags(folder, out), "model is the result of another run")
    assert (out / "notes.txt").read_text() == "mine"


# ---- stopped -------------------------------------------------------------------------------------


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="JAX 0.10 may crash if its import is interrupted"
)
def test_interrupted_in_the_first_second(folder, tmp_path):
    """While modules are imported, and later: no traceback."""
    command = [sys.executable, "examples/finetune.py", *flags(folder, tmp_path / "out")]
    where = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=where, stderr=subprocess.PIPE, text=True,
        # a test run in the background ignores it, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    maps, begin = Path(f"/proc/{process.pid}/maps"), time.monotonic()
    while "jaxlib" not in maps.read_text():
        assert process.poll() is None and time.monotonic() < begin + 60
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors


def test_interrupted_before_the_first_step(finetune, folder, tmp_path, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "fit", interrupt)
    with pytest.raises(SystemExit) as stopped:
        finetune.main(flags(folder, tmp_path / "out"))
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "stopped; nothing was saved\n"


def test_a_full_disk(folder, tmp_path):
    """A checkpoint that cannot be written is one line, though each of Orbax's threads fails."""
    program = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000));"
        "sys.argv[0] = 'examples/finetune.py'; sys.path.insert(0, 'examples');"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", program, *flags(folder, out, "--steps 1")], cwd=ROOT,
        env={k: v for k, v in os.environ.items() if "CACHE" not in k} | {"JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("the checkpoint of step 1 was not saved in ") == 1, done.stderr
    # before Python 3.12 asyncio may report, at any time, that the loop of a failed save is closed
    closed = sys.version_info < (3, 12) and "loop is closed" in done.stderr
    one_line = done.stderr.count("\n") == 1 and "too large" in done.stderr
    assert one_line or closed, done.stderr
    assert not (out / "model").exists()


# ---- numbers that are not finite -----------------------------------------------------------------


def test_stops_at_the_first_loss_that_is_not_finite(finetune, folder, tmp_path):
    refused(
        finetune,
        flags(folder, tmp_path, "--lr 1e30 --schedule constant --clip 0"),
        r"step [23]: the loss is nan, and .* The learning rate, 1e\+30 here, is likely too high.*"
        "No model was written",
    )
    rows = [row for row in log_of(tmp_path) if "loss" in row]
    assert rows[-1]["loss"] is None and len(rows) <= 3
    assert not (tmp_path / "model").exists() and not (tmp_path / "checkpoints").exists()


def test_names_a_weight_that_is_not_finite(finetune, folder, tmp_path):
    from safetensors.numpy import save_file

    broken, name = tmp_path / "broken", "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(folder, broken)
    arrays = weights_of(broken / "model.safetensors")
    arrays[name][0, 0] = np.nan
    save_file(arrays, broken / "model.safetensors")
    refused(finetune, flags(broken, tmp_path / "out"), f"No weight has changed yet; {name} of ")


def test_skips_steps_that_are_not_finite(finetune, folder, tmp_path, monkeypatch):
    """Such a step changes no bit; after too many in succession the run stops."""
    batch, bad = finetune.Run.batch, {2, 3}

    def some_bad(run):
        rows = batch(run)
        return rows._replace(weights=rows.weights * (jnp.nan if run.step in bad else 1.0))

    monkeypatch.setattr(finetune.Run, "batch", some_bad)
    run = finetune.main(flags(folder, tmp_path / "one", "--skip-nonfinite --steps 5"))
    rows = [row for row in log_of(tmp_path / "one") if "loss" in row]
    assert [row["step"] for row in rows if row.get("skipped")] == [3, 4]
    assert all(np.isfinite(leaf.astype(np.float32)).all() for leaf in jax.tree.leaves(run.trained))
    assert rows[2]["loss"] is None and rows[4]["loss"] < rows[0]["loss"]
    assert (tmp_path / "one/model/model.safetensors").exists()
    bad |= set(range(12))
    refused(finetune, flags(folder, tmp_path / "two", "--skip-nonfinite"), "^step 11: the loss is")


# ---- what is trained -----------------------------------------------------------------------------


def test_adapters_leave_the_base_as_it_is(finetune, folder, tmp_path):
    """A base in f32 or f16 is neither rounded to bf16 in training nor in the model written."""
    from safetensors.numpy import save_file

    for kind in (np.float32, np.float16):
        base = tmp_path / np.dtype(kind).name
        shutil.copytree(folder, base)
        rng = np.random.default_rng(0)
        arrays = {
            name: (a.astype(np.float32) * rng.uniform(0.997, 1.003, a.shape)).astype(kind)
            for name, a in weights_of(base / "model.safetensors").items()
        }
        save_file(arrays, base / "model.safetensors")
        out = base / "out"
        run = finetune.main(flags(base, out, "--steps 2 --lora all-linear --rank 2"))
        up = run.frozen["layers"]["mlp"]["up_proj"]["kernel"]
        name = "model.layers.1.mlp.up_proj.weight"
        np.testing.assert_array_equal(up[1].T, arrays[name])
        written = weights_of(out / "model/model.safetensors")
        assert {a.dtype for a in written.values()} == {np.dtype(kind)}
        same = {n for n, a in written.items() if np.array_equal(a, arrays[n])}
        assert same == {n for n in arrays if "norm" in n or "embed" in n or "lm_head" in n}
        config = json.loads((out / "adapter/adapter_config.json").read_text())
        assert len(config["target_modules"]) == 7
        a, b = (
            weights_of(out / "adapter/adapter_model.safetensors")[
                f"base_model.model.model.layers.1.mlp.up_proj.lora_{of}.weight"
            ]
            for of in "AB"
        )
        merged = arrays[name].astype(np.float32) + np.float32(2) * (b @ a)
        np.testing.assert_array_equal(written[name], merged.astype(kind))


def test_an_epoch_takes_each_row_once(finetune, folder, tmp_path):
    """The last of its steps has fewer rows."""
    args = flags(folder, tmp_path / "out", "--epochs 1")
    args = finetune.parse_arguments([arg for arg in args if arg not in ("--steps", "12")])
    run = finetune.prepare(args)
    assert len(run.rows) % 4 and run.steps == -(-len(run.rows) // 4)
    counted = []
    for step in range(run.steps):
        run.step = step
        batch = run.batch()
        counted += [row.tobytes() for row in np.asarray(batch.tokens)[batch.weights.any(1)]]
        assert float(batch.weights.sum()) == pytest.approx(run.micro_batches)
    assert sorted(counted) == sorted(row.tobytes() for row in run.rows.tokens)


@pytest.mark.parametrize("name", ["flash_adamw", "flash_muon", "optax.adamw"])
def test_biases_and_norms_are_not_decayed(example, name):
    config, optimizer = example("_llama.config"), example("_llama.optimizer")
    shape = config.Shape(2, 16, 32, 2, 1, 48, bias=True)
    settings = config.Settings(
        preset="", optimizer=name, shape=shape, sequence=8, batch=1, steps=10, learning_rate=1e-2,
        text="", remat="none", compute="float32", seed=0, clip=0.0,
    )  # fmt: skip
    weights = {
        "embed_tokens": {"embedding": jnp.ones((48, 16))},
        "layers": {
            "input_norm": {"scale": jnp.ones((2, 16))},
            "q_proj": {"kernel": jnp.ones((2, 16, 16)), "bias": jnp.ones((2, 16))},
        },
    }
    zeros = jax.tree.map(jnp.zeros_like, weights)

    def changed(decay_all):
        tx = optimizer.make_optimizer(settings, optax.constant_schedule(0.1), 0.5, decay_all)
        updates, _ = tx.update(zeros, tx.init(weights), weights)
        new = optax.apply_updates(weights, updates)
        return {
            jax.tree_util.keystr(keys, simple=True, separator="/")
            for keys, leaf in jax.tree_util.tree_leaves_with_path(new)
            if (leaf != 1).any()
        }

    matrices = {"layers/q_proj/kernel", "embed_tokens/embedding"}
    # Muon's decay is that of its matrices
    assert changed(False) == (matrices if name != "flash_muon" else {"layers/q_proj/kernel"})
    assert changed(True) == matrices | {"layers/q_proj/bias", "layers/input_norm/scale"}


def test_stacked_biases_are_no_matrices_of_muon(example):
    hidden = example("_gpt.config").hidden
    layer = {"q_proj": {"kernel": jnp.ones((2, 4, 4)), "bias": jnp.ones((2, 4))}}
    found = hidden({"layers": layer, "lm_head": {"kernel": jnp.ones((4, 4))}})
    assert found["layers"]["q_proj"]["bias"] is None and found["lm_head"]["kernel"] is None
    assert found["layers"]["q_proj"]["kernel"].reduction_axis == -2
