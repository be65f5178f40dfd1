"""The fine-tuning example: as a user runs it, killed and resumed, with adapters; and its data."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import optax_lowmem as lowmem
from tests.compilation import QUICK_FLAGS
from tests.repo.test_examples import ROOT, example, run_script  # noqa: F401 (a fixture)

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


@pytest.fixture
def finetune(example):  # noqa: F811
    return example("finetune")


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(out, name="loss"):
    return [row[name] for row in log_of(out) if name in row]


def test_killed_and_resumed(folder, tmp_path):
    """As a user runs it: the same bits after SIGKILL, and after SIGTERM, as without them."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    prompt = ["--prompt", "what do cats drink?", "--tokens", "6"]
    done = run_script("finetune.py", *flags(folder, whole), *prompt)
    assert done.returncode == 0, done.stderr
    assert "after 12 steps" in done.stdout
    answers = [row["answer"] for row in log_of(whole) if "answer" in row]
    assert len(answers) == 2 and answers[0] != answers[1]
    log = killed / "log.jsonl"
    for number, lines in ((signal.SIGKILL, 6), (signal.SIGTERM, 10)):
        resumed = [*flags(folder, killed, "--save-every 2 --resume"), *prompt]
        command = [sys.executable, "examples/finetune.py", *resumed]
        where = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        where |= {"XLA_FLAGS": QUICK_FLAGS}
        process = subprocess.Popen(command, cwd=ROOT, env=where, stderr=subprocess.PIPE)
        while not log.exists() or log.read_text().count("\n") < lines:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(number)
        assert process.wait() == (-9 if number == signal.SIGKILL else 130)
        process.stderr.close()
        assert lowmem.checkpoint.latest_step(killed / "checkpoints") < 12
    assert run_script("finetune.py", *resumed).returncode == 0
    for one, other in zip(log_of(whole), log_of(killed), strict=True):
        for row in (one, other):
            row.pop("seconds", None), row.pop("tokens_per_s", None)
        assert one == other
    weights = "model/model.safetensors"
    assert (whole / weights).read_bytes() == (killed / weights).read_bytes()
