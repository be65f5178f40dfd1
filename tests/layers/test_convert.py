"""`layers.convert`: which layers become others, and that nothing else of a model changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

from optax_lowmem import layers  # noqa: E402
from tests.contract_cases import assert_same  # noqa: E402
from tests.layers.test_layers import CLOSE, KEY, X, assert_same_start, close  # noqa: E402

LLM = functools.partial(layers.SwitchBackLinear, variant="llm_int8")
OURS = layers.switchback_dot_general()


# ---- NNX -----------------------------------------------------------------------------------------
class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.heads = nnx.Dict(a=nnx.Linear(8, 3, rngs=rngs), b=nnx.Linear(8, 3, rngs=rngs))
        self.tied = self.blocks[0].up
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.attention(x)) + self.tied(x)[..., :8]
        return self.heads["a"](x) + self.heads["b"](x)


def model():
    return Model(nnx.Rngs(0))


def names(found):
    """The paths of layers that are not Flax's own."""
    return {
        "/".join(map(str, path))
        for path, layer in nnx.iter_modules(found)
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral)
        and layer.dot_general not in (None, jax.lax.dot_general)
    }


BLOCKS = {f"blocks/{i}/{name}" for i in (0, 1) for name in ("up", "down")}
HEADS = {"heads/a", "heads/b"}
ATTENTION = {f"attention/{name}" for name in ("query", "key", "value", "out")}


@pytest.mark.parametrize(
    "where,want",
    [
        ("*", BLOCKS | HEADS),
        ("blocks/*", BLOCKS),
        ("*/down", {"blocks/0/down", "blocks/1/down"}),
        (["heads/a", "*/1/*"], {"heads/a", "blocks/1/up", "blocks/1/down"}),
        (lambda path, layer: layer.out_features == 3, HEADS),
        ("blocks/0/up", {"blocks/0/up"}),
    ],
)
def test_nnx_layers_by_path(where, want):
    before = model()
    found = layers.convert(before, where, LLM)
    assert names(found) == want and not names(before)
    assert_same(*(nnx.to_pure_dict(nnx.state(one)) for one in (found, before)))
    for path, layer in nnx.iter_modules(found):
        chosen = "/".join(map(str, path)) in want
        assert isinstance(layer, layers.SwitchBackLinear) == chosen
        if chosen:
            assert layer.dot_general == layers.switchback_dot_general("llm_int8")
    assert found.tied is found.blocks[0].up and found.norm is not before.norm
    assert found.blocks[0].down.dtype == jnp.bfloat16
    if where == "blocks/*":
        y, want_y = (nnx.jit(lambda model: model(X))(one) for one in (found, before))
        assert close(y, want_y) and not names(before)


def test_nnx_product_goes_into_attention_too():
    found = layers.convert(model(), to=OURS)
    assert names(found) == BLOCKS | HEADS | ATTENTION == names(layers.convert(model()))
    assert type(found.blocks[0].up) is nnx.Linear
    assert names(layers.convert(model(), "attention/*")) == ATTENTION
    with pytest.raises(ValueError, match="no dense layer matches.*'blocks/0/down'"):
        layers.convert(model(), "attention/*", LLM)  # no nnx.Linear is there
    by_class = nnx.LinearGeneral(
        8, 3, dot_general_cls=lambda: jax.lax.dot_general, rngs=nnx.Rngs(0)
    )
    assert close(layers.convert(by_class)(X), by_class(X))


def test_nnx_gradients_train_the_same_variables():
    block = nnx.Sequential(Block(nnx.Rngs(0)))
    found = layers.convert(block, to=layers.SwitchBackLinear)

    @nnx.jit
    def gradient(model):
        return nnx.grad(lambda model: (model(X) ** 2).mean())(model)

    mine, theirs = (nnx.to_pure_dict(gradient(one)) for one in (found, block))
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    up = mine["layers"][0]["up"]["kernel"], theirs["layers"][0]["up"]["kernel"]
    assert 0 < np.linalg.norm(up[0] - up[1]) < 0.1 * np.linalg.norm(up[1])


