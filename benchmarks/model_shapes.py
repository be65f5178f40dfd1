"""Leaf shapes of published models, abstract: trees of jax.ShapeDtypeStruct with per-layer names."""

from typing import Any

import jax
import jax.numpy as jnp


def _leaf(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def llama(
    dtype: Any, *, layers: int, width: int, hidden: int, kv: int, vocab: int, tied: bool
) -> dict:
    """A Llama with untied or tied embeddings; kernels are [in, out]."""

    def kernels(inputs: int, outputs: int, *names: str) -> dict:
        return {f"{name}_proj": {"kernel": _leaf(dtype, inputs, outputs)} for name in names}

    norm = {"scale": _leaf(dtype, width)}
    layer = {
        "input_layernorm": norm, "post_attention_layernorm": norm,
        "self_attn": kernels(width, kv, "k", "v") | kernels(width, width, "q", "o"),
        "mlp": kernels(width, hidden, "gate", "up") | kernels(hidden, width, "down"),
    }  # fmt: skip
    model = {
        "embed_tokens": {"embedding": _leaf(dtype, vocab, width)},
        "layers": {str(index): layer for index in range(layers)},
        "norm": norm,
    }
    head = {} if tied else {"lm_head": {"kernel": _leaf(dtype, width, vocab)}}
    return {"model": model} | head


def llama_3_1_8b(dtype: Any = jnp.bfloat16) -> dict:
    """8,030,261,248 parameters in 291 leaves."""
    return llama(dtype, layers=32, width=4096, hidden=14336, kv=1024, vocab=128256, tied=False)


def llama_3_2_1b(dtype: Any = jnp.bfloat16) -> dict:
    """1,235,814,400 parameters in 146 leaves."""
    return llama(dtype, layers=16, width=2048, hidden=8192, kv=512, vocab=128256, tied=True)


def llama_3_2_3b(dtype: Any = jnp.bfloat16) -> dict:
    """3,212,749,824 parameters in 254 leaves."""
    return llama(dtype, layers=28, width=3072, hidden=8192, kv=1024, vocab=128256, tied=True)


def gpt2_124m(dtype: Any = jnp.bfloat16) -> dict:
    """124,439,808 parameters in 148 leaves; the output projection is the token embedding."""
    return gpt2(dtype, layers=12, width=768, vocab=50257, context=1024)


def gpt2(dtype: Any, *, layers: int, width: int, vocab: int, context: int) -> dict:
    """A GPT-2 with biases; kernels are [in, out]."""

    def linear(inputs: int, outputs: int) -> dict:
        return {"kernel": _leaf(dtype, inputs, outputs), "bias": _leaf(dtype, outputs)}

    norm = {"scale": _leaf(dtype, width), "bias": _leaf(dtype, width)}
    attention = {"c_attn": linear(width, 3 * width), "c_proj": linear(width, width)}
    mlp = {"c_fc": linear(width, 4 * width), "c_proj": linear(4 * width, width)}
    block = {"ln_1": norm, "attn": attention, "ln_2": norm, "mlp": mlp}
    return {
        "wte": {"embedding": _leaf(dtype, vocab, width)},
        "wpe": {"embedding": _leaf(dtype, context, width)},
        "h": {str(index): block for index in range(layers)},
        "ln_f": norm,
    }


def resnet_50(dtype: Any = jnp.bfloat16) -> dict:
    """25,557,032 parameters in 161 leaves; convolution kernels are [height, width, in, out]."""

    def convolution(size: int, inputs: int, outputs: int) -> dict:
        norm = {"scale": _leaf(dtype, outputs), "bias": _leaf(dtype, outputs)}
        return {"conv": {"kernel": _leaf(dtype, size, size, inputs, outputs)}, "norm": norm}

    model, inputs = {"stem": convolution(7, 3, 64)}, 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for number in range(blocks):
            block = {"shortcut": convolution(1, inputs, 4 * width)} if number == 0 else {}
            block |= {
                "reduce": convolution(1, inputs, width),
                "middle": convolution(3, width, width),
                "expand": convolution(1, width, 4 * width),
            }
            model[f"stage{stage}_block{number}"], inputs = block, 4 * width
    head = {"kernel": _leaf(dtype, inputs, 1000), "bias": _leaf(dtype, 1000)}
    return model | {"head": head}
