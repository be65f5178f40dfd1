"""A training step of Hugging Face's Llama in torch, as `end_to_end` has it beside ours.

    python -m benchmarks.suites.end_to_end.in_torch torch-liger 1b 8 2048  # a line of JSON

Weights are bf16 and the optimizer is flashoptim's AdamW in all, as near to ours as torch has it.
`torch-liger`: Liger's kernels, with the loss of the linear head in chunks, not compiled (with
`torch.compile` it fails). `torch-compile`: compiled, attention by SDPA. `torch-float8`: compiled,
layers multiply in FP8 by torchao. `-ckpt` behind a name: gradient checkpointing.
"""

import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

PACKAGES = ("torch", "transformers", "liger-kernel", "flashoptim", "torchao")
NAMES = ("torch-liger", "torch-compile", "torch-float8")
CHECKPOINTING = "-ckpt"
WARM_UP, REPEATS, STEPS = 4, 3, 5


def versions(packages: Sequence[str] = PACKAGES) -> str:
    """Name those of some packages that are installed, with their versions."""
    there = [name for name in packages if importlib.util.find_spec(name.replace("-", "_"))]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in there)


def measured(name: str, shape: Any, batch: int, sequence: int) -> dict[str, float]:
    """Tokens a second, and the most that torch has allocated; the median of three timings."""
    import torch

    step = _step(name, shape, batch, sequence)
    begin = time.perf_counter()
    for _ in range(WARM_UP):
        loss = step()
    torch.cuda.synchronize()
    found = {"compile_s": time.perf_counter() - begin}
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / STEPS)
    rate = batch * sequence / statistics.median(seconds)
    peak = torch.cuda.max_memory_allocated()
    return found | {"tokens_per_s": rate, "peak_bytes": peak, "train_loss": loss.item()}


def _step(name: str, shape: Any, batch: int, sequence: int) -> Any:
    import torch
    from flashoptim import FlashAdamW

    base = name.removesuffix(CHECKPOINTING)
    if base == "torch-liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model = llama(shape, sequence, torch.bfloat16, "cuda")
    if base == "torch-float8":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda _, own: "lm_head" not in own)
    if name.endswith(CHECKPOINTING):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = FlashAdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    forward = model if base == "torch-liger" else torch.compile(model)
    tokens = torch.randint(0, shape.vocab, (batch, sequence), device="cuda")

    def step() -> Any:
        loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def llama(shape: Any, sequence: int, dtype: Any, device: Any) -> Any:
    """Hugging Face's Llama of a shape of the examples."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, tie_word_embeddings=shape.tied,
        max_position_embeddings=sequence, rope_theta=shape.rope, attn_implementation="sdpa",
        use_cache=False,
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    from _llama.config import PRESETS

    own, preset, *size = sys.argv[1:]
    print(json.dumps(measured(own, PRESETS[preset].shape, *map(int, size))))