def test_nnx_stacked_layers():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return nnx.Linear(8, 8, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return jnp.tanh(layer(x))

    stacked = stack(nnx.Rngs(0))
    found = layers.convert(stacked, to=layers.SwitchBackLinear)
    assert found.kernel.shape == (3, 8, 8) and type(found) is layers.SwitchBackLinear
    assert close(forward(X, found), forward(X, stacked))
    x = X
    for i in range(3):
        product = OURS(x, stacked.kernel[i], (((2,), (0,)), ((), ())))
        x = jnp.tanh(product + stacked.bias[i].reshape(1, 1, 8))
    np.testing.assert_allclose(forward(X, found), x, rtol=1e-5, atol=1e-6)


def test_nnx_subclasses_keep_their_computation():
    lora = nnx.Sequential(nnx.LoRALinear(8, 8, lora_rank=2, rngs=nnx.Rngs(0)))
    lora.layers[0].lora.lora_b[...] = jnp.ones((2, 8))
    for to in (OURS, layers.SwitchBackLinear):
        found = layers.convert(lora, to=to)
        assert type(found.layers[0]) is nnx.LoRALinear and names(found)
        assert close(found(X), lora(X))

    class Other(nnx.Linear):
        def __init__(self, *size, gain=1.0, **more):
            super().__init__(*size, **more)
            self.gain = gain

        def __call__(self, x):
            return self.gain * super().__call__(x)

    twice = functools.partial(Other, gain=2.0, dtype=jnp.bfloat16)
    plain = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    assert layers.convert(plain, to=twice)(X).dtype == jnp.bfloat16
    np.testing.assert_allclose(layers.convert(plain, to=twice)(X), 2 * plain(X), rtol=0.1, atol=0.1)
    with pytest.raises(TypeError, match="'layers/0' is a LoRALinear, which overrides __call__"):
        layers.convert(lora, to=Other)

    class More(nnx.Linear):
        def __init__(self, *size, **more):
            super().__init__(*size, **more)
            self.extra = nnx.Param(jnp.zeros(3))

    with pytest.raises(TypeError, match="'' has no extra"):
        layers.convert(plain, to=More)


# ---- Linen ---------------------------------------------------------------------------------------
class Step(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, _=None):
        return jnp.tanh(nn.Dense(self.width, name="dense")(x)), None


class Net(nn.Module):
    """Compact and setup modules, a shared layer, attention, and lifted transformations."""

    width: int = 8
    lifted: bool = False

    def setup(self):
        self.up = nn.Dense(self.width)
        self.blocks = [nn.Dense(self.width, name=f"block_{i}") for i in range(2)]
        self.attention = nn.MultiHeadDotProductAttention(2)
        self.general = nn.DenseGeneral((2, 4))
        if self.lifted:
            how = dict(variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            self.scanned = nn.scan(nn.remat(Step), **how)(self.width)
            self.jitted = nn.jit(Step)(self.width)

    def encode(self, x):
        return self.up(x)

    def __call__(self, x):
        x = self.up(jnp.tanh(self.up(x)))  # shared
        for block in self.blocks:
            x = x + block(x)
        x = self.attention(x) + self.general(x).reshape(x.shape)
        if self.lifted:
            x = self.jitted(self.scanned(x, None)[0])[0]
        return x


@pytest.mark.parametrize("to,lifted", [(OURS, True), (layers.SwitchBackDense, False)])
def test_linen_models(to, lifted):
    plain = Net(lifted=lifted)
    params = plain.init(KEY, X)
    found = layers.convert(plain, to=to)
    assert type(found).__name__ == "Net" and found.lifted == lifted and isinstance(found, Net)
    assert_same_start(found.init(KEY, X), params)
    want = plain.apply(params, X)
    y = found.apply(params, X)
    assert close(y, want, 0.1 if lifted else CLOSE)
    np.testing.assert_array_equal(plain.apply(params, X), want)  # and it is as it was
    if not lifted:
        mine, theirs = (
            one.apply(params, X, capture_intermediates=True)[1]["intermediates"]
            for one in (found, plain)
        )
        assert jax.tree.map(jnp.shape, mine) == jax.tree.map(jnp.shape, theirs)
        assert close(mine["up"]["__call__"][0], theirs["up"]["__call__"][0])
    twice = layers.convert(found, to=layers.switchback_dot_general("standard"))
    np.testing.assert_array_equal(twice.apply(params, X), want)


class Pair(nn.Module):
    """Two layers side by side: which of them is in 8 bits shows in its own output."""

    @nn.compact
    def __call__(self, x):
        class Inner(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(3, name="dense")(x)

        general = nn.DenseGeneral(3, name="general")(x)
        return dict(a=nn.Dense(3, name="a")(x), b=nn.Dense(3, name="b")(x), general=general) | {
            f"inner_{i}/dense": Inner(name=f"inner_{i}")(x) for i in range(2)
        }


@pytest.mark.parametrize(
    "where,to,want",
    [
        ("*", OURS, {"a", "b", "general", "inner_0/dense", "inner_1/dense"}),
        ("*", layers.SwitchBackDense, {"a", "b", "inner_0/dense", "inner_1/dense"}),
        ("a", layers.SwitchBackDense, {"a"}),
        (["b", "inner_?/*"], OURS, {"b", "inner_0/dense", "inner_1/dense"}),
        (lambda path, layer: path == "inner_1/dense", None, {"inner_1/dense"}),
        (lambda path, layer: isinstance(layer, nn.DenseGeneral), None, {"general"}),
    ],
)
def test_linen_layers_by_path(where, to, want):
    plain = Pair()
    params = plain.init(KEY, X)
    found = layers.convert(plain, where, to)
    y, exact = found.apply(params, X), plain.apply(params, X)
    assert {name for name in y if (y[name] != exact[name]).any()} == want
    assert all(close(y[name], exact[name]) for name in want)


def test_linen_conversions_of_one_kind_compile_once():
    plain, traces = Pair(), []
    params = plain.init(KEY, X)

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, params):
        traces.append(model)
        return model.apply(params, X)

    for _ in range(3):
        run(layers.convert(plain, "a"), params)
        run(layers.convert(plain, ["a"], layers.switchback_dot_general()), params)
    assert len(traces) == 1
    run(layers.convert(plain, "b"), params)
    run(plain, params)
    assert len(traces) == 3


def test_linen_methods():
    found, plain = layers.convert(Net(), to=OURS), Net()
    params = found.init(KEY, X)
    for method in ("encode", Net.encode, found.encode):
        y = found.apply(params, X, method=method)
        assert close(y, plain.apply(params, X, method="encode"))
    assert "Net" in found.tabulate(KEY, X)
    assert "SwitchBackDense" not in repr(found)


def test_linen_arguments_of_a_partial():
    plain = nn.Dense(3, dtype=jnp.bfloat16)
    params = plain.init(KEY, X)
    to = functools.partial(layers.SwitchBackDense, format="fp8", dtype=jnp.float32)
    y = layers.convert(plain, to=to).apply(params, X)
    want = layers.SwitchBackDense(3, format="fp8").apply(params, X)
    np.testing.assert_array_equal(y, want)
    kept = layers.convert(plain, to=layers.SwitchBackDense).apply(params, X)
    assert kept.dtype == jnp.bfloat16
    # one that is in 8 bits already takes other ones
    again = layers.convert(layers.SwitchBackDense(3), to=to).apply(params, X)
    np.testing.assert_array_equal(again, want)


def test_linen_subclasses_keep_their_computation():
    class Twice(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Thrice(nn.Dense):
        factor: float = 3.0

        @nn.compact
        def __call__(self, x):
            return self.factor * super().__call__(x)

    params = nn.Dense(3).init(KEY, X)
    exact = nn.Dense(3).apply(params, X)
    for to in (OURS, layers.SwitchBackDense):
        assert close(layers.convert(Twice(3), to=to).apply(params, X), 2 * exact)
    found = layers.convert(nn.Dense(3), to=functools.partial(Thrice, factor=4.0))
    np.testing.assert_allclose(found.apply(params, X), 4 * exact, rtol=1e-5, atol=1e-6)
    assert_same_start(found.init(KEY, X), params)
    with pytest.raises(TypeError, match="is a Twice, which overrides __call__"):
        layers.convert(Twice(3), to=Thrice).apply(params, X)


# ---- errors --------------------------------------------------------------------------------------
def test_nothing_to_convert():
    with pytest.raises(ValueError, match="no dense layer matches.*'blocks/0/"):
        layers.convert(model(), "layers/*")
    with pytest.raises(ValueError, match="dense layers: none"):
        layers.convert(nnx.Sequential(nnx.relu))
    params = Pair().init(KEY, X)
    found = layers.convert(Pair(), ["c", "d"])
    for run in (lambda: found.apply(params, X), lambda: found.init(KEY, X)):
        with pytest.raises(ValueError, match="no dense layer matches.*'general', 'a', 'b'"):
            run()


@pytest.mark.parametrize(
    "to", [layers.SwitchBackDense, layers.SwitchBackLinear, "int8", 3, nn.Dense(3), nnx.Conv, dict]
)
def test_what_a_layer_cannot_become(to):
    if to is not layers.SwitchBackLinear:
        with pytest.raises(TypeError, match="`to` must be a subclass of flax.nnx.*Linear"):
            layers.convert(model(), to=to)
    if to is not layers.SwitchBackDense:
        with pytest.raises(TypeError, match="`to` must be a subclass of flax.linen.*Dense"):
            layers.convert(Pair(), to=to)


def test_what_is_no_model():
    for thing in (Pair, {}, lambda x: x, None):
        with pytest.raises(TypeError, match="takes a Flax module"):
            layers.convert(thing)


def test_linen_conversions_do_not_pass_unnoticed():
    """A converted Linen module has `init` and `apply` only: other uses would run the old layers."""

    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.inner(x)

    found = layers.convert(Net())
    params = found.init(KEY, X)
    inside = {"params": {"inner": params["params"]}}
    for run in (
        lambda: found.bind(params),
        lambda: Outer(found).apply(inside, X),
        lambda: layers.convert(Outer(found)).apply(inside, X),
        lambda: nn.apply(Net.__call__, found)(params, X),
    ):
        with pytest.raises(TypeError, match="a converted Net has `init` and `apply` only"):
            run()
    whole = layers.convert(Outer(Net()), "inner/up")
    assert close(whole.apply(inside, X), Outer(Net()).apply(inside, X))
