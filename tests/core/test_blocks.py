"""Adam-mini's blocks: what each kind of leaf gets, why, how large v_mean is, and bad input."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.model_shapes import llama
from optax_lowmem import blocks
from optax_lowmem.blocks import Block
from tests.tiers import rows

# Table 4 of Q-Adam-mini: its models, and MiB of v_mean with one block a value projection
LLAMA_1B = {"layers": 24, "width": 2048, "hidden": 5461, "kv": 2048, "vocab": 32000}
LLAMA_7B = {"layers": 32, "width": 4096, "hidden": 11008, "kv": 4096, "vocab": 32000}
VALUE_WHOLE = (("*/v_proj/kernel", "whole"),)


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def at(path: str, *shape: int) -> Any:
    """A tree with one leaf."""
    tree: Any = leaf(*shape)
    for name in reversed(path.split("/")):
        tree = {name: tree}
    return tree


def merged(*trees: Any) -> Any:
    """One tree of nested dicts from several."""
    out: dict = {}
    for tree in trees:
        for name, value in tree.items():
            both = isinstance(value, dict) and name in out
            out[name] = merged(out[name], value) if both else value
    return out


def model(**shapes: tuple[int, ...]) -> Any:
    """A tree from `a__b=shape`."""
    return merged(*(at(path.replace("__", "/"), *shape) for path, shape in shapes.items()))


def mean_shapes(params: Any, **options: Any) -> dict[str, tuple[int, ...]]:
    """path -> shape of v_mean, or "?" for an unknown leaf."""
    rows = blocks.describe(params, **options).rows
    return {r.path: r.block.mean_shape(r.shape) if r.block.known else "?" for r in rows}


# ---- averaging -----------------------------------------------------------------------------------
def numpy_mean(block: Block, x: np.ndarray) -> np.ndarray:
    """v_mean from its definition: each element into the sum of its block."""
    rank = x.ndim
    axes = {axis % rank for axis in block.axes}
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    head_axis, dim = None, 1
    if block.heads:
        head_axis = block.heads[0] % rank
        shape[head_axis], dim = block.heads[1], x.shape[head_axis] // block.heads[1]
    total, count = np.zeros(shape), np.zeros(shape)
    for index in np.ndindex(*x.shape):
        to = tuple(
            0 if a in axes else i // dim if a == head_axis else i for a, i in enumerate(index)
        )
        total[to] += x[index]
        count[to] += 1
    return total / count


def random_block(rng: np.random.Generator) -> tuple[tuple[int, ...], Block]:
    rank = int(rng.integers(1, 5))
    shape = tuple(int(size) for size in rng.integers(1, 7, rank))
    axes = [axis for axis in range(rank) if rng.random() < 0.5]
    heads = None
    if rng.random() < 0.6:
        axis = int(rng.integers(rank))
        counts = [n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0]
        heads = (axis - rank * int(rng.integers(2)), int(rng.choice(counts)))
        axes = [a for a in axes if a != axis]
    rng.shuffle(axes)
    return shape, Block(tuple(a - rank * int(rng.integers(2)) for a in axes), heads)


@pytest.mark.parametrize("seed", rows(range(40), range(12)))
def test_mean_and_spread_are_numpys(seed):
    rng = np.random.default_rng(seed)
    shape, block = random_block(rng)
    x = rng.normal(size=shape).astype(np.float32)
    v = block.mean(jnp.asarray(x))
    assert v.dtype == jnp.float32 and v.shape == block.mean_shape(shape)
    assert v.size == block.values(shape)
    np.testing.assert_allclose(v, numpy_mean(block, x), rtol=1e-5, atol=1e-6)
    back = block.spread(v, shape)
    assert back.shape == shape
    np.testing.assert_array_equal(block.mean(back).shape, v.shape)
    np.testing.assert_allclose(back, numpy_spread(block, np.asarray(v), shape), rtol=0, atol=0)


def numpy_spread(block: Block, v: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for axis, size in enumerate(shape):
        v = np.repeat(v, size // v.shape[axis], axis)
    return v


def test_means_are_taken_in_f32():
    """An f16 sum of so many ones would overflow."""
    x = jnp.ones((2**17, 1), jnp.float16)
    mean = Block((0,)).mean(x)
    assert mean[0, 0] == 1.0 and mean.dtype == jnp.float32


def test_blocks_trace_hash_and_do_nothing_to_empty_leaves():
    block = Block([0], heads=[1, 2])
    assert hash(block) == hash(Block((0,), (1, 2), reason="other")) and block == Block((0,), (1, 2))
    mean = jax.jit(lambda x: block.mean(x))
    np.testing.assert_array_equal(mean(jnp.arange(8.0).reshape(2, 4)), [[2.5, 4.5]])
    assert Block((0,)).mean(jnp.zeros((0, 3))).tolist() == [[0.0, 0.0, 0.0]]
    assert mean_shapes(at("a/kernel", 0, 3)) == {"a/kernel": (0, 3)}
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(Block().spread(Block().mean(x), x.shape), x)


# ---- Table 4 -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "paper", "per_neuron"), [(LLAMA_1B, 1.6, 1.813), (LLAMA_7B, 3.9, 4.440)]
)
def test_table_4(config, paper, per_neuron):
    params = llama(jnp.float32, tied=False, **config)
    as_in_its_code = blocks.describe(params, heads=32, rules=VALUE_WHOLE)
    right = blocks.describe(params, heads=32)
    assert not as_in_its_code.unknown and not right.unknown
    assert round(as_in_its_code.bytes / 2**20, 1) == paper
    assert right.bytes / 2**20 == pytest.approx(per_neuron, abs=5e-4)
    # per layer: heads of query and key, neurons of projection and MLP, two norms
    width, hidden, n = config["width"], config["hidden"], config["layers"]
    without_value = 2 * 32000 + n * (2 * 32 + 2 * width + 2 * hidden + 2) + 1
    assert as_in_its_code.values == without_value + n
    assert right.values == without_value + n * width


# ---- hand-made trees -----------------------------------------------------------------------------
def test_grouped_queries_whose_heads_do_not_make_the_width():
    """8 query and 2 key heads of 16 in a model of width 96: fused, and with head axes."""
    fused = model(
        attn__q_proj__kernel=(96, 128),
        attn__k_proj__kernel=(96, 32),
        attn__v_proj__kernel=(96, 32),
        attn__o_proj__kernel=(128, 96),
    )
    expected = {
        "attn/k_proj/kernel": (1, 2),
        "attn/o_proj/kernel": (1, 96),
        "attn/q_proj/kernel": (1, 8),
        "attn/v_proj/kernel": (1, 32),
    }
    for options in ({"heads": 8}, {"heads": 8, "kv_heads": 2}):  # the first from the head_dim
        assert mean_shapes(dict(sorted(fused.items())), **options) == expected
    split = model(
        attention__query__kernel=(96, 8, 16),
        attention__key__kernel=(96, 2, 16),
        attention__value__kernel=(96, 2, 16),
        attention__out__kernel=(8, 16, 96),
    )
    assert mean_shapes(split) == {
        "attention/key/kernel": (1, 2, 1),
        "attention/out/kernel": (1, 1, 96),
        "attention/query/kernel": (1, 8, 1),
        "attention/value/kernel": (1, 2, 16),
    }


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("model/embed_tokens/embedding", (50, 8), (50, 1)),
        ("wte", (50, 8), (50, 1)),
        ("layers/embedder/embedding", (3, 50, 8), (3, 50, 1)),
        ("lm_head/kernel", (8, 50), (1, 50)),
        ("mlp/gate_proj/kernel", (8, 24), (1, 24)),
        ("mlp/down_proj/kernel", (24, 8), (1, 8)),
        ("block_0/w2", (24, 8), (1, 8)),
        ("Dense_3/kernel", (8, 24), (1, 24)),
        ("Dense_3/kernel", (5, 8, 24), (5, 1, 24)),
        ("mlp/0/kernel", (8, 24), (1, 24)),
        ("attention/dense/kernel", (8, 24), (1, 24)),
        ("attention/output/dense/kernel", (8, 24), (1, 24)),
        ("mlp/experts/up_proj/kernel", (4, 8, 24), (4, 1, 24)),
        ("norm/scale", (8,), (1,)),
        ("norm/scale", (3, 8), (3, 1)),
        ("model/norm/weight", (8,), (1,)),
        ("Dense_0/bias", (8,), (1,)),
        ("attn/query/bias", (4, 8), (1, 1)),
        ("Conv_0/kernel", (3, 3, 8, 16), (1, 1, 1, 1)),
        ("attn/qkv/kernel", (8, 3, 4, 2), (1, 3, 4, 1)),
        ("attn/query/kernel", (5, 16, 4, 8), (5, 1, 4, 1)),
        ("mamba/in_proj/kernel", (8, 32), (1, 32)),
        ("temperature", (), ()),
    ],
)
def test_kinds(path, shape, expected):
    assert mean_shapes(at(path, *shape)) == {path: expected}


@pytest.mark.parametrize(
    ("path", "shape", "says"),
    [
        ("monkey/kernel", (8, 4, 2), "which axes of shape (8, 4, 2) are inputs"),  # no key in it
        ("attn/q_proj/kernel", (8, 16), "pass heads="),
        ("attn/k_proj/kernel", (8, 16), "pass kv_heads="),
        ("attn/c_attn/kernel", (8, 24), "pass heads="),
        ("attn/lora_a/kernel", (8, 24), "called 'lora_a'"),
        ("Attention_0/Dense_0/kernel", (8, 24), "called 'dense'"),
        ("memory/key/kernel", (8, 24), "'key' is neither in an attention"),
        ("proj/weight", (8, 24), "(in, out) or (out, in)"),
        ("kiln/thing", (8, 24), "neither its name nor its module"),
        ("patches/kernel", (3, 3, 8, 24), "which axes of shape"),
        ("norm/scale", (2, 3, 4), "too many axes"),
        ("cls", (1, 1, 8), "neither its name"),
    ],
)
def test_unknown_leaves_are_reported_and_get_the_default(path, shape, says):
    report = blocks.describe(at(path, *shape))
    assert report.unknown == (path,)
    block = report.rows[0].block
    assert block.axes == tuple(range(len(shape))) and block.reason.startswith("not recognised: ")
    assert says in block.reason and f"rules=[('{path}'" in block.reason
    assert str(report).startswith(f"? {path}") and "1 not recognised (marked ?)" in str(report)
    adam = blocks.describe(at(path, *shape), default="elementwise")
    assert adam.unknown == (path,) and adam.values == math.prod(shape)


def test_stacked_attention_is_not_taken_for_heads():
    """(layers, in, out) kernels have the rank of (in, heads, head_dim) ones."""
    shapes = {name: (3, 16, 16) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    named = {"layers": {"attn": {name: {"kernel": leaf(*s)} for name, s in shapes.items()}}}
    got = mean_shapes(named, heads=4)
    assert got["layers/attn/q_proj/kernel"] == got["layers/attn/k_proj/kernel"] == (3, 1, 4)
    assert got["layers/attn/v_proj/kernel"] == got["layers/attn/o_proj/kernel"] == (3, 1, 16)
    # nothing tells that they are stacked, and they cannot be heads: not guessed
    assert set(mean_shapes({"stuff": named["layers"]}, heads=4).values()) == {"?"}
    assert set(mean_shapes({"stuff": named["layers"]}).values()) == {"?"}


def test_a_bias_shows_stacked_layers():
    params = model(attn__query__kernel=(3, 8, 24), attn__query__bias=(3, 24))
    expected = {"attn/query/bias": (3, 1), "attn/query/kernel": (3, 1, 4)}
    assert mean_shapes(params, heads=4) == expected


def test_layers_may_be_stacked_along_the_second_axis():
    params = model(
        decoder__layers__mlp__wi__kernel=(8, 3, 24),
        decoder__layers__mlp__wo__kernel=(24, 3, 8),
        decoder__layers__norm__scale=(8, 3),
        decoder__layers__attn__query__kernel=(8, 3, 2, 4),
    )
    assert mean_shapes(params) == {
        "decoder/layers/attn/query/kernel": (1, 3, 2, 1),
        "decoder/layers/mlp/wi/kernel": (1, 3, 24),
        "decoder/layers/mlp/wo/kernel": (1, 3, 8),
        "decoder/layers/norm/scale": (1, 3),
    }


@pytest.mark.parametrize(
    "params",
    [
        model(layers__dense__kernel=(8, 8), layers__dense__bias=(8,)),
        model(layers__0__dense__kernel=(8, 8), layers__1__dense__kernel=(8, 8)),
        model(h__wq=(8, 8), h__wk=(8, 8), h__w1=(8, 8)),
        model(h__query__kernel=(8, 2, 4), h__up__kernel=(8, 24)),
    ],
)
def test_a_name_alone_stacks_nothing(params):
    for row in blocks.describe(params, heads=2).rows:
        if len(row.shape) == 2:
            assert row.block.axes == (0,) and row.block.known, row


def test_gpt2s_fused_kernel_and_its_transposed_form():
    """Hugging Face's FlaxConv1D keeps (out, in); the square projection goes by its neighbours."""
    names = {"c_attn": (8, 24), "c_proj": (8, 8)}
    plain = {"attn": {n: {"kernel": leaf(*s), "bias": leaf(s[1])} for n, s in names.items()}}
    turned = {"attn": {n: {"kernel": leaf(*s[::-1]), "bias": leaf(s[1])} for n, s in names.items()}}
    got = mean_shapes(plain, heads=4)
    assert got["attn/c_attn/kernel"] == (1, 12) and got["attn/c_proj/kernel"] == (1, 8)
    got = mean_shapes(turned, heads=4)
    assert got["attn/c_attn/kernel"] == (12, 1) and got["attn/c_proj/kernel"] == (8, 1)


