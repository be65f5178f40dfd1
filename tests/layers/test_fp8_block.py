"""Fp8LlamaBlock and the modules of the FP8 flow: gradients, bytes kept, transformations, meshes."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import tolerances as tol
from tests.compilation import SAME_BITS

pytest.importorskip("flax")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

import optax_lowmem as lowmem  # noqa: E402
from optax_lowmem import layers  # noqa: E402
from optax_lowmem._src.layers import quantized_matmul  # noqa: E402
from optax_lowmem.layers import fp8_flow  # noqa: E402
from optax_lowmem.layers.fp8_flow import Recipe  # noqa: E402
from tests.tiers import rows

jitted = functools.partial(jax.jit, compiler_options=SAME_BITS)
LEAN = Recipe(storage="bf16")
BATCH, LENGTH, WIDTH, HIDDEN, HEADS = 2, 16, 48, 128, 4
SHAPES = {
    "input_norm/scale": (WIDTH,),
    "post_attention_norm/scale": (WIDTH,),
    **{f"self_attn/{name}_proj/kernel": (WIDTH, WIDTH) for name in "qo"},
    **{f"self_attn/{name}_proj/kernel": (WIDTH, WIDTH // 2) for name in "kv"},
    "mlp/gate_proj/kernel": (WIDTH, HIDDEN),
    "mlp/up_proj/kernel": (WIDTH, HIDDEN),
    "mlp/down_proj/kernel": (HIDDEN, WIDTH),
}


def make(recipe=Recipe(), dtype=jnp.float32, seed=0, to=None, **more):  # noqa: B008 (frozen)
    """(function of parameters and input, parameters)."""
    more = {"kv_heads": HEADS // 2} | more
    block = layers.Fp8LlamaBlock(
        WIDTH, HIDDEN, HEADS, recipe=recipe, param_dtype=dtype, rngs=nnx.Rngs(seed), **more
    )
    if to is not None:
        block = layers.convert(block, to=to)
    graph, state = nnx.split(block)
    return lambda params, x: nnx.merge(graph, params)(x), nnx.to_pure_dict(state)


def drawn(dtype=jnp.float32, seed=1, shape=(BATCH, LENGTH, WIDTH)):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def gradients(block, params, x):
    """Output, and gradients of sum(sin(y)) of parameters and input."""

    def step(params, x):
        y, pull = jax.vjp(block, params, x)
        return y, *pull(jnp.cos(y.astype(jnp.float32)).astype(y.dtype))

    return jitted(step)(params, x)


def distance(found, want):
    """Largest over the arrays of two trees of |found - want| / |want|."""
    assert jax.tree.structure(found) == jax.tree.structure(want)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True)
    pairs = [(np.float64(a), np.float64(b)) for a, b in pairs]
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)


# ---- against a block without codes ---------------------------------------------------------------
def straight_through(x, to):
    return x + jax.lax.stop_gradient(to(x) - x)


def of_tensor(x):
    codes, scales = quantized_matmul.quantize(x, None, quantized_matmul.E4M3)
    return codes.astype(jnp.float32) * scales


def same(x):
    return x


def plain_block(of_group=same, of_tensor=same):
    """Autodiff's gradients of the block, with something in place of each quantization."""
    group, tensor = (functools.partial(straight_through, to=to) for to in (of_group, of_tensor))

    def norm(x, scale):
        x = group(x)
        return (
            x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale.reshape(1, 1, -1)
        )

    def times(x, w):  # the gradient of x is of W, not of its codes
        return x @ w + jax.lax.stop_gradient(x @ (of_tensor(w) - w))

    def rotated(x):
        angle = 10_000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
        angle = jnp.arange(LENGTH)[:, None] * angle[None]
        turn = jnp.exp(1j * angle)[None, :, None]
        a, b = jnp.split(x, 2, -1)
        found = (a + 1j * b) * turn
        return jnp.concatenate([found.real, found.imag], -1)

    def block(params, x):
        attn, mlp = params["self_attn"], params["mlp"]
        n = tensor(norm(x, params["input_norm"]["scale"]))
        q, k, v = (times(n, attn[f"{name}_proj"]["kernel"]) for name in "qkv")
        q, k, v = (a.reshape(BATCH, LENGTH, -1, WIDTH // HEADS) for a in (q, k, v))
        mixed = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + times(tensor(mixed.reshape(x.shape)), attn["o_proj"]["kernel"])
        n = tensor(norm(x, params["post_attention_norm"]["scale"]))
        gate, up = (group(times(n, mlp[f"{name}_proj"]["kernel"])) for name in ("gate", "up"))
        return x + times(tensor(jax.nn.silu(gate) * up), mlp["down_proj"]["kernel"])

    return block


@pytest.mark.parametrize("size", rows([4, 64], [4]))
def test_gradients_are_straight_through(size):
    """Autodiff of the block with x + stop_gradient(Q(x) - x) wherever codes are kept."""
    recipe = Recipe(group_size=size, exact=False, input_gradient="bf16", weight_gradient="bf16")
    mine, params = make(recipe)
    theirs = plain_block(lambda x: fp8_flow.restore(fp8_flow.store(x, size), size), of_tensor)
    x = drawn()
    found, want = gradients(mine, params, x), gradients(theirs, params, x)
    assert distance(found, want) < tol.FLIPPED_CODES


@pytest.mark.full
def test_numbers_are_near_those_of_an_ordinary_block():
    """Exact forward passes are nearer; bf16 gradients nearer still; all within E4M3's noise."""
    x = drawn()
    _, params = make()
    want = gradients(plain_block(), params, x)
    recipes = {
        "paper": Recipe.paper(),
        "ours": Recipe(),
        "bf16": Recipe(input_gradient="bf16", weight_gradient="bf16"),
    }
    far = {}
    for name, recipe in recipes.items():
        y, *grads = gradients(make(recipe)[0], params, x)
        far[name] = distance(y, want[0]), distance(grads, list(want[1:]))
    assert 0 < far["ours"][0] < far["paper"][0] < 0.06
    assert 0 < far["bf16"][1] < far["ours"][1] < far["paper"][1] < 0.3


def test_parameters_are_those_of_a_llama():
    _, params = make()
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert found == SHAPES


def test_spikes_and_zero_tokens():
    block, params = make()
    x = drawn().at[:, :, 5].set(1e6).at[0, 3].set(0)
    found = gradients(block, params, x)
    want = gradients(plain_block(), params, x)
    assert all(jnp.isfinite(a).all() for a in jax.tree.leaves(found))
    off = jnp.abs(found[0] - want[0])
    assert (off[0, 3] == 0).all() or off[0, 3].max() < 0.1 * jnp.abs(want[0][0, 3]).max() + 1e-6
    # the block adds to x, whose spike passes: what is added is bounded as without it
    added = jnp.abs(want[0] - x)
    assert off.max() <= 0.25 * added.max()


def test_cached_maxima():
    block = layers.Fp8LlamaBlock(WIDTH, HIDDEN, HEADS, rngs=nnx.Rngs(0))
    x, maxima = drawn(), block.weight_maxima()
    run = jitted(lambda x, maxima: block(x, maxima))
    np.testing.assert_array_equal(run(x, maxima), run(x, None))
    stacked = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    stacked = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), stacked)
    found = fp8_flow.weight_maxima(stacked)
    for one, two in zip(jax.tree.leaves(maxima), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(jnp.stack([one, 2 * one]), two)


def test_weights_quantized_before():
    """Codes of the block's and of stacked parameters."""
    block = layers.Fp8LlamaBlock(WIDTH, HIDDEN, HEADS, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, params = nnx.split(block)
    x = drawn(jnp.bfloat16)
    run = jitted(lambda x, params, codes: nnx.merge(graph, params)(x, codes=codes))
    codes = jitted(layers.Fp8LlamaBlock.quantized_weights)(block)
    want = run(x, params, None)
    np.testing.assert_array_equal(run(x, params, codes), want)
    kernels = sum(w.size for w in jax.tree.leaves(params) if w.ndim == 2)
    assert sum(a.nbytes for a in jax.tree.leaves(codes)) == 2 * kernels + 7 * 4  # and scales
    stacked = jax.tree.map(lambda w: jnp.stack([2 * w, w]), nnx.to_pure_dict(params))
    found = jitted(fp8_flow.quantized_weights)(stacked)
    for two, one in zip(jax.tree.leaves(found), jax.tree.leaves(codes), strict=True):
        np.testing.assert_array_equal(two[1], one)
    # nothing else of a kernel is read
    zeros = jax.tree.map(lambda w: 0 * w if w.ndim == 2 else w, params)
    np.testing.assert_array_equal(run(x, zeros, codes), want)


def made_in_scans(jaxpr, primitive, inside=False):
    """Shapes of the FP8 arrays that a primitive makes in the bodies of a program's scans."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if inside and name == primitive:
            made = (var.aval for var in equation.outvars)
            yield from (array.shape for array in made if array.dtype == jnp.float8_e4m3fn)
        for part in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns")):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield from made_in_scans(part, primitive, inside or name == "scan")


@pytest.mark.parametrize("remat", rows([False, True], [True]))
def test_weights_are_quantized_once_for_all_micro_batches(remat):
    """No kernel is rounded among the micro-batches, and no bit of the gradients is another."""
    block, params = make(kv_heads=HEADS)
    graph = nnx.graphdef(layers.Fp8LlamaBlock(WIDTH, HIDDEN, HEADS, rngs=nnx.Rngs(0)))

    def loss(params, x, codes=None):
        def layer(x, given):
            own, codes = given
            return nnx.merge(graph, own)(x, codes=codes), None

        layer = jax.checkpoint(layer) if remat else layer
        return jnp.mean(jnp.sin(jax.lax.scan(layer, x, (params, codes))[0]))

    stacked = jax.tree.map(lambda w: jnp.stack([w, w[::-1]]), params)
    batch = drawn(shape=(2 * BATCH, LENGTH, WIDTH))
    anew = lowmem.value_and_grad(loss, 2)
    once = lowmem.value_and_grad(loss, 2, fp8_flow.quantized_weights)
    kernels = {(WIDTH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)}
    traced = [jax.make_jaxpr(f)(stacked, batch, 0).jaxpr for f in (anew, once)]
    of_kernels = [
        sum(shape in kernels for shape in made_in_scans(jaxpr, "convert_element_type"))
        for jaxpr in traced
    ]
    # for both products, and for the first of them again where it is computed anew; the codes of
    # stacked kernels are made in scans over the layers, before
    assert of_kernels == [7 * (3 if remat else 2), 7 * 2]
    # nor are codes that are given copied for the backward pass, as those of activations are
    kept = [shape[1:] for shape in made_in_scans(traced[1], "scan")]
    assert (BATCH, LENGTH, WIDTH) in kept or remat
    assert not kernels & set(kept)
    if remat:
        return  # the same bits as without: one compilation less
    found, want = (jitted(f)(stacked, batch, 3) for f in (once, anew))
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("arguments,message", [((30, 8, 4), "divide"), ((8, 8, 4, 3), "kv_heads")])
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        layers.Fp8LlamaBlock(*arguments, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="xla, cudnn, got 'flash'"):
        layers.Fp8LlamaBlock(8, 8, 2, attention="flash", rngs=nnx.Rngs(0))


# ---- bytes ---------------------------------------------------------------------------------------
PAPER_UNITS = 13.4  # Done when: Table 2 has 13.33
SCALES = 0.125


def flash_attention(q, k, v, **options):
    """Keeps what cuDNN's attention does: queries, keys, values and the output."""

    @jax.custom_vjp
    def run(q, k, v):
        return (q + k + v) / 3

    run.defvjp(lambda *x: ((y := run(*x)), (*x, y)), lambda saved, g: (g + saved[3],) * 3)
    return run(q, k, v)


def report_of_llama(recipe, attention, block=None, dtype=jnp.bfloat16):
    """The report of a layer as the paper counts it: an MLP of 8/3 the width, in U."""
    shape = 4, 2048, 3072
    how = dict(attention=attention, recipe=recipe, param_dtype=dtype)
    make = functools.partial(layers.Fp8LlamaBlock, shape[-1], 8192, 24, **how)
    graph, params = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    block = block or (lambda params, x: nnx.merge(graph, params)(x))
    x = jax.ShapeDtypeStruct(shape, dtype)
    with pytest.MonkeyPatch.context() as patch:
        if attention == "cudnn":
            patch.setattr(jax.nn, "dot_product_attention", flash_attention)
        return lowmem.memory.activation_report(
            block, nnx.to_pure_dict(params), x, weights=0, unit=2 * x.size
        )


@pytest.mark.parametrize("attention,codes", [("xla", 9.5), ("cudnn", 10.0)])
def test_units_of_a_llama_layer(attention, codes):
    """Done when 1: codes, and scales of 12.5 % on those of groups; q, k and v in 16 bits."""
    report = report_of_llama(Recipe(), attention)
    groups = 2 * 0.5 + 2 * 8192 / 3072 / 2
    units = report.total_bytes / report.unit
    assert units == pytest.approx(codes + SCALES * groups, abs=1e-6)
    assert units <= PAPER_UNITS + SCALES * groups
    in_bf16 = sum(a.bytes for a in report.activations if a.dtype == jnp.bfloat16) / report.unit
    assert in_bf16 == (3 if attention == "xla" else 4)  # of attention alone
    kinds = {jnp.dtype(a.dtype).name for a in report.activations}
    assert kinds == {"bfloat16", "float8_e4m3fn", "uint16", "float32"}
    scalars = [a for a in report.activations if a.dtype == jnp.float32]
    assert all(a.bytes == 4 for a in scalars)
    assert report.of_weights_bytes == 7 * 8  # the kernels' maxima and scales


@pytest.mark.parametrize("recipe", rows([Recipe(), LEAN], [LEAN]), ids=["fp8", "lean"])
def test_what_a_compiled_scan_stacks(recipe):
    """The forward loop's stacks, an array a step: those of the report, and no others.

    (The temporaries of XLA's CPU backend say less: it widens whole stacks before the way back.)
    """
    block, params = make(recipe, jnp.bfloat16, kv_heads=HEADS)
    shape = (BATCH, 8 * LENGTH, WIDTH)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def loss(params, x):
        found, _ = jax.lax.scan(lambda x, own: (block(own, x), None), x, params)
        return found.astype(jnp.float32).sum()

    stacked = jax.tree.map(lambda w: jax.ShapeDtypeStruct((5, *w.shape), w.dtype), params)
    text = jax.jit(jax.grad(loss)).lower(stacked, x).compile().as_text()
    forward = re.search(r"= \((.*?)\) while\(", text).group(1)
    sizes = {"bf16": 2, "f8e4m3fn": 1, "u16": 2}
    found = collections.Counter()
    for kind, dims in re.findall(r"(\w+)\[([\d,]+)\]", forward):
        numbers = [int(n) for n in dims.split(",")]
        if numbers[:2] == [5, BATCH]:
            found[kind] += sizes[kind] * math.prod(numbers[1:])
    report = lowmem.memory.activation_report(block, params, x, weights=0, unit=2 * x.size)
    wanted = collections.Counter()
    for one in report.activations:
        name = {"bfloat16": "bf16", "uint16": "u16", "float8_e4m3fn": "f8e4m3fn"}
        if one.dtype != jnp.float32:  # scales of tensors
            wanted[name[jnp.dtype(one.dtype).name]] += one.bytes
    assert found == wanted
    limit = PAPER_UNITS + SCALES * (1 + 8 / 3)
    assert set(found) == {"bf16"} if recipe is LEAN else found.total() <= limit * report.unit


# ---- transformations -----------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "dtype", "limit"),
    rows(
        [(Recipe(), "float32", tol.FLIPPED_CODES), (LEAN, "bfloat16", tol.RECOMPUTED["bfloat16"])],
        [(Recipe(), "float32", tol.FLIPPED_CODES)],
    ),
)
def test_scan_remat_and_vmap(recipe, dtype, limit):
    block, params = make(recipe, jnp.dtype(dtype), kv_heads=HEADS)
    x = drawn(dtype)
    y, of_params, of_x = gradients(block, params, x)
    again = gradients(jax.checkpoint(block), params, x)
    assert distance(again, (y, of_params, of_x)) < limit
    stacked = jax.tree.map(lambda w: w[None], params)

    def scanned(params, x):
        return jax.lax.scan(lambda x, own: (block(own, x), None), x, params)[0]

    found = gradients(scanned, stacked, x)
    want = y, jax.tree.map(lambda w: w[None], of_params), of_x
    assert distance(found, want) < limit
    both = jnp.stack([x, 100 * x[::-1]])
    found = jitted(jax.vmap(block, (None, 0)))(params, both)
    for one, given in zip(found, both, strict=True):  # scales of its own each
        assert distance(one, jitted(block)(params, given)) < limit


SPECS = {
    "data": (P("d"), lambda path: P()),
    "fsdp": (P("d"), lambda path: P("d") if "kernel" in path else P()),
    "tensor": (P(), lambda path: _columns_or_rows(path)),
}


def _columns_or_rows(path):
    if "o_proj" in path or "down_proj" in path:
        return P("d")
    return P(None, "d") if "kernel" in path else P()


@pytest.mark.parametrize("layout", rows(SPECS, list(SPECS)[:1]))
def test_on_a_mesh(layout):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:8])
    block, params = make(kv_heads=HEADS)
    x = drawn(shape=(8, LENGTH, WIDTH))
    of_x, of = SPECS[layout]
    places = jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, of(jax.tree_util.keystr(path))), params
    )
    there = jax.device_put(params, places), jax.device_put(x, NamedSharding(mesh, of_x))
    found = jax.tree.map(np.asarray, gradients(block, *there))
    want = jax.tree.map(np.asarray, gradients(block, params, x))
    assert distance(found, want) < tol.FLIPPED_CODES


