"""The fine-tuning example: as a user runs it, killed and resumed, with adapters; and its data."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

import optax_lowmem as lowmem
from benchmarks import records
from benchmarks.suites import finetune as suite
from tests.compilation import QUICK_FLAGS
from tests.contract_cases import assert_same
from tests.repo.test_examples import ROOT, example, run_script  # noqa: F401 (a fixture)
from tests.wrappers.test_eager_programs import programs

TINY = ROOT / "tests/golden/huggingface"
TEMPLATE = (
    "{% for m in messages %}{{ '^' + m['role'][0] + m['content'] + '$' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '^a' }}{% endif %}"
)
CHARACTERS = "_$^abcdefghijklmnopqrstuvwxyz .?0123456789"  # `$` ends a message
FACTS = [("what is the colour of the sky?", "blue."), ("how many legs has a cat?", "4."),
         ("and a bird?", "2."), ("what do cats drink?", "milk.")]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama as transformers writes it, with a tokenizer of characters, and a chat."""
    from tokenizers import Tokenizer, models

    out = tmp_path_factory.mktemp("tiny")
    shutil.copytree(TINY / "llama", out, dirs_exist_ok=True)
    vocab = {character: number for number, character in enumerate(CHARACTERS)}
    Tokenizer(models.BPE(vocab, [], unk_token="_")).save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(TEMPLATE)
    end = json.dumps({"eos_token_id": CHARACTERS.index("$")})
    (out / "generation_config.json").write_text(end)
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in FACTS * 12
    ]
    (out / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def flags(folder, out, more=""):
    chosen = f"--model {folder} --data {folder}/chat.jsonl --out {out} --sequence 95 --batch 4"
    return f"{chosen} --steps 12 --lr 0.02 --held-out 0.1 --evaluate-every 6 {more}".split()


@pytest.fixture(autouse=True)
def finetune(example):  # noqa: F811
    return example("finetune")


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(out, name="loss"):
    return [row[name] for row in log_of(out) if name in row]


def test_killed_and_resumed(folder, tmp_path):
    """As a user runs it: after SIGKILL the log and the model have the bits of a whole run."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    prompt = ["--prompt", "what do cats drink?", "--tokens", "6"]
    done = run_script("finetune.py", *flags(folder, whole), *prompt)
    assert done.returncode == 0, done.stderr
    assert "after 12 steps" in done.stdout and "0.0M trained parameters" in done.stdout
    answers = [row["answer"] for row in log_of(whole) if "answer" in row]
    assert len(answers) == 2 and answers[0] != answers[1]
    assert (whole / "loss.png").read_bytes()[:4] == b"\x89PNG"
    resumed = [*flags(folder, killed, "--save-every 2 --resume"), *prompt]
    command = [sys.executable, "examples/finetune.py", *resumed]
    where = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS}
    process = subprocess.Popen(command, cwd=ROOT, env=where, stderr=subprocess.PIPE)
    log = killed / "log.jsonl"
    while not log.exists() or log.read_text().count("\n") < 7:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert 2 <= lowmem.checkpoint.latest_step(killed / "checkpoints") < 12
    assert run_script("finetune.py", *resumed).returncode == 0
    for one, other in zip(log_of(whole), log_of(killed), strict=True):
        for row in (one, other):
            row.pop("seconds", None), row.pop("tokens_per_s", None)
        assert one == other
    weights = "model/model.safetensors"
    assert (whole / weights).read_bytes() == (killed / weights).read_bytes()


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Runs the example with more flags, each run once: their folder, and the run."""
    runs = {}

    def run(more=""):
        if more not in runs:
            out = tmp_path_factory.mktemp("run")
            runs[more] = out, importlib.import_module("finetune").main(flags(folder, out, more))
        return runs[more]

    return run


def weights_of(file):
    from safetensors.numpy import load_file

    return load_file(file)


def test_signals(finetune, folder, trained, tmp_path, monkeypatch):
    """SIGUSR1 saves and SIGTERM saves and stops, at any step; the bits are those of a whole run."""
    advance = finetune.Run.advance

    def signalled(run):
        sent = {2: signal.SIGUSR1, 5: signal.SIGTERM}.get(run.step)
        if sent:
            signal.raise_signal(sent)
        return advance(run)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as stopped:
        patched.setattr(finetune.Run, "advance", signalled)
        finetune.main(flags(folder, tmp_path))
    assert stopped.value.code == finetune.INTERRUPTED
    assert sorted(
        int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()
    ) == [3, 6]
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(SystemExit, match="has a run at step 6: add --resume"):
        finetune.main(flags(folder, tmp_path))
    with pytest.raises(SystemExit, match="a run with seed 0, not 1"):
        finetune.main(flags(folder, tmp_path, "--resume --seed 1"))
    rest = finetune.main(flags(folder, tmp_path, "--resume"))
    out, whole = trained()
    assert_same((rest.trained, rest.state), (whole.trained, whole.state))
    assert losses(tmp_path) == losses(out)


def test_learns_the_answers(trained):
    out, run = trained()
    assert losses(out)[-1] < 0.5 * losses(out)[0]
    first, *_, last = losses(out, "validation_loss")
    assert last < 0.5 * first and len(losses(out, "validation_loss")) == 3
    row = log_of(out)[1]
    assert row["gradient_norm"] > 0 and row["tokens_per_s"] > 0
    assert row["learning_rate"] == pytest.approx(0.02)
    saved = weights_of(out / "model/model.safetensors")
    up = run.trained["layers"]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_array_equal(saved["model.layers.1.mlp.up_proj.weight"], up[1].T)


def test_accumulation_has_the_losses_of_the_ordinary_run(trained):
    accumulated, ordinary = losses(trained("--micro-batch 2")[0]), losses(trained()[0])
    assert accumulated != ordinary  # gradients are rounded to bf16
    assert accumulated == pytest.approx(ordinary, rel=0.02)


@pytest.mark.full
def test_adamw_in_f32_has_the_losses_of_the_ordinary_run(trained):
    """The first is equal; at this rate single losses of a few rows differ more than their mean."""
    plain, ordinary = losses(trained("--optimizer optax.adamw")[0]), losses(trained()[0])
    assert plain[0] == pytest.approx(ordinary[0], rel=1e-3) and plain != ordinary
    assert np.mean(plain) == pytest.approx(np.mean(ordinary), rel=0.02)


def test_gradient_release(trained):
    modes = ("--clip 0", "--release", "--offload")
    ordinary, *released = (losses(trained(mode)[0]) for mode in modes)
    for found in released:  # with the state on the host, one row at a time
        assert found == pytest.approx(ordinary, rel=0.02)


def test_offloaded_steps_are_compiled_before_weights_are_loaded(finetune, folder, tmp_path):
    args = finetune.parse_arguments(flags(folder, tmp_path / "out", "--offload"))
    run = finetune.prepare(args, finetune.Texts(args.model))
    some = run.rows[np.arange(args.batch)]
    arrays = run.trained, run.frozen
    assert programs(lambda: run.program.held_out_loss(*arrays, run.held_out, 1))[1] == 0
    assert programs(lambda: run.program.step(*arrays, run.state, run.program.batch(some)))[1] == 0


def test_adapters(folder, trained):
    """They alone are trained; merged, they change the matrices that they adapt."""
    out, run = trained("--lora q_proj,up_proj --rank 2")
    assert losses(out)[-1] < 0.9 * losses(out)[0]
    assert sum(p.size for p in jax.tree.leaves(run.trained)) == 2 * 2 * (16 + 32 + 16 + 24)
    before, after = (weights_of(f / "model.safetensors") for f in (folder, out / "model"))
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {n for n in before if "q_proj" in n or "up_proj" in n}
    a, b = (
        weights_of(out / "adapter/adapter_model.safetensors")[
            f"base_model.model.model.layers.0.mlp.up_proj.lora_{name}.weight"
        ]
        for name in "AB"
    )
    name = "model.layers.0.mlp.up_proj.weight"
    merged = before[name].astype(np.float32) + 2 * b @ a
    np.testing.assert_allclose(after[name].astype(np.float32), merged, rtol=2**-8)


def test_frozen_weights(folder, trained):
    out, _ = trained("--freeze embed_tokens|layers/0/")
    before, after = (weights_of(f / "model.safetensors") for f in (folder, out / "model"))
    same = {name for name in before if (before[name] == after[name]).all()}
    assert same == {n for n in before if "embed" in n or "layers.0." in n}


def test_what_fits_a_budget(finetune, folder, tmp_path):
    """The micro-batch of a budget, and what is said where none fits."""

    def parsed(more=""):
        return finetune.parse_arguments(flags(folder, tmp_path, more))

    def chosen(size, more=""):
        """The micro-batch where the planner may use `size` bytes."""
        megabytes = (size + 1) / finetune.plan.USABLE / 1e6
        return finetune.micro_batch(parsed(f"--budget {megabytes:.6f}MB {more}"))

    assert finetune.micro_batch(parsed()) == 4
    resident = finetune.planned(parsed(), 0).modes[0]
    assert chosen(resident.total_bytes(4)) == 4
    resident = finetune.planned(parsed(), 0, accumulate=True).modes[0]
    assert [chosen(resident.total_bytes(rows)) for rows in (1, 2, 3)] == [1, 2, 2]
    with pytest.raises(SystemExit, match="--batch 4 does not fit") as stopped:
        chosen(resident.total_bytes(2), "--release")
    assert re.search("This fits: --batch [12]", str(stopped.value))
    with pytest.raises(SystemExit, match="Nothing fits"):
        chosen(resident.weights)


def test_commands_that_the_planner_prints(finetune, folder, capsys):
    """They have flags of this program alone, and choose the mode that they are printed for."""
    sizes = finetune.plan.decoder(json.loads((folder / "config.json").read_text()))
    adapters = ("q_proj", "v_proj"), 16
    for mode in finetune.plan.plan_decoder(sizes, "flash_adamw", 0, 2048, adapters).modes:
        megabytes = (mode.total_bytes(1) + 1) / finetune.plan.USABLE / 1e6
        finetune.plan.main(["--params", str(folder), "--gpu", f"{megabytes:.6f}MB"])
        printed = capsys.readouterr().out
        command, name = printed.splitlines()[-1].split(), re.search(r"Recommended: (\w+)", printed)
        args = finetune.parse_arguments(command[2:])
        found = "offload" if args.offload else "release" if args.release else "resident"
        assert args.batch >= 1 and name and name[1] == ("lora" if args.lora else found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 1', "line 2: JSONDecodeError"),
        ('{"prompt": "a"}', "line 2: KeyError: 'text'"),
        ('{"messages": [{"content": "a"}]}', "line 2: UndefinedError"),
    ],
)
def test_wrong_lines(finetune, folder, tmp_path, line, message):
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "abc"}\n' + line + "\n")
    given = f"--model {folder} --data {data} --out {tmp_path / 'out'}"
    with pytest.raises(SystemExit, match=message):
        finetune.main(given.split())


