"""pi0's parameters by openpi's paths, and its flow matching loss without images."""

import jax
import jax.numpy as jnp


def language(
    depth=18, widths=(2048, 1024), hidden=(16_384, 4096), heads=8, size=256, words=257_152
):
    """Shapes of Gemma (no suffix) and of the action expert (_1), which attends to Gemma's keys."""
    shapes = {"embedder/input_embedding": (words, widths[0])}
    for end, width, mlp in zip(("", "_1"), widths, hidden, strict=True):
        shapes |= {
            f"layers/attn/q_einsum{end}/w": (depth, heads, width, size),
            f"layers/attn/kv_einsum{end}/w": (depth, 2, 1, width, size),
            f"layers/attn/attn_vec_einsum{end}/w": (depth, heads, size, width),
            f"layers/mlp{end}/gating_einsum": (depth, 2, width, mlp),
            f"layers/mlp{end}/linear": (depth, mlp, width),
            f"layers/pre_attention_norm{end}/scale": (depth, width),
            f"layers/pre_ffw_norm{end}/scale": (depth, width),
            f"final_norm{end}/scale": (width,),
        }
    return {f"PaliGemma/llm/{name}": shape for name, shape in shapes.items()}


def vision(depth=27, width=1152, hidden=4304, heads=(16, 72), out=2048):
    """Shapes of SigLIP So400m/14."""
    block, dense = "Transformer/encoderblock", {}
    attention = f"{block}/MultiHeadDotProductAttention_0"
    for name in ("query", "key", "value"):
        dense[f"{attention}/{name}"] = (depth, width, *heads), (depth, *heads)
    dense[f"{attention}/out"] = (depth, *heads, width), (depth, width)
    dense[f"{block}/MlpBlock_0/Dense_0"] = (depth, width, hidden), (depth, hidden)
    dense[f"{block}/MlpBlock_0/Dense_1"] = (depth, hidden, width), (depth, width)
    dense |= {"embedding": ((14, 14, 3, width), (width,)), "head": ((width, out), (out,))}
    shapes = {"pos_embedding": (1, 256, width)}
    for name, (kernel, bias) in dense.items():
        shapes |= {f"{name}/kernel": kernel, f"{name}/bias": bias}
    for name, shape in (
        (f"{block}/LayerNorm_0", (depth, width)), (f"{block}/LayerNorm_1", (depth, width)),
        ("Transformer/encoder_norm", (width,)),
    ):  # fmt: skip
        shapes |= {f"{name}/scale": shape, f"{name}/bias": shape}
    return {f"PaliGemma/img/{name}": shape for name, shape in shapes.items()}


def projections(width=1024, actions=32):
    sizes = {"action_in_proj": (actions, width), "state_proj": (actions, width),
             "action_time_mlp_in": (2 * width, width), "action_time_mlp_out": (width, width),
             "action_out_proj": (width, actions)}  # fmt: skip
    kernels = {f"{name}/kernel": shape for name, shape in sizes.items()}
    return kernels | {f"{name}/bias": shape[1:] for name, shape in sizes.items()}


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (1 + scale)


def block(xs, layer):
    """Both experts: the prompt attends to itself, state and actions to everything."""
    w = {name.removeprefix("PaliGemma/llm/layers/"): value for name, value in layer.items()}
    qs, ks, vs = [], [], []
    for x, end in zip(xs, ("", "_1"), strict=True):
        h = norm(x, w[f"pre_attention_norm{end}/scale"])
        qs.append(jnp.einsum("btd,ndh->btnh", h, w[f"attn/q_einsum{end}/w"]))
        k, v = jnp.einsum("btd,ckdh->cbtkh", h, w[f"attn/kv_einsum{end}/w"])
        ks, vs = [*ks, k], [*vs, v]
    prompt, new = xs[0].shape[1], []
    q, k, v = (jnp.concatenate(parts, axis=1) for parts in (qs, ks, vs))
    late = jnp.arange(q.shape[1]) >= prompt
    seen = late[:, None] | ~late[None, :]
    y = jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])
    for x, part, end in zip(xs, (y[:, :prompt], y[:, prompt:]), ("", "_1"), strict=True):
        x = x + jnp.einsum("btnh,nhd->btd", part, w[f"attn/attn_vec_einsum{end}/w"])
        h = norm(x, w[f"pre_ffw_norm{end}/scale"])
        gate, up = (h @ matrix for matrix in w[f"mlp{end}/gating_einsum"])
        new.append(x + (jax.nn.gelu(gate) * up) @ w[f"mlp{end}/linear"])
    return tuple(new), None


def loss_fn(params, prompt, state, actions, key):
    """Mean squared error of the predicted velocity from actions to noise."""
    p = {name: value.astype(jnp.float32) for name, value in params.items()}
    linear = lambda name, x: x @ p[f"{name}/kernel"] + p[f"{name}/bias"]  # noqa: E731
    time_key, noise_key = jax.random.split(key)
    time = jax.random.beta(time_key, 1.5, 1, (len(actions), 1, 1)) * 0.999 + 0.001
    noise = jax.random.normal(noise_key, actions.shape)
    x = linear("action_in_proj", time * noise + (1 - time) * actions)
    period = 4e-3 * 1e3 ** jnp.linspace(0, 1, x.shape[-1] // 2)
    angle = jnp.broadcast_to(2 * jnp.pi * time / period, (*x.shape[:2], len(period)))
    x = jnp.concatenate([x, jnp.sin(angle), jnp.cos(angle)], axis=-1)
    x = linear("action_time_mlp_out", jax.nn.silu(linear("action_time_mlp_in", x)))
    suffix = jnp.concatenate([linear("state_proj", state)[:, None], x], axis=1)
    prefix = p["PaliGemma/llm/embedder/input_embedding"][prompt]
    layers = {name: value for name, value in p.items() if "/layers/" in name}
    (_, out), _ = jax.lax.scan(block, (prefix, suffix), layers)
    out = norm(out[:, 1:], p["PaliGemma/llm/final_norm_1/scale"])
    return jnp.mean((linear("action_out_proj", out) - (noise - actions)) ** 2)
