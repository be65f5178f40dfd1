"""Gradient release of a loss function: cut into stages, with the results of the ordinary step."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem import release
from optax_lowmem._src.training.release.trace import trace
from tests.compilation import SAME_BITS
from tests.contract_cases import POLICY, assert_alike, assert_same
from tests.step.test_release import (
    LAYERS,
    MODEL,
    WIDTH,
    WORDS,
    batches,
    block,
    embed,
    loss,
    make,
    masters,
    row,
    run,
)
from tests.tiers import rows


def listed():
    """The parameters with a list of layers."""
    params = masters()
    leaves, treedef = jax.tree.flatten(params["layers"])
    return {**params, "layers": [treedef.unflatten(own) for own in zip(*leaves, strict=True)]}


def scan(layer, x, *xs):
    return jax.lax.scan(layer, x, xs)[0]


# ---- losses as users write them ------------------------------------------------------------------
def plain(params, batch):
    x = scan(
        jax.checkpoint(lambda x, xs: (block(xs[0], params, x, batch), None)),
        embed(params, batch),
        params["layers"],
    )
    return loss(params, x, batch)


def under_jit_in_bfloat16(params, batch):
    """Casts before calls of compiled functions, and a mask that no parameter determines."""
    layers = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["layers"])
    params = {**params, "layers": layers}
    mask = (batch["tokens"] > 2)[..., None]

    @jax.jit
    @jax.checkpoint
    def forward(params, mask):
        def layer(x, xs):
            return jnp.where(mask, block(xs[0], params, x, batch), x), None

        return scan(layer, embed(params, batch), params["layers"])

    return loss(params, forward(params, mask), batch)


def with_all_kinds_of_values(params, batch):
    """In a layer: of its index, of a key, of another layer's parameter, of the first stage."""
    first = embed(params, batch)
    rates = jnp.outer(jnp.arange(LAYERS), first.mean((0, 1)))
    keys = jax.random.split(jax.random.key(batch["targets"].sum()), LAYERS)

    def layer(carry, xs):
        x, total = carry
        own, index, key, rate = xs
        h = block(own, params, x, batch) + first * row(rate) + index
        h = jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h, 0)
        return (h, total + jnp.mean(h.astype(jnp.float32) ** 2)), (index * 2, h)

    numbers = jnp.arange(LAYERS, dtype=first.dtype) / 8
    weight = jnp.cos(batch["targets"].sum())
    jax.debug.callback(lambda _: None, weight)
    carry = first, jnp.float32(0)
    (x, total), (twice, _) = jax.lax.scan(layer, carry, (params["layers"], numbers, keys, rates))
    return loss(params, x + first, batch) + weight * total, {
        "twice": twice,
        "x": x.mean(),
        "one": 1,
    }


def one_scan_after_another(params, batch):
    x = scan(lambda x, xs: (block(xs[0], params, x, batch), None), embed(params, batch),
             params["layers"])  # fmt: skip
    x = scan(lambda x, xs: (x + jnp.tanh(x * row(xs[0])), None), x, params["late"])
    return loss(params, x, batch)


def in_a_list(params, batch):
    x = embed(params, batch)
    for own in params["layers"]:
        x = block(own, params, x, batch)
    return loss(params, x, batch)


def in_a_list_of_unequal_layers(params, batch):
    """Scaled before, not in order, one applied twice, with connections that skip and a penalty."""
    params = jax.tree.map(lambda w: w * 1.5, params)
    x = first = embed(params, batch)
    penalty = sum(jnp.sum(w.astype(jnp.float32) ** 2) for w in jax.tree.leaves(params["layers"]))
    late, early, middle = params["layers"]
    x = block(early, params, x, batch)
    x = saved = x + jnp.tanh(x @ middle["w"])
    x = jax.checkpoint(block, static_argnums=3)(late, params, x, None) + first
    x = block(early, params, x, batch)
    return loss(params, x + saved, batch) + 1e-3 * penalty, x.mean()