def test_packed_rows(example, folder):  # noqa: F811
    """Answers count, questions do not; rows are full, and every token is in one of them."""
    texts = example("_llama.texts")
    of_folder = texts.Texts(folder)
    ids, answers = of_folder.of_chat(
        [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "cd"},
            {"role": "user", "content": "e"},
            {"role": "assistant", "content": "f"},
        ]
    )
    text = "".join(CHARACTERS[i] for i in ids)
    assert text == "^uab$^acd$^ue$^af$"
    shown = [c if counted else "-" for c, counted in zip(text, answers, strict=True)]
    assert "".join(shown) == "-------cd$------f$"
    assert of_folder.of_text("ab") == ([3, 4, 1], [True] * 3)
    some = [([n] * size, [True] * size) for n, size in enumerate((5, 3, 9, 2, 4), 1)]
    rows = texts.packed(some, 7)
    assert rows.tokens.shape == (3, 8)
    numbers, counts = np.unique(rows.tokens[rows.tokens > 0], return_counts=True)
    assert dict(zip(numbers.tolist(), counts.tolist(), strict=True)) == {
        1: 5,
        2: 3,
        3: 8,
        4: 2,
        5: 4,
    }
    for row, segments, weights in zip(rows.tokens, rows.segments, rows.weights, strict=True):
        texts_in = [row[segments == number] for number in range(1, segments.max() + 1)]
        assert all(len(set(one.tolist())) == 1 for one in texts_in)
        assert weights.sum() == sum(len(one) - 1 for one in texts_in)
    epochs = [texts.batch_rows(6, 4, 0, step) for step in range(3)]
    first, second = np.split(np.concatenate(epochs), 2)
    assert sorted(first) == sorted(second) == list(range(6)) and list(first) != list(second)


