"""Tests of choosing a transformer's matrices by part, from the names that models give them."""

import jax.numpy as jnp

from optax_lowmem.gaussws.parts import PARTS, chooser

NAMES = {
    "layers/self_attn/q_proj/kernel": "qkv", "layers/self_attn/o_proj/kernel": "od out",
    "layers/mlp/gate_proj/kernel": "up", "layers/mlp/down_proj/kernel": "od down",
    "blocks/0/attention/qkv/kernel": "qkv", "blocks/0/attention/out/kernel": "od out",
    "h/attn/c_proj/kernel": "od out", "h/mlp/c_proj/kernel": "od down", "h/mlp/c_fc/kernel": "up",
    "decoder/layers_0/mlp/wo/kernel": "od down", "decoder/layers_0/mlp/wi_0/kernel": "up",
    "encoder/attention/output/dense/kernel": "", "Dense_0/kernel": "",
}  # fmt: skip
NEVER = ["embed_tokens/embedding", "lm_head/kernel", "norm/scale", "h/mlp/c_fc/bias", "conv/kernel"]


def test_parts():
    for path, names in NAMES.items():
        found = {name for name in PARTS if chooser(name)(path, jnp.ones((4, 4)))}
        assert found == {*names.split(), "all"}, path
    for path in NEVER:
        assert not any(chooser(name)(path, jnp.ones((4, 4))) for name in PARTS), path
    several = chooser(["qkv", "*/wo/*"])
    chosen = [path for path in NAMES if several(path, None)]
    assert chosen == [
        "layers/self_attn/q_proj/kernel", "blocks/0/attention/qkv/kernel",
        "decoder/layers_0/mlp/wo/kernel",
    ]  # fmt: skip
    assert chooser(lambda path, leaf: leaf.ndim == 3)("x", jnp.ones((1, 2, 3)))
