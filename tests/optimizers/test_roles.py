"""Roles of parameters: stacked layers are treated as the same layers apart, by every optimizer."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from optax_lowmem._src.arrays.block import Factors
from tests import small_leaves, tolerances
from tests.contract_cases import RULES
from tests.tiers import rows

LAYERS, WIDTH, HEADS, HIDDEN = 3, 8, 2, 12
HEAD = WIDTH // HEADS


def attention(names, bias=(), vector=None):
    """Projections [in, out]; those in `bias` have one, of a shape like `vector`."""
    found = {f"self_attn/{name}/kernel": (WIDTH, WIDTH) for name in names}
    return found | {f"self_attn/{name}/bias": vector or (WIDTH,) for name in bias}


QKV = ("q_proj", "k_proj", "v_proj")
MLP = {"mlp/gate_proj/kernel": (WIDTH, HIDDEN), "mlp/up_proj/kernel": (WIDTH, HIDDEN),
       "mlp/down_proj/kernel": (HIDDEN, WIDTH)}  # fmt: skip
NORMS = {"input_norm/scale": (WIDTH,), "post_attention_norm/scale": (WIDTH,)}
LLAMA = {**attention((*QKV, "o_proj")), **MLP, **NORMS}
# family -> parameters of one layer
FAMILIES = {
    "llama": LLAMA,
    "llama with biases": LLAMA | {path.replace("kernel", "bias"): shape[-1:]
                                  for path, shape in LLAMA.items() if "kernel" in path},
    "qwen2": LLAMA | attention((), QKV),
    "gemma": LLAMA | {"pre_feedforward_norm/scale": (WIDTH,), "self_attn/q_norm/scale": (HEAD,),
                      "self_attn/k_norm/scale": (HEAD,)},
    "gpt": {"norm1/scale": (WIDTH,), "norm1/bias": (WIDTH,), "norm2/scale": (WIDTH,),
            "attention/qkv/kernel": (WIDTH, 3 * WIDTH), "attention/qkv/bias": (3 * WIDTH,),
            "attention/out/kernel": (WIDTH, WIDTH), "up/kernel": (WIDTH, HIDDEN),
            "up/bias": (HIDDEN,), "down/kernel": (HIDDEN, WIDTH)},
    "flax": {"LayerNorm_0/scale": (WIDTH,), "LayerNorm_0/bias": (WIDTH,),
             **{f"attn/{name}/{array}": shape for name in ("query", "key", "value")
                for array, shape in (("kernel", (WIDTH, HEADS, HEAD)), ("bias", (HEADS, HEAD)))},
             "attn/out/kernel": (HEADS, HEAD, WIDTH), "attn/out/bias": (WIDTH,),
             "Dense_0/kernel": (WIDTH, HIDDEN), "Dense_0/bias": (HIDDEN,),
             "Dense_1/kernel": (HIDDEN, WIDTH), "Dense_1/bias": (WIDTH,)},
    "torch's names": {"input_layernorm/weight": (WIDTH,), "ln_1/bias": (WIDTH,),
                      "mlp/up_proj/weight": (HIDDEN, WIDTH), "mlp/up_proj/bias": (HIDDEN,)},
    "bare arrays": {"wq": (WIDTH, WIDTH), "bq": (WIDTH,), "w1": (WIDTH, HIDDEN), "ln": (WIDTH,)},
}  # fmt: skip
ENDS = {
    "embed_tokens/embedding": (40, WIDTH),
    "norm/scale": (WIDTH,),
    "lm_head/kernel": (WIDTH, 40),
}
# their vectors are compressed only if several layers are counted together
STORAGE = {"policy": lowmem.Policy(min_size=HIDDEN * 3), "rounding": "nearest"}
MINI = ("flash_adam_mini", "q_adam_mini")
BLOCKS = lowmem.blocks.Structure(heads=HEADS, kv_heads=HEADS, default="whole")


def nested(flat):
    tree = {}
    for path, leaf in flat.items():
        *above, last = path.split("/")
        functools.reduce(lambda node, name: node.setdefault(name, {}), above, tree)[last] = leaf
    return tree


def drawn(shapes, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {path: np.float32(scale * rng.normal(size=shape)) for path, shape in shapes.items()}


def both(family, seed=0, scale=1.0):
    """The same parameters, with layers stacked and with layers apart."""
    layers = [drawn(FAMILIES[family], [seed, i], scale) for i in range(LAYERS)]
    stacked = {path: np.stack([layer[path] for layer in layers]) for path in layers[0]}
    ends = nested(drawn(ENDS, seed, scale))
    trees = ends | {"layers": nested(stacked)}, ends | {"layers": list(map(nested, layers))}
    return [jax.tree.map(jnp.asarray, tree) for tree in trees]


def made(name, rate=1e-2, **how):
    record = small_leaves.record(name)
    known = record.chosen({"blocks": BLOCKS, "threshold": 1e9})
    own = record.make(rate).engine.storage
    return record.make(rate, storage=dataclasses.replace(own, **{**STORAGE, **how}), **known)


def role(plan, lead):
    """What an optimizer does with a parameter, without its first `lead` axes."""
    block, axes = plan.block, None
    if block is not None and not block.elementwise:
        block = block.fit(plan.shape)
        heads = block.heads and (block.heads[0] - lead, block.heads[1])
        axes = isinstance(block, Factors), tuple(a - lead for a in block.axes), heads
    matrices = plan.matrices and tuple(
        tuple(axis - lead for axis in axes) for axes in (plan.matrices.rows, plan.matrices.columns)
    )
    slots = [(slot.name, slot.codec) for slot in (*plan.slots, *plan.blockwise)]
    return matrices, axes, slots, plan.decays


def roles_of(tx, tree):
    """path, with "*" for the number of the layer -> role of one layer."""
    found = {}
    stacked = isinstance(tree["layers"], dict)
    for plan in tx.engine.plans(tree):
        names, lead = plan.path.split("/"), 0
        if names[0] == "layers":
            lead = int(stacked)
            names[1:] = ["*", *names[1:]] if stacked else ["*", *names[2:]]
        path = "/".join(names)
        assert found.setdefault(path, role(plan, lead)) == role(plan, lead), path
    return found


def is_vector(path):
    return path.split("/")[-1] in ("scale", "bias", "bq", "ln") or "layernorm" in path


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", lowmem.OPTIMIZERS)
def test_stacked_layers_have_the_roles_of_layers_apart(name, family):
    tx, (stacked, apart) = made(name), both(family)
    found, wanted = roles_of(tx, stacked), roles_of(tx, apart)
    assert found == wanted
    for path, (matrices, axes, slots, decays) in found.items():
        assert decays
        shape = FAMILIES[family].get(path.removeprefix("layers/*/"), ENDS.get(path))
        if name == "flash_muon":
            assert (matrices == ((0,), (1,))) == (len(shape) == 2 and not is_vector(path)), path
        if name == "flash_factored_adamw":
            assert (axes is not None and axes[0]) != is_vector(path), path
        if is_vector(path):
            assert all(codec is None for _, codec in slots), path
        else:
            assert any(codec for _, codec in slots), path


# of one update, the largest difference between two programs; Muon's iterations enlarge last bits
LIMITS = {"flash_muon": tolerances.MUON_EXACT}


@pytest.mark.parametrize("family", rows(FAMILIES, ["flax"]))
@pytest.mark.parametrize("name", rows(lowmem.OPTIMIZERS, list(RULES)))
def test_stacked_layers_take_the_steps_of_layers_apart(name, family):
    """`stable_adamw` without its clipping, whose mean is over each tensor."""
    tx = made(name, mu=None, nu=None)
    step, results = jax.jit(functools.partial(lowmem.step, tx)), []
    for params, *gradients in zip(*(both(family, i, 0.1) for i in range(4)), strict=True):
        state = tx.init(params)
        for g in gradients:
            params, state = step(g, state, params)
        results.append(params)
    start = both(family, 0, 0.1)[0]
    stacked, apart = results
    joined = jax.tree.map(lambda *layers: jnp.stack(layers), *apart["layers"])
    assert jax.tree.structure(joined) == jax.tree.structure(stacked["layers"])
    for path, (a, b, c) in zip(
        FAMILIES[family],
        zip(*map(jax.tree.leaves, (stacked["layers"], joined, start["layers"])), strict=True),
        strict=True,
    ):
        moved = float(jnp.linalg.norm(b - c))
        gap = float(jnp.linalg.norm(a - b))
        assert moved and gap <= LIMITS.get(name, tolerances.ADAM_MINI_RTOL) * max(
            moved, float(jnp.linalg.norm(c))
        ), path


def test_layers_that_a_scan_of_flax_stacks():
    """On axis 0 or 1, with the names of nn.scan or in its boxes."""
    nn = pytest.importorskip("flax.linen")
    named = {nn.PARTITION_NAME: "layers"}

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = nn.LayerNorm(name="LayerNorm_0")(x)
            attend = nn.MultiHeadDotProductAttention(HEADS, qkv_features=WIDTH, name="attn")
            return x + attend(y), None

    class Model(nn.Module):
        axis: int

        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                Layer, variable_axes={"params": self.axis}, split_rngs={"params": True},
                length=LAYERS, metadata_params=named,
            )  # fmt: skip
            return scanned()(x, None)[0]

    x = jnp.zeros((2, 5, WIDTH))
    shapes = lambda module, *args: jax.eval_shape(  # noqa: E731
        module.init, jax.random.key(0), x, *args
    )["params"]
    apart = shapes(Layer(), None)
    for axis, name in itertools.product((0, 1), ("flash_muon", "flash_factored_adamw", *MINI)):
        plans = {p.path.partition("/")[2]: p for p in made(name).engine.plans(shapes(Model(axis)))}
        for plan in made(name).engine.plans(apart):
            other = plans[plan.path]
            assert (other.matrices is None) == (plan.matrices is None), plan.path
            assert [s.codec for s in other.slots] == [s.codec for s in plan.slots], plan.path
            if plan.block is not None:
                values = plan.block.values(plan.shape)
                assert other.block.values(other.shape) == LAYERS * values, plan.path


def test_axes_that_a_user_names_are_used():
    """Biases as matrices, and stacks as they lie, if dimension numbers say so."""
    stacked, _ = both("qwen2")
    axes = jax.tree.map(lambda p: optax.contrib.MuonDimensionNumbers() if p.ndim == 2 else None,
                        stacked)  # fmt: skip
    for given in (axes, lambda params: axes):
        tx = lowmem.flash_muon(1e-2, muon_weight_dimension_numbers=given)
        found = {plan.path for plan in tx.engine.plans(stacked) if plan.matrices is not None}
        assert "layers/input_norm/scale" in found and "layers/mlp/up_proj/kernel" not in found
    mask = jax.tree.map(lambda p: p.ndim == 2, stacked)
    tx = lowmem.flash_adamw(1e-2, mask=mask)
    assert [plan.decays for plan in tx.engine.plans(stacked)] == jax.tree.leaves(mask)


def test_what_no_name_tells_is_as_in_optax():
    """A matrix has two dimensions; a `b` is a bias only beside a larger `w`."""
    shapes = {"a": (6, 4), "b": (4, 6), "odd": (3, 4, 5), "vector": (7,), "scalar": (),
              "haiku/w": (3, 6, 4), "haiku/b": (3, 4)}  # fmt: skip
    tree = nested({path: jnp.ones(shape) for path, shape in shapes.items()})
    plans = {p.path: p for p in lowmem.flash_muon(1e-2).engine.plans(tree)}
    assert {path for path, p in plans.items() if p.matrices is not None} == {"a", "b", "haiku/w"}
    assert plans["haiku/w"].matrices.fans((3, 6, 4)) == (6, 4)


def test_there_is_one_default_of_the_size_to_factor():
    tree = {"w": jnp.ones((128, 128)), "small": jnp.ones((127, 128))}
    record = lowmem.OPTIMIZERS["flash_factored_adamw"]
    for make in (record.make, record.plain, lowmem.flash_factored_adamw):
        blocks = {p.path: p.block for p in make(1e-3).engine.plans(tree)}
        assert isinstance(blocks["w"], Factors) and blocks["small"].elementwise
    blocks = {p.path: p.block for p in record.scale_by().engine.plans(tree)}
    assert isinstance(blocks["w"], Factors) and blocks["small"].elementwise


def test_layers_are_never_rows():
    """Not even if there are more layers than a kernel has rows."""
    tree = {"layers": {"up": {"kernel": jnp.ones((200, 128, 160)), "bias": jnp.ones((200, 160))}}}
    text = str(lowmem.explain(lowmem.flash_factored_adamw(1e-3), tree))
    assert "of axes 1 and 2, its largest; axis 0 is stacked by 'layers'" in text
    state = lowmem.flash_factored_adamw(1e-3).init(tree)
    assert state.nu["layers"]["up"]["kernel"].shape == (200, 128 + 160)
    assert state.nu["layers"]["up"]["bias"].shape == (200, 160)
    with pytest.warns(UserWarning, match="fewer than two axes of each layer have size 128"):
        lowmem.flash_factored_adamw(1e-3).init(
            {"layers": {"up": {"kernel": jnp.ones((200, 64, 160)), "bias": jnp.ones((200, 160))}}}
        )


@pytest.mark.parametrize("compress", [False, True], ids=["flash_adamw", "compress_state"])
def test_the_policy_counts_the_elements_of_a_layer(compress):
    policy = lowmem.Policy(min_size=100)
    tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(policy=policy))
    if compress:
        tx = lowmem.compress_state(optax.adamw(1e-3), policy=policy, mu="int8", nu="int8")
    layers = {"up": {"kernel": jnp.ones((4, 10, 10)), "bias": jnp.ones((4, 30))}}
    outside = jnp.ones(120)
    decisions = lowmem.explain(tx, {"layers": layers, "vector": outside}).decisions
    found = {(d.path, d.slot): d for d in decisions if d.slot in ("mu", "nu")}
    for slot in ("mu", "nu"):
        assert found["layers/up/kernel", slot].codec and found["vector", slot].codec
        reason = found["layers/up/bias", slot].reason
        assert reason == "30 elements of each layer, fewer than min_size=100"


def test_decay_mask():
    stacked, apart = both("gpt")
    for tree in (stacked, apart):
        mask = lowmem.blocks.decay_mask(tree)
        assert jax.tree.structure(mask) == jax.tree.structure(tree)
        for path, decays in jax.tree_util.tree_leaves_with_path(mask):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            assert decays is not is_vector(name), name
    wanted = jax.tree.map(lambda p: p.ndim > 1, apart)
    assert lowmem.blocks.decay_mask(apart) == wanted
    plans = lowmem.flash_adamw(1e-3, mask=lowmem.blocks.decay_mask).engine.plans(stacked)
    assert {plan.path for plan in plans if not plan.decays} == {
        "norm/scale", "layers/norm1/scale", "layers/norm1/bias", "layers/norm2/scale",
        "layers/attention/qkv/bias", "layers/up/bias"}  # fmt: skip


def test_stacked_layers_of_muon_go_to_optax_and_back():
    stacked, _ = both("qwen2")
    tx = lowmem.flash_muon(1e-2, storage=lowmem.Storage.exact())
    params, state = lowmem.init(tx, stacked, jnp.bfloat16)
    masters, plain = lowmem.checkpoint.to_optax(tx, state, params)
    back, again = lowmem.checkpoint.from_optax(tx, plain, masters)
    jax.tree.map(np.testing.assert_array_equal, (params, state.mu), (back, again.mu))


def test_nodes_that_are_not_hashable():
    class Box:
        def __init__(self, values):
            self.values = values

    jax.tree_util.register_pytree_with_keys(
        Box,
        lambda box: (
            [(jax.tree_util.DictKey(k), v) for k, v in box.values.items()],
            list(box.values),
        ),
        lambda names, values: Box(dict(zip(names, values, strict=True))),
    )
    tree = {"layers": Box({"kernel": jnp.ones((3, 8, 8)), "bias": jnp.ones((3, 8))})}
    assert jax.tree.leaves(lowmem.blocks.decay_mask(tree)) == [True, False]
