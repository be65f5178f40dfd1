"""A folder of a tiny Llama with a chat, and the flags and results of fine-tuning it."""

import json
import shutil

import jax
import jax.numpy as jnp

from tests.repo.pages import ROOT

TINY = ROOT / "tests/golden/huggingface"
TEMPLATE = (
    "{% for m in messages %}{{ '^' + m['role'][0] + m['content'] + '$' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '^a' }}{% endif %}"
)
CHARACTERS = "_$^abcdefghijklmnopqrstuvwxyz .?0123456789"  # `$` ends a message
FACTS = [("what is the colour of the sky?", "blue."), ("how many legs has a cat?", "4."),
         ("and a bird?", "2."), ("what do cats drink?", "milk.")]  # fmt: skip


def make_folder(out, kind="llama"):
    """Write a model as transformers does, with a tokenizer of characters, and a chat."""
    from tokenizers import Tokenizer, models

    shutil.copytree(TINY / kind, out, dirs_exist_ok=True)
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


def make_wide_folder(out):
    """Write a Llama as `make_folder`, whose matrices have inputs of whole blocks of NF4."""
    from _llama import huggingface, model
    from safetensors.numpy import save_file

    make_folder(out)
    config = json.loads((out / "config.json").read_text())
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    (out / "config.json").write_text(json.dumps(config | sizes))
    weights = model.Llama(huggingface.read_shape(out, print)).weights(jax.random.key(3))
    arrays = {p.name: p.read().astype(jnp.bfloat16).copy() for p in huggingface.parts(weights)}
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    return out


def flags(folder, out, more=""):
    """Return the arguments of a short run; `more` is after them."""
    chosen = f"--model {folder} --data {folder}/chat.jsonl --out {out} --sequence 95 --batch 4"
    return f"{chosen} --steps 12 --lr 0.02 --held-out 0.1 --evaluate-every 6 {more}".split()


def log_of(out):
    """Return the lines of a run's log, which must be strict JSON."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    lines = (out / "log.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def losses(out, name="loss"):
    """Return the losses of a run's log."""
    return [row[name] for row in log_of(out) if name in row]


def weights_of(file):
    """Return the tensors of a safetensors file."""
    from safetensors.numpy import load_file

    return load_file(file)