@pytest.mark.parametrize("cut", rows([P("d"), P(None, "d")], [P("d")]))
def test_explicit_axes(cut):
    kind = (AxisType.Explicit,)
    mesh = jax.make_mesh((8,), ("d",), axis_types=kind, devices=jax.devices("cpu")[:8])
    x, w, g = (np.asarray(drawn(shape=s)) for s in ((64, 32), (32, 128), (64, 128)))
    scale = np.ones(32, np.float32)

    def step(x, scale, w, g):
        y, pull = jax.vjp(lambda *a: fp8_flow.linear(fp8_flow.rms_norm(*a[:2]), a[2]), x, scale, w)
        return y, *pull(g)

    want = jitted(step)(x, scale, w, g)
    with jax.set_mesh(mesh):
        of_g, of_w = (P("d"), P()) if cut == P("d") else (cut, cut)
        of_x = P("d") if cut == P("d") else P()
        specs = (of_x, P(), of_w, of_g)
        placed = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip((x, scale, w, g), specs, strict=True)
        ]
        found = jitted(step)(*placed)
        assert jax.typeof(found[1]).sharding.spec == jax.typeof(placed[0]).sharding.spec
        assert jax.typeof(found[3]).sharding.spec == jax.typeof(placed[2]).sharding.spec
    found, want = (jax.tree.map(np.asarray, list(one)) for one in (found, want))
    assert distance(found, want) < tol.FLIPPED_CODES