def test_fused_kernel_of_grouped_queries():
    """4 query and 2 key heads of 5: the projection after it says so, or kv_heads."""
    params = model(attn__qkv_proj__kernel=(8, 40), attn__o_proj__kernel=(20, 8))
    assert mean_shapes(params, heads=4)["attn/qkv_proj/kernel"] == (1, 8)
    alone = at("attn/qkv_proj/kernel", 8, 40)
    assert mean_shapes(alone, heads=4) == {"attn/qkv_proj/kernel": "?"}
    assert mean_shapes(alone, heads=4, kv_heads=2) == {"attn/qkv_proj/kernel": (1, 8)}
    names = {"c_attn": (8, 16), "q_attn": (8, 8), "c_proj": (8, 8)}
    cross = {"attn": {name: {"kernel": leaf(*shape)} for name, shape in names.items()}}
    assert mean_shapes(cross, heads=4)["attn/c_attn/kernel"] == "?"


def test_key_and_query_beside_each_other_make_an_attention():
    params = model(mixer__q=(8, 8), mixer__k=(8, 4), mixer__v=(8, 4), mixer__other__kernel=(8, 4))
    assert mean_shapes(params, heads=4) == {
        "mixer/k": (1, 2),
        "mixer/other/kernel": "?",
        "mixer/q": (1, 4),
        "mixer/v": (1, 4),
    }