def a_scan_then_a_list(params, batch):
    x = scan(
        lambda x, xs: (x + jnp.tanh(x * row(xs[0])), None), embed(params, batch), params["late"]
    )
    for own in params["layers"]:
        x = block(own, params, x, batch)
    return loss(params, x, batch)


def late(params):
    rng = np.random.default_rng(3)
    return {**params, "late": jnp.asarray(rng.normal(0, 0.2, (2, WIDTH)), jnp.float32)}


def unequal():
    params = listed()
    params["layers"][2] = {"w": params["layers"][2]["w1"][:, :WIDTH]}
    return params


LOSSES = {  # the loss, its parameters, arguments of train_step, stages between first and last
    "scan": (plain, masters, {}, 1),
    "jit": (under_jit_in_bfloat16, masters, {}, 1),
    "scans": (one_scan_after_another, lambda: late(masters()), {"layers": ["layers", "late"]}, 3),
    "list": (in_a_list, listed, {"layers": "layers"}, LAYERS),
    "members": (in_a_list, listed, {"layers": "layers/*"}, LAYERS),
    "both": (
        a_scan_then_a_list,
        lambda: late(listed()),
        {"layers": ["late", "layers"]},
        1 + LAYERS,
    ),
}
SEVERAL_USES = {
    "values": (with_all_kinds_of_values, masters, {"has_aux": True}, 1),
    "unequal": (in_a_list_of_unequal_layers, unequal, {"layers": "layers", "has_aux": True}, 3),
}


@pytest.mark.parametrize("case", rows(list(LOSSES), ["jit", "both"]))
def test_it_is_the_ordinary_step(case):
    loss_fn, make_params, how, stages = LOSSES[case]
    tx = make("flash_sgd")
    start = lowmem.init(tx, make_params(), jnp.float32 if case == "jit" else jnp.bfloat16)

    def ordinary(params, state, batch):
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        return value, *lowmem.step(tx, grads, state, params)

    wanted, found = (
        run(step, *start) for step in (ordinary, release.train_step(tx, loss_fn, **how))
    )
    assert_same(found, wanted)
    program, _ = trace(loss_fn, start[0], batches()[0], how.get("layers", ()))
    assert len(program.layers) == stages


@pytest.mark.parametrize("case", SEVERAL_USES)
def test_gradients_of_what_several_stages_read(case):
    """They are added in another order. With a rate of 1 the step of plain SGD is the gradient."""
    loss_fn, make_params, how, stages = SEVERAL_USES[case]
    params, (batch,) = make_params(), batches()
    tx = lowmem.flash_sgd(1.0)
    step = jax.jit(release.train_step(tx, loss_fn, **how))
    (value, aux), new, _ = step(params, tx.init(params), batch)
    (wanted, wanted_aux), gradients = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(
        params, batch
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), aux, wanted_aux)
    for old, now, g in zip(*map(jax.tree.leaves, (params, new, gradients)), strict=True):
        np.testing.assert_allclose(old - now, g, rtol=1e-5, atol=2e-6)
    program, _ = trace(loss_fn, params, batch, how.get("layers", ()), has_aux=True)
    assert len(program.layers) == stages


def test_a_loss_is_traced_in_every_step():
    """JAX keeps jaxprs by function; a step that is built or called again needs a new one."""
    factor = {"value": 1.0, "read": "shared"}

    def scaled(params, batch):
        return plain(params, batch) * factor["value"]

    def first(rest, batch):
        return embed(rest, batch) + rest[factor["read"]].sum()

    tx, params, (batch,) = lowmem.flash_sgd(1.0), masters(), batches()
    state = tx.init(params)

    def values():
        step = jax.jit(release.train_step(tx, scaled))
        layered = jax.jit(release.train_step(tx, dataclasses.replace(MODEL, first=first)))
        return step(params, state, batch)[0], layered(params, state, batch)[1]["unread"]

    one, unmoved = values()
    factor |= {"value": 2.0, "read": "unread"}
    double, moved = values()
    assert double == 2 * one
    assert jnp.any(moved != params["unread"]) and jnp.all(unmoved == params["unread"])