# ---- modules -------------------------------------------------------------------------------------
class Dense(nn.Module):
    """A pre-norm MLP of Linen."""

    recipe: Recipe = Recipe()

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(layers.Fp8Dense, recipe=self.recipe)
        n = fp8_flow.linen.Fp8LayerNorm(recipe=self.recipe)(x)
        gate, up = dense(32)(n), dense(32)(n)
        h = fp8_flow.linen.Fp8GatedProduct("gelu", recipe=self.recipe)(gate, up)
        return x + dense(16)(h)


class Linear(nnx.Module):
    """The same of NNX."""

    def __init__(self, rngs, recipe=Recipe()):  # noqa: B008 (frozen)
        make = functools.partial(layers.Fp8Linear, recipe=recipe, rngs=rngs)
        self.norm = layers.Fp8LayerNorm(16, recipe=recipe)
        self.gate, self.up, self.down = make(16, 32), make(16, 32), make(32, 16)
        self.product = layers.Fp8GatedProduct("gelu", recipe=recipe)

    def __call__(self, x):
        n = self.norm(x)
        return x + self.down(self.product(self.gate(n), self.up(n)))


OF_LINEN = {"Fp8LayerNorm_0": "norm"} | {
    f"Fp8Dense_{i}": name for i, name in enumerate(("gate", "up", "down"))
}


