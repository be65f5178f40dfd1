"""The examples as a user runs them, in a process of their own; and parts of them."""

import importlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import optax_lowmem as lowmem

ROOT = Path(__file__).parents[2]


def run_script(name: str, *flags: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"examples/{name}", *flags],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_example(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_script("train_gpt.py", "--out", str(out), *flags)


@pytest.fixture
def example(monkeypatch):
    """Imports a module of examples/."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


def check_curves(runs: dict) -> None:
    for run in runs.values():
        one = run["by_seed"][0]
        (first_step, first), *_, (last_step, last) = one["val_curve"]
        assert (first_step, last_step) == (0, 60)
        assert 4.5 < first < 8  # at random: log(256) = 5.5 and what the untrained logits add
        assert 1.5 < last < 3.0  # letter frequencies alone give about 3.3
        assert last == run["val_loss"]
        assert len(one["train_loss"]) == 60
        assert one["step_ms"] > 0


def check_agreement(runs: dict) -> None:
    plain, ours = (runs[impl]["by_seed"][0]["val_curve"] for impl in ("optax-f32", "lowmem"))
    assert plain != ours
    # The start differs by the rounding to bf16 alone.
    assert abs(plain[0][1] - ours[0][1]) < 0.02
    assert abs(plain[-1][1] - ours[-1][1]) < 0.03


def check_memory(runs: dict) -> None:
    plain, ours = (runs[impl]["bytes_per_param"] for impl in ("optax-f32", "lowmem"))
    assert plain["total"] == pytest.approx(16, abs=1e-3)
    # Weights 2, gradients 2, correction 1, mu 1 + 2/32, nu 1 + 4/32; the norms stay f32.
    assert ours["total"] == pytest.approx(7.1875, abs=0.03)
    for sizes in (plain, ours):
        assert sum(sizes.values()) == pytest.approx(2 * sizes["total"])


def check_picture(file: Path) -> None:
    content = file.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000
    assert height > 500


def check_records(file: Path, runs: dict) -> None:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    fields = {"bench", "case", "impl", "metric", "value", "unit", "device", "jax", "commit", "date"}
    assert all(fields <= record.keys() for record in records)
    assert {record["case"] for record in records} == {"smoke/adamw"}
    losses = {r["impl"]: r["value"] for r in records if r["metric"] == "val_loss"}
    assert losses == {impl: run["val_loss"] for impl, run in runs.items()}


def test_trains_both_and_reports(tmp_path):
    """One test for one run: a fixture would train again in every worker."""
    records = tmp_path / "records.jsonl"
    done = run_example(tmp_path, "--preset", "smoke", "--record", str(records))
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "train_gpt.json").read_text())["runs"]
    check_curves(runs)
    check_agreement(runs)
    check_memory(runs)
    check_picture(tmp_path / "train_gpt.png")
    check_records(records, runs)
    for row in ("validation loss", "step, ms", "correction", "nu_scale", "gradients", "total"):
        assert row in done.stdout


@pytest.mark.full
def test_any_optimizer_seeds_and_own_text(tmp_path):
    """A wrapped optax optimizer, two seeds, BPE, one run alone, on a folder of the user's."""
    text = tmp_path / "text"
    text.mkdir()
    for index in range(40):
        (text / f"{index}.txt").write_text(f"number {index} and a few words more\n" * 40)
    (text / "picture.bin").write_bytes(bytes(range(256)) * 20)
    flags = "--preset smoke --optimizer adan --only lowmem --seeds 2 --steps 12 --tokenizer bpe"
    done = run_example(tmp_path, *flags.split(), "--vocab", "300", "--data", str(text))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "train_gpt.json").read_text())
    assert result["data"]["files"] == 40
    assert result["data"]["vocab"] == 320
    assert list(result["runs"]) == ["lowmem"]
    first, second = result["runs"]["lowmem"]["by_seed"]
    assert first["val_loss"] != second["val_loss"]
    assert first["val_loss"] < first["val_curve"][0][1] - 1


