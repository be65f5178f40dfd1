"""The fine-tuning example: as a user runs it, killed and resumed, with adapters."""

import dataclasses
import importlib
import json
import os
import re
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
from optax_lowmem import plan
from tests.compilation import QUICK_FLAGS
from tests.contract_cases import assert_same
from tests.repo.test_examples import ROOT, run_script
from tests.repo.tiny_model import flags, log_of, losses, weights_of
from tests.tolerances import F32_SUM_ORDER
from tests.wrappers.test_eager_programs import programs

pytestmark = pytest.mark.usefixtures("finetune")


def test_killed_and_resumed(folder, tmp_path):
    """As a user runs it: after SIGKILL the log and the model have the bits of a whole run."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    prompt = ["--prompt", "what do cats drink?", "--tokens", "6"]
    done = run_script("finetune.py", *flags(folder, whole), *prompt)
    assert done.returncode == 0, done.stderr
    assert "after 12 steps" in done.stdout and "0.0M trained parameters" in done.stdout
    # redirected: a line every 10 steps, and the folder that was written last
    shown = re.findall(r"step (\d+)/12  (held-out )?loss \d+\.\d{4}", done.stdout)
    assert [f"{n} {kind}".strip() for n, kind in shown] == [
        "0 held-out", "1", "6 held-out", "10", "12", "12 held-out"
    ]  # fmt: skip
    assert done.stdout.splitlines()[-1].startswith(f"{whole / 'model'}: ")
    assert "15 rows of 95 tokens" in done.stdout and "answers" in done.stdout
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
            for measured in ("seconds", "tokens_per_s", "peak_bytes"):
                row.pop(measured, None)
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


def test_signals(finetune, folder, trained, tmp_path, monkeypatch):
    """SIGUSR1 saves and SIGTERM saves and stops, at any step; the bits are those of a whole run."""
    advance = finetune.Run.advance

    def signalled(run):
        sent = {2: signal.SIGUSR1, 5: signal.SIGTERM}.get(run.step)
        if sent:
            signal.raise_signal(sent)
        return advance(run)

    def recorded(run):
        saved.append(run.step)
        save(run)

    before, saved, save = signal.getsignal(signal.SIGTERM), [], finetune.Run.save
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as stopped:
        patched.setattr(finetune.Run, "advance", signalled)
        patched.setattr(finetune.Run, "save", recorded)
        finetune.main(flags(folder, tmp_path))
    assert stopped.value.code == 143 and saved == [3, 6]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()] == ["6"]
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(SystemExit, match="has a run at step 6: add --resume"):
        finetune.main(flags(folder, tmp_path))
    with pytest.raises(SystemExit, match="a run with seed 0, not 1"):
        finetune.main(flags(folder, tmp_path, "--resume --seed 1"))
    other = tmp_path / "other.jsonl"
    other.write_text((folder / "chat.jsonl").read_text() + "\n")
    with pytest.raises(SystemExit, match=r"a run with data .*chat.jsonl \(CRC-32 .*other.jsonl"):
        finetune.main(flags(folder, tmp_path, f"--resume --data {other}"))
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
    modes = "--micro-batch 2 --clip 0 --lr 0.005", "--clip 0 --lr 0.005"
    accumulated, ordinary = (losses(trained(mode)[0]) for mode in modes)
    assert accumulated != ordinary  # gradients are rounded to bf16
    assert accumulated == pytest.approx(ordinary, rel=0.02)


def test_micro_batches_of_adamw_in_f32_are_added_in_f32(finetune, folder, tmp_path):
    """The norm of the gradient differs by rounding in f32 alone; in bf16, by 6e-3."""
    norms = []
    for rows in (4, 1):
        out = tmp_path / str(rows)
        more = f"--optimizer optax.adamw --steps 1 --micro-batch {rows}"
        finetune.main(flags(folder, out, more))
        norms += [row["gradient_norm"] for row in log_of(out) if "loss" in row]
    assert norms[1] == pytest.approx(norms[0], rel=F32_SUM_ORDER)


@pytest.mark.full
def test_adamw_in_f32_has_the_losses_of_the_ordinary_run(trained):
    """The first is equal; at this rate single losses of a few rows differ more than their mean."""
    plain, ordinary = losses(trained("--optimizer optax.adamw")[0]), losses(trained()[0])
    assert plain[0] == pytest.approx(ordinary[0], rel=1e-3) and plain != ordinary
    assert np.mean(plain) == pytest.approx(np.mean(ordinary), rel=0.02)


def test_master_weights_are_exported_one_at_a_time(finetune, trained, tmp_path, monkeypatch):
    """In f32, with the bits of all at once, which a device may have no memory for."""
    _, run = trained()
    params, masters = [], lowmem.master_params(run.trained, run.state)
    more = {"out": tmp_path, "dtype": "float32"}
    args = types.SimpleNamespace(**vars(run.args) | more)
    run = dataclasses.replace(run, setup=dataclasses.replace(run.setup, args=args))

    def one(trained, state, make=lowmem.master_params):
        params.append(len(jax.tree.leaves(trained)))
        return make(trained, state)

    monkeypatch.setattr(finetune.lowmem, "master_params", one)
    finetune.export(run)
    assert set(params) == {1} and len(params) == len(jax.tree.leaves(masters))
    saved = weights_of(tmp_path / "model/model.safetensors")
    up = masters["layers"]["mlp"]["up_proj"]["kernel"]
    assert (up != run.trained["layers"]["mlp"]["up_proj"]["kernel"]).any()
    np.testing.assert_array_equal(saved["model.layers.1.mlp.up_proj.weight"], up[1].T)


def test_gradient_release(trained):
    modes = (f"{mode} --lr 0.005" for mode in ("--clip 0", "--release", "--offload"))
    ordinary, *released = (losses(trained(mode)[0]) for mode in modes)
    for found in released:  # with the state on the host, one row at a time
        assert found == pytest.approx(ordinary, rel=0.02)


def test_weights_on_the_host_have_the_bits_of_weights_on_the_device(trained):
    one, other = (trained(f"--offload {of} --lr 0.005")[0] for of in ("", "weights"))
    assert losses(one) == losses(other)
    found, wanted = (losses(out, "validation_loss") for out in (other, one))
    assert found == pytest.approx(wanted, rel=1e-5)
    weights = "model/model.safetensors"
    assert (one / weights).read_bytes() == (other / weights).read_bytes()


def test_offloaded_steps_are_compiled_before_weights_are_loaded(finetune, folder, tmp_path):
    """But for operations on numbers, such as the schedule's, which the first run compiles."""
    for name in ("first", "second"):
        args = finetune.parse_arguments(flags(folder, tmp_path / name, "--offload"))
        run = finetune.prepare(args)
        arguments = run.trained, run.frozen, run.state, run.batch()
        compiled = programs(lambda run=run, arguments=arguments: run.take_step(*arguments))[1]
    assert compiled == 0


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