def test_linen_and_nnx_are_the_same_layers():
    x = drawn(shape=(3, 16))
    model = Linear(nnx.Rngs(0))
    graph, state = nnx.split(model)
    params = nnx.to_pure_dict(state)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(Dense().init, jax.random.key(0), x))["params"]
    assert shapes == {one: jax.tree.map(jnp.shape, params[two]) for one, two in OF_LINEN.items()}
    variables = {"params": {one: params[two] for one, two in OF_LINEN.items()}}
    want = jitted(lambda params, x: nnx.merge(graph, params)(x))(params, x)
    np.testing.assert_array_equal(jitted(Dense().apply)(variables, x), want)


def test_modules_take_codes_of_their_kernels():
    """Those of twice the kernel have twice the product; the bias is added to it."""
    x, model = drawn(shape=(3, 16)), layers.Fp8Linear(16, 32, rngs=nnx.Rngs(0))
    kernel, bias = model.kernel[...], 1 + drawn(shape=(32,))
    model.bias[...] = bias
    codes = fp8_flow.quantize_weight(2 * kernel)
    want = fp8_flow.Projection(2 * kernel)(x)
    np.testing.assert_array_equal(fp8_flow.Projection(kernel, kernel_codes=codes)(x), want)
    np.testing.assert_array_equal(model(x, codes=codes), want + bias[None])
    params = {"params": {"kernel": kernel, "bias": bias}}
    found = layers.Fp8Dense(32).apply(params, x, codes=codes)
    np.testing.assert_array_equal(found, want + bias[None])