def test_every_optimizer_of_the_table_is_a_choice(example):
    """Both sides of a pair take its arguments; those of recorded runs are as they were."""
    config = example("_gpt.config")
    assert {r.short_name for r in lowmem.OPTIMIZERS.values()} < config.OPTIMIZERS.keys()
    params = {"w": jax.ShapeDtypeStruct((64, 128), jnp.float32)}
    for pair in config.OPTIMIZERS.values():
        for make in (pair.plain, pair.lowmem):
            assert jax.tree.leaves(jax.eval_shape(make(1e-3, **pair.arguments).init, params))
    adam = {"b1": 0.9, "b2": 0.99}
    decayed = {"weight_decay": 0.1, "mask": config.matrices}
    recorded = {
        "adamw": (1.0, adam | decayed),
        "coat_adamw": (1.0, adam | decayed),
        "adam": (1.0, adam),
        "lion": (0.3, adam | decayed | {"weight_decay": 0.5}),
        "sgd": (50.0, {"nesterov": True}),
    }
    found = {name: config.OPTIMIZERS[name] for name in recorded}
    assert recorded == {n: (pair.rate_factor, pair.arguments) for n, pair in found.items()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", "no/such/text"), "no such file or folder"),
        (("--data", "examples/_gpt/__init__.py"), "too little text"),
        (("--steps", "0"), "must be at least 1"),
        (("--implementation", "abacus"), "--implementation abacus: "),
    ],
)
def test_says_what_is_wrong(tmp_path, flags, message):
    done = run_example(tmp_path, "--preset", "smoke", *flags)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "case", "ours"),
    [
        ("--preset demo", "demo/adamw", "lowmem"),
        ("--preset demo --steps 1000", "demo steps=1000/adamw", "lowmem"),
        ("--preset demo --implementation xla", "demo/adamw", "lowmem-xla"),
        ("--preset gpt-42m --optimizer lion", "gpt-42m/lion", "lowmem"),
        ("--preset gpt-42m --vocab 9", "gpt-42m vocab=9/adamw", "lowmem"),
        ("--preset smoke --lr 1", "smoke learning_rate=1.0/adamw", "lowmem"),
    ],
)
def test_records_say_what_was_changed(example, flags, case, ours):
    script, records = example("train_gpt"), example("_gpt.records")
    settings = script.make_settings(script.parse_arguments(flags.split()))
    numbers = {"val_loss": 1.0, "tokens_per_s": 1.0, "parameters": 2, "peak_bytes": 3}
    numbers["bytes_by_slot"] = {"total": 14}
    runs = {"optax-f32": numbers, "lowmem": numbers}
    found = records.records(settings, {"source": "a text", "train_tokens": 5}, 7, runs)
    assert {(r["case"], r["impl"], r["seed"]) for r in found} == {
        (case, "optax-f32", 7),
        (case, ours, 7),
    }
    assert {r["metric"]: r["value"] for r in found}["bytes_per_param"] == 7
    assert found[0]["flags"]["text"] == "a text"
    assert found[0]["flags"]["parameters"] == 2


def test_the_large_preset_is_what_the_paper_is_compared_with(example):
    config = example("_gpt.config")
    preset = config.PRESETS["gpt-42m"]
    shape = preset.shape
    assert preset.vocab * shape.width + 12 * shape.layers * shape.width**2 > 41e6
    assert (preset.vocab, preset.steps, preset.text) == (32_000, 3_000, "installed")
    assert preset.held_out_batches * preset.batch * preset.context > 800_000


def packages(tmp_path, monkeypatch, count: int) -> list[str]:
    """A standard library and packages of `count` files each, of 100 bytes; their names."""
    folders = {name: tmp_path / name for name in ("stdlib", "purelib")}
    for folder in folders.values():
        (folder / "tests").mkdir(parents=True)
        (folder / "tests" / "skipped.py").write_text("x = 1")
        (folder / "not_python.txt").write_text("x = 1")
        for index in range(count):
            (folder / f"{folder.name}_{index}.py").write_text(f"{index:<100}")
    found = {name: str(path) for name, path in folders.items()}
    monkeypatch.setattr("sysconfig.get_paths", lambda: found | {"platlib": found["purelib"]})
    return sorted(f"{name}_{index}.py" for name in folders for index in range(count))