def test_frozen_layers_are_stacked_if_the_pattern_treats_them_alike(finetune, folder, tmp_path):
    for pattern, stacked in (("embed|up_proj", True), ("layers/0/", False)):
        args = finetune.parse_arguments(flags(folder, tmp_path, f"--freeze {pattern}"))
        setup = finetune.make_setup(args, finetune.huggingface.read_shape(folder), 1)
        assert setup.model.stacked == stacked
        trained, frozen, _ = jax.eval_shape(lambda s=setup: finetune.start(s, s.weights))
        assert {str(keys[-2]) for keys, _ in jax.tree_util.tree_leaves_with_path(frozen)} & {
            "['up_proj']"
        }
        assert len(jax.tree.leaves((trained, frozen))) == len(jax.tree.leaves(setup.weights))


def test_what_fits_a_budget(finetune, folder, tmp_path, monkeypatch):
    """The micro-batch is the largest that the compiled step has room for."""
    monkeypatch.setattr(finetune.memory, "used_bytes", lambda: 0)

    def setup(more=""):
        args = finetune.parse_arguments(flags(folder, tmp_path, more))
        return finetune.make_setup(args, finetune.huggingface.read_shape(folder), 1)

    def chosen(size, more=""):
        number, step = finetune.fit(setup(f"--budget {size / 2**20}MB {more}"), None)
        assert planned(step) == sizes[number]
        return number

    planned = finetune.memory.planned_bytes
    sizes = {n: planned(finetune.compile_step(setup(), n)) for n in (1, 2, 4)}
    assert sizes[1] > sizes[2] > sizes[4]
    assert [chosen(sizes[n]) for n in (1, 2, 4)] == [1, 2, 4] and chosen(sizes[1] - 1) == 2
    assert finetune.fit(setup(), None)[0] == 1  # what is free
    with pytest.raises(ValueError, match=r"--micro-batch 1 needs 0.00 GiB, and .* --lora"):
        chosen(sizes[4] - 1)
    for given, less in (("", "--release or --lora"), ("--lora q_proj", "--sequence or --base nf4")):
        args = finetune.parse_arguments(flags(folder, tmp_path, given))
        assert less in finetune.fewer_bytes(args)
    with pytest.raises(ValueError, match="--batch 4 --micro-batch 2 needs"):
        finetune.fit(setup(f"--budget {sizes[4] / 2**20}MB"), 2)


