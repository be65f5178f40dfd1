"""The commands of the page on a real model, on a CPU: all of their arguments, but one step."""

import json
import os
import re
import shlex
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from tests.repo.pages import DOCS, ROOT

PAGE = (DOCS / "tutorials/real_model.md").read_text("utf-8")
COMMANDS = re.findall(r"^python examples/finetune\.py (.*)$", PAGE, re.MULTILINE)
LAYERS, WIDTH, HIDDEN, KV, VOCAB = 30, 576, 1536, 192, 49_152  # of SmolLM2-135M
MOST_GIB = 12
# reports the peak of the process that it becomes
PROGRAM = """import resource, runpy, sys
sys.path.insert(0, "examples")
sys.argv[:1] = ["examples/finetune.py"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("peak KiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a random model of SmolLM2-135M's shapes, `smollm2`, and the page's data."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    place = tmp_path_factory.mktemp("tutorial")
    folder, rng = place / "smollm2", np.random.default_rng(0)
    folder.mkdir()

    def matrix(outputs, inputs):
        drawn = rng.standard_normal((outputs, inputs), np.float32) * inputs**-0.5
        return drawn.astype(ml_dtypes.bfloat16)

    norm = np.ones(WIDTH, ml_dtypes.bfloat16)
    arrays = {"model.embed_tokens.weight": matrix(VOCAB, WIDTH), "model.norm.weight": norm}
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (KV, WIDTH),
        "self_attn.v_proj": (KV, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH),
        "mlp.down_proj": (WIDTH, HIDDEN),
    }  # fmt: skip
    for i in range(LAYERS):
        of_layer = {name: matrix(*shape) for name, shape in shapes.items()}
        of_layer |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), norm)
        arrays |= {f"model.layers.{i}.{name}.weight": array for name, array in of_layer.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 100_000, "dtype": "bfloat16",
        "tie_word_embeddings": True, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<{i}>" for i in range(VOCAB - len(tokens))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[2]})
    )
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    subprocess.run([sys.executable, "-c", code], cwd=place, check=True)
    return place


def test_commands_were_found():
    assert len(COMMANDS) == 4 and all("--model smollm2" in words for words in COMMANDS)


@pytest.mark.full
@pytest.mark.parametrize("words", COMMANDS)
def test_command_of_the_page(place, words):
    """One step of 8 rows of 1,024 tokens takes no more than 12 GiB, and the model is written."""
    words = [*shlex.split(words), "--steps", "1"]
    where = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "XLA_FLAGS": ""}
    program = PROGRAM.replace("examples", str(ROOT / "examples"))
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=place, env=os.environ | where,
        capture_output=True, text=True, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 1/1  loss" in done.stdout
    assert int(re.findall(r"peak KiB (\d+)", done.stdout)[0]) <= MOST_GIB * 2**20
    out = place / words[words.index("--out") + 1]
    assert (out / "model/model.safetensors").stat().st_size > 2 * 134e6
