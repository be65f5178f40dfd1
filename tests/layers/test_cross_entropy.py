"""The loss of a linear head in chunks, against optax's on all logits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_lowmem import layers
from tests.contract_cases import QUICK_COMPILE
from tests.tiers import in_turn

BATCH, LENGTH, WIDTH, VOCAB = 4, 12, 16, 40
KEYS = jax.random.split(jax.random.key(0), 4)
HIDDEN = jax.random.normal(KEYS[0], (BATCH, LENGTH, WIDTH))
HEAD = jax.random.normal(KEYS[1], (WIDTH, VOCAB)) * 0.5
LABELS = jax.random.randint(KEYS[2], (BATCH, LENGTH), 0, VOCAB)
WEIGHTS = jnp.maximum(jax.random.normal(KEYS[3], (BATCH, LENGTH)), 0)
CHUNKED = {"chunk_tokens": 13}  # 3 positions of each row


def expected(
    hidden, head, labels, weights=None, reduction="mean", vocab_axis=1, z_loss=0.0, soft_cap=None
):
    """By all logits, in f32."""
    head = head.T if vocab_axis == 0 else head
    logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32)
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    losses += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    weights = jnp.ones(labels.shape) if weights is None else weights.astype(jnp.float32)
    if reduction == "none":
        return losses * weights
    return (losses * weights).sum() / (weights.sum() if reduction == "mean" else 1)


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile(QUICK_COMPILE)(*args)


def with_gradients(function, *args, numbers=(0, 1)):
    """(value, gradients) of a function; of one that returns losses, of their weighted sum."""

    def scalar(*args):
        found = function(*args)
        return (found * jnp.cos(jnp.arange(found.size)).reshape(found.shape)).sum(), found

    (_, value), gradients = compiled(
        jax.value_and_grad(scalar, argnums=numbers, has_aux=True), *args
    )
    return value, *gradients


def assert_close(found, wanted, **tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, **({"rtol": 2e-5, "atol": 2e-6} | tolerance))


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum", "z_loss": 0.1},
    "none": {"reduction": "none", "soft_cap": 1.5},
    "transposed": {"vocab_axis": 0, "z_loss": 0.1, "soft_cap": 1.5},
    "weights": {"weights": WEIGHTS},
    "mask": {"weights": WEIGHTS > 0.5, "vocab_axis": 0},
    "all": {"weights": WEIGHTS, "reduction": "none", "z_loss": 0.1, "vocab_axis": 0},
}


@pytest.mark.parametrize("options, chunk_tokens", in_turn(OPTIONS, [13, None]))
def test_equals_the_loss_of_all_logits(options, chunk_tokens):
    options = OPTIONS[options]
    head = HEAD if options.get("vocab_axis", 1) else HEAD.T
    of_chunks = functools.partial(
        layers.linear_cross_entropy, chunk_tokens=chunk_tokens, labels=LABELS, **options
    )
    whole = functools.partial(expected, labels=LABELS, **options)
    found = with_gradients(of_chunks, HIDDEN, head)
    assert_close(found, with_gradients(whole, HIDDEN, head))
    assert found[0].dtype == jnp.float32


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradient_of_weights(reduction):
    def of(loss):
        return lambda w: loss(HIDDEN, HEAD, LABELS, weights=w, reduction=reduction)

    found = with_gradients(
        of(functools.partial(layers.linear_cross_entropy, **CHUNKED)), WEIGHTS, numbers=(0,)
    )
    assert_close(found, with_gradients(of(expected), WEIGHTS, numbers=(0,)))


TOKENS = [(1, 1), (2, 7), (5, 3), (40, 2), (3,), (7,), ()]


@pytest.mark.parametrize("tokens, chunk", in_turn(TOKENS, [5, 1]))
def test_any_number_of_tokens(tokens, chunk):
    """Chunks that divide nothing, rows longer and shorter than a chunk, one token."""
    hidden = jax.random.normal(KEYS[3], (*tokens, WIDTH))
    labels = jax.random.randint(KEYS[2], tokens, 0, VOCAB)
    of_chunks = functools.partial(layers.linear_cross_entropy, chunk_tokens=chunk, labels=labels)
    whole = functools.partial(expected, labels=labels)
    assert_close(with_gradients(of_chunks, hidden, HEAD), with_gradients(whole, hidden, HEAD))


def test_16_bits():
    """A rounded gradient of the logits; results in the dtypes of the arguments."""
    hidden, head = HIDDEN.astype(jnp.bfloat16), HEAD.astype(jnp.bfloat16)
    of_chunks = functools.partial(layers.linear_cross_entropy, labels=LABELS, **CHUNKED)
    wanted = with_gradients(functools.partial(expected, labels=LABELS), hidden, head)
    loss, *found = with_gradients(of_chunks, hidden, head)
    assert loss.dtype == jnp.float32
    assert [g.dtype for g in found] == [jnp.bfloat16] * 2
    assert_close(loss, wanted[0])
    for a, b in zip(found, wanted[1:], strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-8 * np.abs(b).max())
    of_both = with_gradients(of_chunks, hidden, HEAD)  # products in f32
    assert [g.dtype for g in of_both] == [jnp.float32, jnp.bfloat16, jnp.float32]
    assert_close(of_both[2], with_gradients(of_chunks, hidden.astype(jnp.float32), HEAD)[2])


def test_many_chunks_are_summed_in_f32():
    """A bf16 sum of 512 equal terms would stop at 256."""
    hidden, head = jnp.ones((512, 1), jnp.bfloat16), jnp.zeros((1, 2), jnp.bfloat16)
    labels = jnp.zeros(512, jnp.int32)
    loss = functools.partial(layers.linear_cross_entropy, reduction="sum", chunk_tokens=1)
    found = jax.jit(jax.grad(loss, 1))(hidden, head, labels)
    np.testing.assert_array_equal(np.asarray(found, np.float32), [[-256.0, 256.0]])


def test_masked_tokens_have_no_part():
    """Neither their labels nor a loss that is not finite; without any token left the loss is 0."""
    mask = (WEIGHTS > 0).at[0, 0].set(False)
    labels = LABELS.at[0, 0].set(-100)
    hidden = HIDDEN.at[0, 0].set(1e30)

    @jax.jit
    def of(hidden, labels, mask):
        def loss(hidden):
            return layers.linear_cross_entropy(hidden, HEAD, labels, weights=mask, **CHUNKED)

        return jax.value_and_grad(loss)(hidden)

    loss, gradient = of(hidden, labels, mask)
    wanted, of_hidden = of(HIDDEN, LABELS, mask)
    np.testing.assert_array_equal(loss, wanted)
    np.testing.assert_array_equal(gradient, of_hidden)
    assert not gradient[0, 0].any()
    loss, gradient = of(HIDDEN, labels, jnp.zeros_like(mask))
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("label", [-1, VOCAB])
def test_a_label_that_is_none_is_seen(label):
    labels = LABELS.at[1, 2].set(label)
    each, gradient = with_gradients(
        lambda h: layers.linear_cross_entropy(h, HEAD, labels, reduction="none", **CHUNKED),
        HIDDEN, numbers=(0,),
    )  # fmt: skip
    wrong = np.zeros((BATCH, LENGTH), bool)
    wrong[1, 2] = True
    np.testing.assert_array_equal(np.isnan(each), wrong)
    np.testing.assert_array_equal(np.isnan(gradient).any(-1), wrong)


def products(function, *args):
    """Count the matrix products in a program's jaxpr."""
    return str(jax.make_jaxpr(function)(*args)).count("dot_general[")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_gradient_that_is_not_asked_for(reduction):
    """One product for the loss, one more for each gradient; `none` computes the logits twice."""

    def loss(hidden, head):
        found = layers.linear_cross_entropy(hidden, head, LABELS, reduction=reduction, **CHUNKED)
        return found.sum()

    again = 1 if reduction == "none" else 0
    counts = {(): 1, (0,): 2 + again, (1,): 2 + again, (0, 1): 3 + again}
    for numbers, wanted in counts.items():
        function = jax.grad(loss, numbers) if numbers else loss
        for wrapped in (function, jax.grad(jax.jit(loss), numbers) if numbers else jax.jit(loss)):
            assert products(wrapped, HIDDEN, HEAD) == wanted, numbers