@pytest.mark.full
def test_layers_of_a_list_are_whole_leaves():
    """Where RMS_t is a mean over a leaf, no per_layer is needed."""
    tx = lowmem.stable_adamw(1e-2, storage=lowmem.Storage(policy=POLICY))
    start = lowmem.init(tx, listed(), jnp.bfloat16)

    def ordinary(params, state, batch):
        value, grads = jax.value_and_grad(in_a_list)(params, batch)
        return value, *lowmem.step(tx, grads, state, params)

    found = run(release.train_step(tx, in_a_list, layers="layers"), *start, steps=1)
    assert_same(found, run(ordinary, *start, steps=1))


def test_one_array_passes_between_layers():
    """And not what a norm makes of it before it reads its scale, nor masks of dropout."""

    def normed(params, batch):
        x = params["embed"][batch["tokens"]]
        key = jax.random.key(batch["targets"].sum())
        for i, own in enumerate(params["layers"]):
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            h = jnp.where(keep, x, 0).astype(jnp.float32)
            h = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True)) * row(own["norm"])
            x = x + jnp.tanh(h.astype(x.dtype) @ own["w1"]) @ own["w2"]
        h = x / jnp.linalg.norm(x)
        return loss(params, h * row(params["shared"][:WIDTH]), batch)

    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), listed())
    (batch,) = batches()
    program, known = trace(normed, params, batch, "layers")
    rest, x = program.parts.rest(), None
    for stage in [program.first, *program.layers.values()]:
        args = (rest, known) if x is None else (None, rest, x, known)
        (x,) = jax.eval_shape(stage, *args)
        assert (x.shape, x.dtype) == ((*batch["tokens"].shape, WIDTH), jnp.bfloat16)
    assert len(program.layers) == LAYERS
    assert max(value.size for value in known) == batch["tokens"].size


@pytest.mark.parametrize("stacked", [True, False])
def test_gradients_of_all_layers_never_exist(stacked):
    """Bytes per parameter of temporaries, as XLA's CPU backend plans them."""
    layers, width = 8, 64

    def layer(x, own):
        return x + jnp.tanh(x @ own["w1"]) @ own["w2"], None

    def loss_fn(params, x):
        if stacked:
            x, _ = jax.lax.scan(layer, x, params["layers"])
        else:
            x = functools.reduce(lambda x, own: layer(x, own)[0], params["layers"], x)
        return jnp.mean(jnp.square((x @ params["head"]).astype(jnp.float32)))

    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    of_one = {"w1": like((width, 4 * width)), "w2": like((4 * width, width))}
    weights = jax.tree.map(lambda w: like((layers, *w.shape)), of_one)
    params = {"layers": weights if stacked else [of_one] * layers, "head": like((width, 8))}
    tx = lowmem.flash_adamw(1e-3)
    state = jax.eval_shape(tx.init, params)

    def ordinary(params, state, x):
        value, grads = jax.value_and_grad(loss_fn)(params, x)
        return value, *lowmem.step(tx, grads, state, params)

    def temporaries(step):
        jitted = jax.jit(step, donate_argnums=(0, 1))
        found = jitted.lower(params, state, like((4, width))).compile().memory_analysis()
        assert found.output_size_in_bytes - found.alias_size_in_bytes <= 2048
        return found.temp_size_in_bytes / sum(math.prod(w.shape) for w in jax.tree.leaves(params))

    released = temporaries(release.train_step(tx, loss_fn, layers="layers"))
    newer = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)
    if newer:  # before, XLA's CPU backend copies stacks, and keeps the gradients of a list
        assert released < 2.5
    if newer or stacked:
        assert released < temporaries(ordinary)