def test_resumed_with_the_micro_batches_that_it_was_begun_with(
    finetune, folder, tmp_path, capsys, monkeypatch
):
    """Saved in time; where there is no checkpoint, that is said."""
    saved = []
    with monkeypatch.context() as patched:
        patched.setattr(finetune, "_SAVE_SECONDS", 0.0)
        patched.setattr(finetune.Run, "save", lambda run: saved.append(run.step))
        finetune.main(flags(folder, tmp_path, "--micro-batch 2 --until 2"))
    assert saved == [1, 2]
    finetune.main(flags(folder, tmp_path, "--micro-batch 2 --until 1 --resume"))
    begins = f"no checkpoint in {tmp_path}: the run begins at step 0"
    assert begins in capsys.readouterr().out.splitlines()
    args = finetune.parse_arguments(flags(folder, tmp_path, "--resume"))
    run = finetune.prepare(args)
    assert (run.step, run.micro_batches) == (1, 2)
    assert "the run goes on from the checkpoint of step 1" in capsys.readouterr().out.splitlines()


def test_commands_that_the_planner_prints(finetune, folder, capsys):
    """They have flags of this program alone, and choose the mode that they are printed for."""
    sizes = plan.decoder(json.loads((folder / "config.json").read_text()))
    adapters = ("q_proj", "v_proj"), 16
    for mode in plan.plan_decoder(sizes, "flash_adamw", 0, 2048, adapters).modes:
        mebibytes = (mode.total_bytes(1) + 1) / plan.USABLE / 2**20
        plan.main(["--params", str(folder), "--gpu", f"{mebibytes}MiB"])
        printed = capsys.readouterr().out
        command, name = printed.splitlines()[-1].split(), re.search(r"Recommended: (\w+)", printed)
        args = finetune.parse_arguments(command[2:])
        found = "offload" if args.offload else "release" if args.release else "resident"
        assert args.batch >= 1 and name and name[1] == ("lora" if args.lora else found)


def test_suite(finetune, folder, trained, tmp_path, monkeypatch):
    """The benchmark's commands, and the table and the texts of the logs that they leave."""
    file, ran = tmp_path / "records.jsonl", []

    def leave_a_log(command, **_):
        args = finetune.parse_arguments(command[2:])
        texts = finetune.Texts(folder, 48)
        sizes = [len(texts.read(file, 95).texts) for file in (args.data, args.validation)]
        ran.append((args.optimizer, args.lora is None, args.seed, *sizes))
        answers = [{"step": step, "answer": f"{step}|\n{args.optimizer}"} for step in (0, 12)]
        rows = [*log_of(trained()[0]), *answers]
        (args.out / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(suite, "subprocess", types.SimpleNamespace(run=leave_a_log))
    words = f"--model {folder} --seed 0 --packages packaging --record {file}"
    suite.main(words.split())
    plain, adapters = (suite.BASE, True, 0), (suite.OURS, False, 0)  # LoRA, then QLoRA
    assert [run[:3] for run in ran] == [plain, (suite.OURS, True, 0), adapters, adapters]
    assert ran[0][3] > 50 and ran[0][4] == -(-(ran[0][3] + ran[0][4]) // suite.HELD_OUT)
    rows = records.load(file)
    plain, ours, *_ = (row for row in rows if "curve" in row)
    assert [loss for _, loss in plain["curve"]] == losses(trained()[0], "validation_loss")
    rows += [plain | {"value": 1.0}, ours | {"value": 1.25}]
    rows += [plain | {"seed": 1, "value": 2.0}, ours | {"seed": 1, "value": 2.75}]
    rows += [ours | {"impl": suite.LORA, "value": 1.25}, ours | {"impl": suite.QLORA, "value": 1.5}]
    rows += [plain | {"impl": f"{suite.BASE} lr=0.1", "value": 3.0}]
    rows += [ours | {"impl": f"{suite.OURS} lr=0.1", "value": 2.5}]
    _, body, _ = suite.table(records.newest(rows))
    assert [line[1:4] for line in body] == [
        ["2", "1.5000 ± 0.7071", ""],
        ["2", "2.0000 ± 1.0607", "+0.5000 ± 0.3536"],
        ["1", "1.2500", "+0.2500"],
        ["1", "1.5000", "+0.5000"],
        ["1", "2.5000", "-0.5000"],
        ["1", "3.0000", ""],
    ]
    _, body, _ = suite.texts(rows)
    assert [text for _, text in body] == [
        r"0\| optax.adamw", r"12\| optax.adamw", *[r"12\| flash_adamw"] * 3
    ]  # fmt: skip
    monkeypatch.setattr(records, "all_records", lambda: rows)
    assert "in bf16 ends at 2.0000, in f32 at 1.5000" in suite.draw().get_suptitle()