def test_suite(finetune, folder, trained, tmp_path, monkeypatch):
    """The benchmark's commands, and the table and the texts of the logs that they leave."""
    file, ran = tmp_path / "records.jsonl", []

    def leave_a_log(command, **_):
        args = finetune.parse_arguments(command[2:])
        texts = [finetune.Texts(folder).read(file) for file in (args.data, args.validation)]
        ran.append((args.optimizer, args.lora is None, args.seed, *map(len, texts)))
        answers = [{"step": step, "answer": f"{step}|\n{args.optimizer}"} for step in (0, 12)]
        rows = [*log_of(trained()[0]), *answers]
        (args.out / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(suite, "subprocess", types.SimpleNamespace(run=leave_a_log))
    words = f"--model {folder} --seed 0 --packages packaging --record {file}"
    suite.main(words.split())
    plain, adapters = (suite.BASE, True, 0), (suite.OURS, False, 0)
    assert [run[:3] for run in ran] == [plain, (suite.OURS, True, 0), adapters]
    assert ran[0][3] > 50 and ran[0][4] == -(-(ran[0][3] + ran[0][4]) // suite.HELD_OUT)
    rows = records.load(file)
    plain, ours = (row for row in rows if "curve" in row and row["impl"] != suite.LORA)
    assert [loss for _, loss in plain["curve"]] == losses(trained()[0], "validation_loss")
    rows += [plain | {"value": 1.0}, ours | {"value": 1.25}]
    rows += [plain | {"seed": 1, "value": 2.0}, ours | {"seed": 1, "value": 2.75}]
    rows += [ours | {"impl": suite.LORA, "value": 1.25}]
    rows += [plain | {"impl": f"{suite.BASE} lr=0.1", "value": 3.0}]
    rows += [ours | {"impl": f"{suite.OURS} lr=0.1", "value": 2.5}]
    _, body, _ = suite.table(records.newest(rows))
    assert [line[1:4] for line in body] == [
        ["2", "1.5000 ± 0.7071", ""],
        ["2", "2.0000 ± 1.0607", "+0.5000 ± 0.3536"],
        ["1", "1.2500", "+0.2500"],
        ["1", "2.5000", "-0.5000"],
        ["1", "3.0000", ""],
    ]
    _, body, _ = suite.texts(rows)
    assert [text for _, text in body] == [
        r"0\| optax.adamw", r"12\| optax.adamw", r"12\| flash_adamw", r"12\| flash_adamw"
    ]  # fmt: skip
    (line,) = suite.packages(rows)[1]
    assert line == [f"packaging {suite.version('packaging')}", str(sum(ran[0][3:]))]
    monkeypatch.setattr(records, "all_records", lambda: rows)
    assert "in bf16 ends at 2.0000, in f32 at 1.5000" in suite.draw().get_suptitle()