def test_installed_sources(example, tmp_path, monkeypatch):
    data = example("_gpt.data")
    names = packages(tmp_path, monkeypatch, 300)
    assert [name for name, _ in data.installed_sources()] == names
    monkeypatch.setattr(data, "_LARGEST_CORPUS", 30_050)
    chosen = [name for name, _ in data.installed_sources()]
    assert len(chosen) == 300
    assert chosen == sorted(chosen)
    assert {name.partition("_")[0] for name in chosen} == {"stdlib", "purelib"}
    held_out = sum(data._is_held_out(name) for name in chosen)
    assert 5 < held_out < 30  # 5 % of 300, whichever files are chosen
    corpus = data.load_corpus(text="installed")
    assert (corpus.source, corpus.files) == ("installed Python sources", 300)


def test_encoding_in_parts(example, tmp_path, monkeypatch):
    data = example("_gpt.data")
    text = "".join(f"a line {index % 97} of text\n" for index in range(3000))
    corpus = data.Corpus(text.encode(), text[:5000].encode(), "text", 1)
    whole = data.bpe_tokens(corpus, 300, tmp_path / "whole")
    monkeypatch.setattr(data, "_ENCODED_AT_ONCE", 2)
    parts = data.bpe_tokens(corpus, 300, tmp_path / "parts")
    assert len(whole.train) > 3000
    assert (parts.train == whole.train).all()


def test_trains_digits(tmp_path):
    """With XLA's implementation by name, which the records tell."""
    file = tmp_path / "records.jsonl"
    flags = f"--steps 60 --seeds 2 --implementation xla --record {file}"
    done = run_script("train_digits.py", *flags.split())
    assert done.returncode == 0, done.stderr
    assert "val_accuracy" in done.stdout
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert {r["case"] for r in records} == {"digits-convnet steps=60/sgd"}
    value = {(r["impl"], r["metric"], r["seed"]): r["value"] for r in records}
    assert len(value) == len(records) == 2 * 3 * 2
    for seed in (0, 1):
        assert value["optax-f32", "bytes_per_param", seed] == pytest.approx(12, abs=1e-3)
        # Weights 2, gradients 2, correction 1, mu 1 + 2/32; biases and two small layers stay f32.
        assert value["lowmem-xla", "bytes_per_param", seed] == pytest.approx(6.0625, abs=0.15)
        plain, ours = (value[i, "val_loss", seed] for i in ("optax-f32", "lowmem-xla"))
        assert plain != ours
        assert abs(plain - ours) < 0.1
        assert value["lowmem-xla", "val_accuracy", seed] > 40  # a tenth by chance
    assert value["lowmem-xla", "val_loss", 0] != value["lowmem-xla", "val_loss", 1]


def test_digits_without_scikit_learn(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError")
    done = run_script("train_digits.py", path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode != 0
    assert "needs scikit-learn" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["train_gpt", "train_llama"])
def test_help_has_the_numbers_of_the_presets(example, script, capsys):
    with pytest.raises(SystemExit):
        example(script).parse_arguments(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    presets = example("_gpt.config" if script == "train_gpt" else "_llama.config").PRESETS
    assert "the preset's" not in said
    for name in ("steps", "batch", "learning_rate"):
        for preset in presets.values():
            assert f"{getattr(preset, name):g} (" in said, name


def test_digits_show_progress(example, capsys):
    example("train_digits").main("--seeds 1 --steps 2".split())
    assert "2/2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("val_loss", "says"), [(1.705, "the same loss"), (1.80, "a loss +5.6 % from f32's")]
)
def test_the_picture_says_what_the_run_shows(val_loss, says):
    from _gpt import figure, train

    both = {train.F32: (16.0, 1.7047), train.LOWMEM: (7.2, val_loss)}
    runs = {impl: {"bytes_per_param": {"total": size}, "val_loss": loss, "parameters": 1.8e6}
            for impl, (size, loss) in both.items()}  # fmt: skip
    result = {"runs": runs, "settings": {"optimizer": "adamw"}}
    assert (
        figure._message(result) == f"45% of the memory, {says}: adamw on a GPT of 1.8M parameters"
    )