def test_modules_in_a_row():
    x = drawn(shape=(3, 16))
    norm, linear = layers.Fp8RMSNorm(16), layers.Fp8Linear(16, 8, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(nnx.Sequential(norm, linear)(x), linear(norm(x)))
    model = nn.Sequential([fp8_flow.linen.Fp8RMSNorm(), layers.Fp8Dense(8)])
    assert model.init_with_output(jax.random.key(0), x)[0].shape == (3, 8)


def test_dtypes_of_modules():
    x = drawn(jnp.bfloat16, shape=(3, 16))
    norm = layers.Fp8RMSNorm(16)
    assert norm(x).value.dtype == jnp.bfloat16  # unlike nnx.RMSNorm's, whose scale makes it f32
    assert layers.Fp8RMSNorm(16, dtype=jnp.float32)(x).value.dtype == jnp.float32
    linear = layers.Fp8Linear(16, 8, rngs=nnx.Rngs(0))
    assert linear(norm(x)).dtype == jnp.bfloat16
    assert linear(x).dtype == jnp.float32 == nnx.Linear(16, 8, rngs=nnx.Rngs(0))(x).dtype
    other = dict(dtype=jnp.bfloat16, preferred_element_type=jnp.float32)
    assert layers.Fp8Linear(16, 8, rngs=nnx.Rngs(0), **other)(x).dtype == jnp.float32
    assert fp8_flow.linen.Fp8RMSNorm().init_with_output(jax.random.key(0), x)[0].value.dtype == (
        jnp.bfloat16
    )


def test_a_model_that_exists():
    """`convert` puts these products in other layers, and others in these."""
    model = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.relu)
    mine = layers.convert(model, to=functools.partial(layers.Fp8Linear, recipe=Recipe.paper()))
    x = drawn(shape=(3, 16))
    assert 0 < distance(mine(x), model(x)) < 0.1
    assert mine.layers[0].recipe == Recipe.paper()
    back = layers.convert(mine, to=layers.switchback_dot_general("standard"))
    assert back.layers[0].dot_general is jax.lax.dot_general
    other = layers.convert(mine, to=layers.switchback_dot_general("switchback", "int8"))
    assert not other.layers[0].takes_codes
    kernel, bias = (model.layers[0].kernel[...], model.layers[0].bias[...])
    dims = (((1,), (0,)), ((), ()))
    want = layers.switchback_dot_general("switchback", "int8")(x, kernel, dims) + bias[None]
    np.testing.assert_array_equal(other.layers[0](x), want)
    dense = layers.Fp8Dense(8, dot_general=layers.switchback_dot_general("switchback", "int8"))
    params = {"params": {"kernel": kernel, "bias": bias}}
    np.testing.assert_array_equal(dense.apply(params, fp8_flow.code(x)), want)
