"""Write tiny random Hugging Face models with the logits that transformers computes.

Needs transformers and torch, in an environment of its own:

    python tools/tiny_models.py tests/golden/huggingface           # write them
    python tools/tiny_models.py --check FOLDER golden.npz          # load a folder, compare

Each model is a folder as `save_pretrained` writes it, with weights in bfloat16, and `golden.npz`:

    tokens     [1, 20]: 8 random tokens and their greedy continuation, in f32
    logits     [1, 5, vocab], of every fourth token, in f32, of the weights cast to f32
    error      root mean square of the difference of logits computed in bf16
    versions   of transformers and torch

`variants.npz` has, by name, the logits of these weights with other configurations, and as `configs`
the folder and the configuration of each, in JSON.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = dict(
    vocab_size=48, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=96,
)  # fmt: skip
SMALL_WINDOW = dict(sliding_window=4)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
LOCAL = "sliding_attention"
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(
        rope_parameters=LLAMA3, rms_norm_eps=1e-5, hidden_size=16, intermediate_size=24, head_dim=8
    ),
    "mistral": SMALL_WINDOW | dict(head_dim=6),
    "qwen2": dict(tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=1),
    "qwen3": dict(head_dim=4),
    "gemma2": SMALL_WINDOW | dict(head_dim=4, query_pre_attn_scalar=3, attn_logit_softcapping=5.0),
    "gemma3_text": SMALL_WINDOW
    | dict(
        head_dim=4, num_hidden_layers=3, query_pre_attn_scalar=3,
        layer_types=[LOCAL, LOCAL, "full_attention"],
        rope_parameters={
            LOCAL: dict(rope_type="default", rope_theta=100.0),
            "full_attention": dict(rope_type="linear", rope_theta=10_000.0, factor=2.0),
        },
    ),
}  # fmt: skip
LINEAR = dict(rope_type="linear", factor=4.0)
LEFT_OUT = ("rope_parameters", "layer_types")  # of older files, which variants have as None
# name -> folder, and what differs in its configuration
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, an unused window": ("llama", dict(sliding_window=4)),
    "llama, two scalings": ("llama", dict(rope_scaling=LINEAR)),
    "llama, an unused base": ("llama", dict(rope_theta=100.0)),
    "llama, an older base": ("llama", dict(rope_theta=100, rope_parameters=None)),
    "llama, original length outside": ("llama", dict(original_max_position_embeddings=8)),
    "llama, an untied head": ("llama", dict(tie_word_embeddings=True)),
    "mistral, window not switched off": ("mistral", dict(use_sliding_window=False)),
    "mistral, no window": ("mistral", dict(sliding_window=None)),
    "qwen2, window": ("qwen2", dict(
        use_sliding_window=True, sliding_window=3, max_window_layers=1, layer_types=None)),
    "gemma2, caps": ("gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=2.0)),
    "gemma3, sliding scaling": ("gemma3_text", dict(rope_parameters={
        LOCAL: LINEAR | dict(rope_theta=100.0),
        "full_attention": dict(rope_type="default", rope_theta=10_000.0)})),
    "gemma3, older keys": ("gemma3_text", dict(
        rope_scaling=LINEAR, rope_theta=1e5, rope_local_base_freq=50.0, sliding_window_pattern=2,
        rope_parameters=None, layer_types=None)),
}  # fmt: skip
SHARDED = "qwen2"  # in several files, with an index


def make(name: str) -> Any:
    """Return a model whose every tensor, norms and biases included, is random."""
    config = AutoConfig.for_model(
        name, **(SIZES | MODELS[name]), bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(20261127)
    with torch.no_grad():
        for key, p in model.named_parameters():
            around = 1.0 if "norm" in key and not name.startswith("gemma") else 0.0
            scale = 0.3 if p.ndim == 1 else 1.5 * p.shape[-1] ** -0.5
            drawn = around + scale * torch.randn(p.shape, generator=generator)
            p.copy_(torch.round(8 * drawn) / 8)  # few values, which compress well
    return model.to(torch.bfloat16).eval()


def logits(folder: Path, dtype: torch.dtype, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of a folder's model after every fourth token, computed in a dtype."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor(tokens.astype(int))).logits[:, 3::4].float().numpy()


def write(out: Path) -> None:
    """Write the models and their logits."""
    prompt = np.random.default_rng(0).integers(1, SIZES["vocab_size"], (1, 8))
    versions = json.dumps({"transformers": transformers.__version__, "torch": torch.__version__})
    for name in MODELS:
        folder = out / name
        model = make(name)
        model.save_pretrained(folder, max_shard_size="2KB" if name == SHARDED else "1GB")
        model = model.float()
        model.set_attn_implementation("eager")
        tokens = model.generate(
            torch.tensor(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None
        ).numpy()
        found, rounded = (logits(folder, d, tokens) for d in (torch.float32, torch.bfloat16))
        error = np.sqrt(np.mean(np.square(rounded - found)))
        np.savez_compressed(
            folder / "golden.npz", tokens=tokens.astype(np.uint8), logits=found, error=error,
            versions=versions,
        )  # fmt: skip


def write_variants(out: Path) -> None:
    """Write the logits of the models' weights with other configurations."""
    arrays, configs = {}, {}
    for name, (model, change) in VARIANTS.items():
        config = json.loads((out / model / "config.json").read_text()) | change
        config = {k: v for k, v in config.items() if not (v is None and k in LEFT_OUT)}
        with tempfile.TemporaryDirectory() as place:
            folder = Path(shutil.copytree(out / model, place, dirs_exist_ok=True))
            (folder / "config.json").write_text(json.dumps(config))
            tokens = np.load(out / model / "golden.npz")["tokens"]
            arrays[name] = logits(folder, torch.float32, tokens)
        configs[name] = model, config
    np.savez_compressed(out / "variants.npz", configs=json.dumps(configs), **arrays)


def check(folder: Path, golden: Path) -> None:
    """Load a folder with transformers and print how far its logits are from the golden ones."""
    with np.load(golden) as stored:
        found = logits(folder, torch.float32, stored["tokens"])
        print(f"{folder}: {np.abs(found - stored['logits']).max():.2e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", type=Path)
    args = parser.parse_args()
    if args.check:
        check(args.check, args.out)
    else:
        write(args.out)
        write_variants(args.out)