@pytest.mark.full
def test_on_an_auto_mesh():
    """Columns of the layers are sharded, and the batch; sums have another order."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tx, (batch,) = make("flash_sgd"), batches()
    params, state = lowmem.init(tx, listed(), jnp.float32)
    step = jax.jit(release.train_step(tx, in_a_list, layers="layers"))
    wanted = step(params, state, batch)

    def spec(path, x):
        columns = "layers" in str(path) and x.ndim == 2 and x.shape[-1] % 2 == 0
        return NamedSharding(mesh, P(None, "x") if columns else P())

    params, state = (
        jax.device_put(tree, jax.tree_util.tree_map_with_path(spec, tree))
        for tree in (params, state)
    )
    batch = jax.device_put(batch, NamedSharding(mesh, P("x")))
    assert_alike(step(params, state, batch), wanted, steps=3)


# ---- limits --------------------------------------------------------------------------------------
def refusing(body=None, before=lambda w: w, after=lambda value, params: value, **how):
    def loss_fn(params, batch):
        layer = body or (lambda x, own: (block(own, params, x, batch), None))
        stack = jax.tree.map(before, params["layers"])
        x, ys = jax.lax.scan(layer, embed(params, batch), stack, **how)
        return after(loss(params, x, batch), params) + (0 if ys is None else ys.sum())

    return loss_fn


def stacking(params, batch):
    stack = jax.tree.map(lambda *w: jnp.stack(w), *params["layers"])
    return refusing()({**params, "layers": stack}, batch)


def joined(params, batch):
    x = embed(params, batch) @ jnp.concatenate([own["w1"] for own in params["layers"]], 1)
    return loss(params, x[..., :WIDTH], batch)


def twice(params, batch):
    return refusing()(params, batch) + refusing()(params, batch)


def no_layers(params, batch):
    return loss(params, embed(params, batch), batch)


@pytest.mark.parametrize(
    "loss_fn, params, layers, match",
    [
        (no_layers, masters, (), r"no lax.scan .*layers='Block_\*'"),
        (plain, masters, "blocks", r"layers='blocks' is no path in the parameters \(embed"),
        (stacking, listed, "layers", r"'layers/0/norm, .*`(stack|concatenate)` changes"),
        (joined, listed, "layers", "`dot_general` reads .* several layers .layers/0, layers/1"),
        (refusing(before=lambda w: w[::-1]), masters, "layers", r"'layers/norm' on axis 0.*`rev`"),
        (refusing(reverse=True), masters, (), "reverse=True"),
        (
            refusing(after=lambda value, params: value + (params["layers"]["w1"] ** 2).sum()),
            masters,
            (),
            "'layers/w1' is read outside of the scan",
        ),
        (
            refusing(lambda x, own: (x * row(own["norm"]), x.mean())),
            masters,
            (),
            "scan over 'layers/norm.*' returns a value of every layer",
        ),
        (twice, masters, (), "two scans read 'layers/norm'"),
    ],
)  # fmt: skip
def test_losses_that_cannot_be_cut_are_refused(loss_fn, params, layers, match):
    tx = lowmem.flash_lion(1e-3)
    params, state = lowmem.init(tx, params())
    step = release.train_step(tx, loss_fn, layers=layers)
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(step, params, state, batches()[0])


def test_wrong_arguments():
    tx = lowmem.flash_lion(1e-3)
    with pytest.raises(TypeError, match="offload=True takes a release.Layered"):
        release.train_step(tx, plain, offload=True)
    params, state = lowmem.init(tx, masters())
    with pytest.raises(TypeError, match="must return .loss, aux."):
        jax.eval_shape(release.train_step(tx, plain, has_aux=True), params, state, batches()[0])


# ---- Flax ----------------------------------------------------------------------------------------
flax = pytest.importorskip("flax")

import flax.linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

from optax_lowmem.flax import Optimizer  # noqa: E402


def cross_entropy(logits, batch):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        h = nn.tanh(nn.Dense(WIDTH)(nn.LayerNorm()(x))) * mask
        return x + nn.Dropout(0.2, deterministic=False)(h), None


class LinenModel(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, tokens):
        embedding = nn.Embed(WORDS, WIDTH)
        x, mask = embedding(tokens), (tokens > 2)[..., None]
        if self.scanned:
            stack = nn.scan(
                nn.remat(LinenBlock),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=LAYERS,
            )
            x, _ = stack(name="layers")(x, mask)
        else:
            for i in range(LAYERS):
                x, _ = nn.remat(LinenBlock)(name=f"Block_{i}")(x, mask)
        return embedding.attend(nn.LayerNorm()(x))


@pytest.mark.parametrize("scanned", rows([True, False], [True]))
def test_a_linen_model(scanned):
    model, (batch,) = LinenModel(scanned), batches()
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    tx = make("flash_sgd")
    start = lowmem.init(tx, model.init(rngs, batch["tokens"])["params"], jnp.bfloat16)

    def loss_fn(params, batch):
        rngs = {"dropout": jax.random.key(batch["tokens"].sum())}
        return cross_entropy(model.apply({"params": params}, batch["tokens"], rngs=rngs), batch)

    def ordinary(params, state, batch):
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        return value, *lowmem.step(tx, grads, state, params)

    step = release.train_step(tx, loss_fn, layers="layers" if scanned else "Block_*")
    assert_same(run(step, *start, steps=2), run(ordinary, *start, steps=2))


class NnxBlock(nnx.Module):
    def __init__(self, rngs, batch_norm=False):
        self.norm = (nnx.BatchNorm if batch_norm else nnx.LayerNorm)(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x, mask):
        return x + self.dropout(jnp.tanh(self.linear(self.norm(x)))) * mask


class NnxModel(nnx.Module):
    def __init__(self, rngs, scanned, batch_norm=False):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.scanned = scanned
        if scanned:
            vmapped = nnx.vmap(lambda rngs: NnxBlock(rngs, batch_norm), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=LAYERS)(vmapped)(rngs)
        else:
            self.layers = nnx.List([NnxBlock(rngs, batch_norm) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x, mask = self.embed(tokens), (tokens > 2)[..., None]
        if self.scanned:
            scan = nnx.scan(lambda x, layer: layer(x, mask), in_axes=(nnx.Carry, 0),
                            out_axes=nnx.Carry)  # fmt: skip
            x = scan(x, self.layers)
        else:
            for layer in self.layers:
                x = layer(x, mask)
        return self.embed.attend(self.norm(x))


def nnx_loss(model, batch):
    return cross_entropy(model(batch["tokens"]), batch)


def train_nnx(released, steps, **options):
    model = NnxModel(nnx.Rngs(0), **options)
    optimizer = Optimizer(model, make("flash_sgd"), wrt=nnx.Param, dtype=jnp.bfloat16)

    graphdef, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, compiler_options=SAME_BITS)
    def train_step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        if released:
            value = optimizer.release_step(model, nnx_loss, batch, layers="layers")
        else:
            value, grads = nnx.value_and_grad(nnx_loss)(model, batch)
            optimizer.update(model, grads)
        return value, nnx.state((model, optimizer))

    for batch in batches(steps):
        value, state = train_step(state, batch)
    return value, nnx.to_pure_dict(state)


NNX = [(True, False), (False, True)]


@pytest.mark.parametrize("scanned, batch_norm", rows(NNX, NNX[:1]))
def test_an_nnx_model(scanned, batch_norm):
    """Counts of dropout and statistics of norms are those of the ordinary step, too."""
    found, wanted = (
        train_nnx(released, 2, scanned=scanned, batch_norm=batch_norm) for released in (True, False)
    )
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), found, wanted)
    assert all(jax.tree.leaves(same)), same


def test_an_nnx_model_has_the_variables_that_its_loss_adds():
    def adding(model, batch):
        model.seen = nnx.Intermediate((batch["tokens"],))  # as `sow` does
        return nnx_loss(model, batch)

    model, (batch,) = NnxModel(nnx.Rngs(0), scanned=True), batches()
    optimizer = Optimizer(model, make("flash_sgd"), wrt=nnx.Param)
    nnx.jit(lambda model, optimizer: optimizer.release_step(model, adding, batch))(model, optimizer)
    np.testing.assert_array_equal(model.seen.get_value()[0], batch["tokens"])


def test_statistics_in_an_nnx_scan_are_refused():
    with pytest.raises(ValueError, match="returns a value of every layer"):
        train_nnx(True, 1, scanned=True, batch_norm=True)