# ---- rules and report ----------------------------------------------------------------------------
def test_the_first_rule_that_matches_decides():
    params = model(a__kernel=(4, 6), b__kernel=(4, 6), b__bias=(6,), layers__s=(3, 4, 4))
    rules = (
        ("a/*", (-1,)),
        ("*/kernel", Block((0,), heads=(1, 3), reason="my own")),
        ("*bias", "elementwise"),
        ("layers/s", "whole"),
    )
    found = blocks.infer(params, rules=rules)
    shapes = {"a/kernel": (4, 1), "b/bias": (6,), "b/kernel": (1, 3), "layers/s": (3, 1, 1)}
    assert mean_shapes(params, rules=rules) == shapes
    assert found["a/kernel"].reason == "rule 'a/*'" and found["b/kernel"].reason == "my own"
    assert list(found) == ["a/kernel", "b/bias", "b/kernel", "layers/s"]


# ---- misuse --------------------------------------------------------------------------------------
KERNEL = at("mlp/kernel", 8, 12)
HEADED = model(attn__q_proj__kernel=(8, 12), attn__k_proj__kernel=(8, 6))


@pytest.mark.parametrize(
    ("params", "options", "says"),
    [
        (KERNEL, {"rules": [("mlp/kernel", (2,))]}, "axis 2 is out of range for leaf 'mlp/kernel'"),
        (KERNEL, {"rules": [("*", (-3,))]}, "axis -3 is out of range"),
        (KERNEL, {"rules": [("*", (1, -1))]}, "named twice for leaf 'mlp/kernel'"),
        (KERNEL, {"rules": [("*", Block((1,), heads=(1, 2)))]}, "named twice"),
        (KERNEL, {"rules": [("*", Block((0,), heads=(1, 5)))]}, "5 heads do not divide axis 1"),
        (KERNEL, {"rules": [("mpl/*", (0,))]}, "the rule 'mpl/.*' matches no leaf"),
        (KERNEL, {"rules": [("*", "rows")]}, "must be a Block, axes"),
        (KERNEL, {"default": "rows"}, "default must be one of whole, elementwise"),
        (KERNEL, {"heads": 0}, "heads must be a number of heads"),
        (KERNEL, {"kv_heads": True}, "kv_heads must be a number of heads"),
        (HEADED, {"heads": 5}, "heads=5 does not divide the 12 outputs of leaf 'attn/q_proj/kern"),
        (HEADED, {"heads": 4, "kv_heads": 4}, "kv_heads=4 does not divide the 6 outputs"),
        (HEADED, {"heads": 4, "kv_heads": 3}, "head_dim 2 with kv_heads=3, its query has 3"),
        (HEADED, {"heads": 3, "kv_heads": None}, "leaf 'attn/k_proj/kernel' has 6 outputs, which"),
        (at("attn/qkv/kernel", 8, 24), {"heads": 5}, "heads=5 does not divide"),
    ],
)
def test_bad_input_is_refused_at_the_call(params, options, says):
    for call in (blocks.infer, blocks.describe):
        with pytest.raises(ValueError, match=says):
            call(params, **options)


@pytest.mark.parametrize("axes", ["01", 0, (0.5,), (True,)])
def test_axes_are_numbers(axes):
    with pytest.raises(TypeError, match="a tuple of axis numbers"):
        Block(axes)


def test_rules_are_pairs():
    with pytest.raises(TypeError, match="rules must be a sequence of .* pairs"):
        blocks.infer(KERNEL, rules=["*/bias"])
    with pytest.raises(ValueError, match=r"Block.heads is \(axis, number of heads"):
        Block((0,), heads=(1, 0))