def test_no_more_than_a_chunk_of_logits():
    """Of 64 chunks, whose logits are the largest arrays here by far."""
    tokens, vocab = 4096, 4096
    hidden = jax.ShapeDtypeStruct((4, tokens // 4, 8), jnp.float32)
    head = jax.ShapeDtypeStruct((8, vocab), jnp.float32)
    labels = jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32)
    loss = functools.partial(layers.linear_cross_entropy, chunk_tokens=64)
    for function in (loss, jax.grad(loss, (0, 1))):
        plan = jax.jit(function).lower(hidden, head, labels).compile().memory_analysis()
        assert plan.temp_size_in_bytes < 6 * 64 * vocab * 4 < tokens * vocab * 4 / 10


def test_vmap():
    """Over all, over the head alone, and inside a gradient."""
    heads = jnp.stack([HEAD, -HEAD])
    loss = functools.partial(layers.linear_cross_entropy, **CHUNKED)
    for axes, args in (
        ((None, 0, None), (HIDDEN, heads, LABELS)),
        ((0, None, 0), (HIDDEN, HEAD, LABELS)),
    ):
        found, wanted = (
            compiled(jax.vmap(jax.value_and_grad(f, (0, 1)), axes), *args)
            for f in (loss, lambda *given: expected(*given))
        )
        assert_close(found, wanted)
    found, wanted = (
        compiled(jax.grad(lambda h, f=f: jax.vmap(f, (0, None, 0))(h, HEAD, LABELS).sum()), HIDDEN)
        for f in (loss, lambda *given: expected(*given))
    )
    assert_close(found, wanted)


def test_scan_and_remat():
    """Gradients summed over a loop's steps, each computed anew."""

    def total(loss, hidden, head):
        @jax.checkpoint
        def body(sum, own):
            return sum + loss(own[0], head, own[1]), None

        return jax.lax.scan(body, 0.0, (hidden, LABELS))[0]

    loss = functools.partial(layers.linear_cross_entropy, chunk_tokens=5)
    found, wanted = (
        with_gradients(functools.partial(total, f), HIDDEN, HEAD)
        for f in (loss, lambda *given: expected(*given))
    )
    assert_close(found, wanted)


def test_second_derivatives():
    direction = jnp.cos(jnp.arange(HIDDEN.size)).reshape(HIDDEN.shape)

    def along(loss):
        return lambda h: (jax.grad(loss)(h, HEAD, LABELS) * direction).sum()

    loss = functools.partial(layers.linear_cross_entropy, **CHUNKED)
    found, wanted = (compiled(jax.grad(along(f)), HIDDEN) for f in (loss, expected))
    assert_close(found, wanted)


# ---- meshes --------------------------------------------------------------------------------------

LAYOUTS = {
    "data": ({"data": 4}, P("data"), P()),
    "fsdp": ({"data": 2, "fsdp": 2}, P(("data", "fsdp")), P("fsdp")),
    "tensor": ({"tensor": 4}, P(), P(None, "tensor")),
    "all": ({"data": 2, "fsdp": 2, "tensor": 2}, P(("data", "fsdp")), P("fsdp", "tensor")),
    "length": ({"data": 2, "length": 2}, P("data", "length"), P("length")),
    "width": ({"tensor": 4}, P(None, None, "tensor"), P("tensor")),
}
HOW = ("specs", "explicit", "auto")


@functools.cache
def wanted_on(weighted, vocab_axis, reduction="mean"):
    head = HEAD if vocab_axis else HEAD.T
    more = dict(weights=WEIGHTS if weighted else None, reduction=reduction, vocab_axis=vocab_axis)
    return with_gradients(functools.partial(expected, labels=LABELS, **more), HIDDEN, head)


@pytest.mark.parametrize(
    ("name", "how", "vocab_axis", "weighted"),
    [
        (name, how, axis, weighted)
        for (name, how), (axis, weighted) in zip(
            itertools.product(LAYOUTS, HOW), itertools.cycle([(1, True), (0, False), (0, True)])
        )
    ],
)
def test_on_a_mesh(name, how, vocab_axis, weighted):
    """Equal to one device's, and gradients lie where their arguments do."""
    sizes, of_hidden, of_head = LAYOUTS[name]
    of_head = of_head if vocab_axis else P(*(tuple(of_head) + (None,) * 2)[:2][::-1])
    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    count = int(np.prod(list(sizes.values())))
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes),
        devices=jax.devices()[:count],
    )  # fmt: skip
    head = HEAD if vocab_axis else HEAD.T
    hidden, head, labels, weights = (
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in (
            (HIDDEN, of_hidden), (head, of_head), (LABELS, P(*of_hidden[:2])), (WEIGHTS, P()),
        )
    )  # fmt: skip
    more = {"mesh": mesh, "specs": (of_hidden, of_head)} if how == "specs" else {}

    def loss(hidden, head):
        return layers.linear_cross_entropy(
            hidden, head, labels, weights=weights if weighted else None,
            vocab_axis=vocab_axis, chunk_tokens=5, **more,
        )  # fmt: skip

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)
    assert_close((value, *gradients), wanted_on(weighted, vocab_axis))
    for gradient, given in zip(gradients, (hidden, head), strict=True):
        if how == "explicit":
            assert gradient.sharding.is_equivalent_to(given.sharding, given.ndim)
