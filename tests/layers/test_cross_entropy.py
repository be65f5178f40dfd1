"""The loss of a linear head in chunks, against optax's on all logits."""

import functools
import itertools
import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_lowmem import layers
from optax_lowmem._src.kernels import platform
from optax_lowmem._src.layers import quantized_matmul
from optax_lowmem._src.layers.fp8_flow import kernels as fp8_flow
from tests import tolerances as tol
from tests.contract_cases import QUICK_COMPILE
from tests.lowering import kernels_in, lower_for_cuda
from tests.meshes import mesh_of
from tests.tiers import in_turn, rows

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


@pytest.mark.parametrize(
    "options, chunk_tokens",
    rows(
        itertools.product(OPTIONS, [13, None]),
        [("none", 13), ("transposed", None), ("mask", None), ("all", 13)],
    ),
)
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


@pytest.mark.parametrize(
    "tokens, chunk",
    rows(itertools.product(TOKENS, [5, 1]), [((5, 3), 5), ((), 5)]),
)
def test_any_number_of_tokens(tokens, chunk):
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


@pytest.mark.parametrize("number", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_hidden_states_of_masked_tokens_may_be_anything(number, reduction):
    mask = jnp.arange(LABELS.size).reshape(LABELS.shape) % 3 > 0

    def loss(hidden, head):
        how = dict(weights=mask, reduction=reduction, **CHUNKED)
        return layers.linear_cross_entropy(hidden, head, LABELS, **how).sum()

    other = jnp.where(mask[..., None], HIDDEN, number)
    found, wanted = (with_gradients(loss, hidden, HEAD) for hidden in (other, HIDDEN))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


REFUSED = [
    ({"soft_cap": jnp.inf}, ValueError, "soft_cap must be above 0 and finite, got inf"),
    ({"soft_cap": True}, TypeError, "soft_cap must be a number known when tracing, got True"),
    ({"soft_cap": "30"}, TypeError, "soft_cap must be a number known when tracing, got '30'"),
    ({"z_loss": jnp.nan}, ValueError, "z_loss must be at least 0 and finite, got nan"),
    ({"z_loss": -1e-4}, ValueError, "z_loss must be at least 0 and finite, got -0.0001"),
    ({"z_loss": "1"}, TypeError, "z_loss must be a number known when tracing, got '1'"),
    ({"chunk_tokens": 1.5}, TypeError, "chunk_tokens must be an int known when tracing, got 1.5"),
    ({"chunk_tokens": True}, TypeError, "chunk_tokens must be an int .*, got True"),
    ({"chunk_tokens": "a"}, TypeError, "chunk_tokens must be an int .*, got 'a'"),
    ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be at least 1, got 0"),
    ({"labels": [0, 1]}, TypeError, "labels is a list, not an array: make it one with jnp.asarray"),
    ({"weights": [0, 1]}, TypeError, "weights is a list, not an array"),
    ({"hidden": [0, 1]}, TypeError, "hidden is a list, not an array"),
    ({"head": [0, 1]}, TypeError, "head is a list, not an array"),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_arguments_that_are_refused(options, kind, message):
    given = {"hidden": HIDDEN, "head": HEAD, "labels": LABELS}
    with pytest.raises(kind, match=message):
        layers.linear_cross_entropy(**given | options)


@pytest.mark.parametrize("name", ["soft_cap", "z_loss", "chunk_tokens"])
def test_options_are_known_when_tracing(name):
    with pytest.raises(TypeError, match=f"{name} must be an? .* known when tracing, got a traced"):
        jax.eval_shape(lambda x: layers.linear_cross_entropy(HIDDEN, HEAD, LABELS, **{name: x}), 2)


@pytest.mark.parametrize("products", ["input", "fp8", "fp8-gradients"])
def test_masked_tokens_have_no_part(products):
    """Neither their labels nor what is not finite; without any token left the loss is 0."""
    mask = (WEIGHTS > 0).at[0, 0].set(False)
    labels = LABELS.at[0, 0].set(-100)

    @jax.jit
    def of(hidden, labels, mask):
        loss = functools.partial(
            layers.linear_cross_entropy, weights=mask, products=products, **CHUNKED
        )
        return jax.value_and_grad(loss, (0, 1))(hidden, HEAD, labels)

    wanted = of(HIDDEN, LABELS, mask)
    assert not wanted[1][0][0, 0].any()
    for outlier in (1e30,) if products == "input" else (1e30, jnp.inf, jnp.nan):
        found = of(HIDDEN.at[0, 0].set(outlier), labels, mask)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
    loss, gradients = of(HIDDEN, labels, jnp.zeros_like(mask))
    assert loss == 0 and not any(g.any() for g in gradients)


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


def test_zeros_are_not_shared_with_a_tied_embeddings_gradient():
    """Equal constants would be one array, in use during the whole backward pass."""
    table = jnp.zeros((40, 8))

    def loss(table):
        return layers.linear_cross_entropy(
            table[LABELS], table, LABELS, vocab_axis=0, chunk_tokens=4
        )

    text = jax.jit(jax.grad(loss)).lower(table).as_text()
    of = re.findall(r"broadcast_in_dim (%\w+).*\(tensor<f32>\) -> tensor<40x8xf32>", text)
    assert [name.startswith("%cst") for name in sorted(of)].count(True) == 1 < len(of)


def test_vmap():
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


CASES = [
    (name, how, axis, weighted)
    for (name, how), (axis, weighted) in zip(
        itertools.product(LAYOUTS, HOW), itertools.cycle([(1, True), (0, False), (0, True)])
    )
]

OFTEN = [case for i, case in enumerate(CASES) if i % 4 == i // 4 % 4]


@pytest.mark.parametrize(("name", "how", "vocab_axis", "weighted"), rows(CASES, OFTEN[::2]))
def test_on_a_mesh(name, how, vocab_axis, weighted):
    assert_close(
        on_a_mesh(name, how, vocab_axis, weighted, chunk_tokens=5), wanted_on(weighted, vocab_axis)
    )


def on_a_mesh(name, how, vocab_axis, weighted, **options):
    """The mean loss and its gradients, which lie where their arguments do."""
    sizes, of_hidden, of_head = LAYOUTS[name]
    of_head = of_head if vocab_axis else P(*(tuple(of_head) + (None,) * 2)[:2][::-1])
    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    mesh = mesh_of(kind, **sizes)
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
            vocab_axis=vocab_axis, **more, **options,
        )  # fmt: skip

    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)
    for gradient, given in zip(gradients, (hidden, head), strict=True):
        if how == "explicit":
            assert gradient.sharding.is_equivalent_to(given.sharding, given.ndim)
    return value, *gradients


# ---- products in FP8 -----------------------------------------------------------------------------
FULL = pytest.mark.full
FP8 = ("fp8", "fp8-gradients")
BOTH = [(FP8[0], 1), (FP8[1], 0)]  # with an axis of the vocabulary
fp8_loss = functools.partial(layers.linear_cross_entropy, products="fp8")


def oracle(hidden, head, labels, weights=None, z_loss=0.0, soft_cap=None, **_):
    """Of a head [width, vocab], in float64: logits, losses, and the gradients of their sum."""
    h, w = np.float64(hidden).reshape(-1, hidden.shape[-1]), np.float64(head)
    y, weights = np.ravel(labels), np.ones(labels.size) if weights is None else np.ravel(weights)
    logits, slope = h @ w, 1.0
    if soft_cap:
        logits = soft_cap * np.tanh(logits / soft_cap)
        slope = 1 - (logits / soft_cap) ** 2
    highest = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - highest).sum(-1, keepdims=True)) + highest
    losses = log_sum[:, 0] - logits[np.arange(y.size), y] + z_loss * log_sum[:, 0] ** 2
    of_logits = np.exp(logits - log_sum) * (1 + 2 * z_loss * log_sum)
    of_logits[np.arange(y.size), y] -= 1
    of_logits *= slope
    weighted = of_logits * np.float64(weights)[:, None]
    return logits, losses, of_logits, (weighted @ w.T).reshape(hidden.shape), h.T @ weighted


def distance(found, wanted):
    """Of the norm."""
    found, wanted = np.float64(found), np.float64(wanted)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def sums_and_losses(options, hidden, head, labels):
    """Each token's loss, and the gradients of their (weighted) sum."""

    def both(hidden, head):
        more = {name: value for name, value in options.items() if name != "weights"}
        each = layers.linear_cross_entropy(hidden, head, labels, reduction="none", **more)
        return layers.linear_cross_entropy(
            hidden, head, labels, reduction="sum", **options
        ), jax.lax.stop_gradient(each)

    (_, each), gradients = compiled(jax.value_and_grad(both, (0, 1), has_aux=True), hidden, head)
    return each, *gradients


AGAINST_FLOAT64 = {
    "chunks": {"chunk_tokens": 13},
    "tied": {"vocab_axis": 0, "z_loss": 0.1, "soft_cap": 1.5},
    "weights": {"weights": WEIGHTS, "chunk_tokens": 7},
    "mask": {"weights": WEIGHTS > 0.5, "vocab_axis": 0, "chunk_tokens": 13},
}


@pytest.mark.parametrize("products, options", in_turn(FP8, AGAINST_FLOAT64))
def test_fp8_against_float64(products, options):
    """Losses within their bound and as far off as derived; gradients likewise, in their norm."""
    options = AGAINST_FLOAT64[options]
    logits, losses, of_logits, *wanted = oracle(HIDDEN, HEAD, LABELS, **options)
    own = options | {"products": products}
    tied = own.get("vocab_axis") == 0
    each, *found = sums_and_losses(own, HIDDEN, HEAD.T if tied else HEAD, LABELS)
    found[1] = found[1].T if tied else found[1]
    off, h, w = np.ravel(each) - losses, np.float64(HIDDEN).reshape(-1, WIDTH), np.float64(HEAD)
    if products == "fp8":
        z_loss = options.get("z_loss", 0.0)
        bound = tol.fp8_loss(logits, np.ravel(LABELS), tol.fp8_logits(h, w), z_loss)
        assert (np.abs(off) <= bound).all()
        expected_rms = tol.fp8_loss_rms(h, w, of_logits)
        assert expected_rms / 3 <= np.sqrt((off**2).mean()) <= expected_rms
    else:
        np.testing.assert_allclose(off, 0, atol=2e-5)
    most = tol.fp8_head_gradients(h, w, of_logits=products == "fp8")
    for a, b in zip(found, wanted, strict=True):
        assert 2.0**-10 < distance(a, b) <= most


# sigma of logits -> of `fp8`: the mean loss higher by, at most; errors of both gradients, at most;
# the same of `fp8-gradients`. As docs/results/layers.md has them, and a quarter more.
LARGE = {1.0: (0.009, (0.036, 0.077), (0.034, 0.033)), 3.0: (0.018, (0.049, 0.067), (0.036, 0.035))}


@pytest.mark.full
@pytest.mark.parametrize("sigma", LARGE)
def test_fp8_of_a_large_vocabulary(sigma):
    """Words of Zipf's law in a direction that all hidden states share; labels of the softmax."""
    vocab, width, tokens = 2**15, 512, 512
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(tokens, width))
    hidden[:, 0] = width**0.5 / 2
    head = rng.normal(size=(width, vocab)) * sigma / width**0.5
    zipf = -np.log(np.arange(1, vocab + 1) + 2.7)
    head[0] = (zipf - zipf.mean()) / hidden[0, 0]
    hidden /= np.sqrt((hidden**2).mean(1, keepdims=True))
    hidden, head = (jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for x in (hidden, head))
    cumulated = np.cumsum(np.exp(np.float64(hidden) @ np.float64(head)), 1)
    drawn = zip(cumulated, rng.random(tokens), strict=True)
    labels = jnp.array([np.searchsorted(row, u * row[-1]) for row, u in drawn])
    _, losses, _, *wanted = oracle(hidden, head, labels)
    higher, *most = LARGE[sigma]
    for products, bounds in zip(FP8, most, strict=True):
        each, *found = sums_and_losses({"products": products}, hidden, head, labels)
        off = each.mean() - losses.mean()
        assert 0 < off < higher if products == "fp8" else abs(off) < 1e-5
        for a, b, bound in zip(found, wanted, bounds, strict=True):
            assert distance(a, b) < bound


@pytest.mark.parametrize(("products", "axis"), BOTH)
def test_fp8_of_16_bits(products, axis):
    """Codes of the same numbers are the same; gradients have the dtypes of the arguments."""
    hidden, head = HIDDEN.astype(jnp.bfloat16), (HEAD if axis else HEAD.T).astype(jnp.bfloat16)
    options = {"products": products, "vocab_axis": axis, **CHUNKED}
    loss = functools.partial(layers.linear_cross_entropy, labels=LABELS, **options)
    value, *found = with_gradients(loss, hidden, head)
    same, *wanted = with_gradients(loss, hidden.astype(jnp.float32), head.astype(jnp.float32))
    assert value.dtype == jnp.float32 and [g.dtype for g in found] == [jnp.bfloat16] * 2
    np.testing.assert_allclose(value, same, rtol=1e-6)
    for a, b in zip(found, wanted, strict=True):
        assert distance(a, b) < tol.FP8_OTHER_SCALES  # codes of a rounded gradient


@pytest.mark.parametrize("axis", [0, 1])
def test_fp8_of_powers_of_two_is_exact(axis):
    """Logits of 4 and -4 from 8 numbers of 1/2, whose codes and sums have no error."""
    hidden = jnp.where(jnp.arange(6)[:, None] % 2, 0.5, -0.5) * jnp.ones((6, 8))
    head = jnp.ones((8, 1)) * jnp.array([[1.0, -1.0]])
    labels = jnp.array([0, 1, 0, 0, 1, 1])
    loss = functools.partial(fp8_loss, reduction="none", vocab_axis=axis, labels=labels)
    found = compiled(loss, hidden, head if axis else head.T)
    np.testing.assert_allclose(found, oracle(hidden, head, labels)[1], rtol=2e-6, atol=2e-7)
    # (1/2, -1/2) of two logits that are the same: exact in both gradients too
    zeros = jnp.zeros((8, 2))
    given = hidden, zeros if axis else zeros.T
    of_head = compiled(jax.grad(lambda *x: loss(*x).sum(), 1), *given)
    wanted = oracle(hidden, zeros, labels)[4]
    np.testing.assert_allclose(of_head, wanted if axis else wanted.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "shape", [(), pytest.param((1,), marks=FULL), (3, 1), pytest.param((2, 5), marks=FULL)]
)
def test_fp8_of_few_tokens_and_any_width(shape):
    """One token; 7 wide; 11 words: nothing is a multiple of a tile."""
    hidden, head = jax.random.normal(KEYS[0], (*shape, 7)), jax.random.normal(KEYS[1], (7, 11)) / 4
    labels = jax.random.randint(KEYS[2], shape, 0, 11)
    value, *found = with_gradients(
        functools.partial(fp8_loss, labels=labels, reduction="sum", chunk_tokens=3), hidden, head
    )
    logits, losses, _, *wanted = oracle(hidden, head, labels)
    h, w = np.float64(hidden).reshape(-1, 7), np.float64(head)
    bound = tol.fp8_loss(logits, np.ravel(labels), tol.fp8_logits(h, w), 0.0)
    assert 0 < abs(value - losses.sum()) <= bound.sum()
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert distance(a, b) < tol.fp8_head_gradients(h, w, True)


def test_fp8_of_zeros():
    """Scales of zeros are no zeros: the loss of a new head, and gradients that are finite."""
    for hidden, head in ((HIDDEN, 0 * HEAD), (0 * HIDDEN, HEAD), (0 * HIDDEN, 0 * HEAD)):
        value, gradients = compiled(jax.value_and_grad(fp8_loss, (0, 1)), hidden, head, LABELS)
        np.testing.assert_allclose(value, np.log(VOCAB), rtol=1e-6)
        assert all(np.isfinite(g).all() for g in gradients)


def test_fp8_keeps_small_probabilities():
    """E4M3 has no code for 1 / 2^20 beside the label's 1; E5M2 has it, exactly."""
    vocab, tokens = 2**20, 4
    hidden, head = jnp.ones((tokens, 2)), jnp.zeros((2, vocab))
    labels = jnp.arange(tokens)
    found = compiled(
        jax.grad(functools.partial(fp8_loss, reduction="sum"), 1), hidden, head, labels
    )
    np.testing.assert_allclose(found[:, tokens:], tokens / vocab, rtol=tol.HALF_CODE["e5m2"][0])


def test_fp8_tokens_have_scales_of_their_own():
    """Neither a token a million times as large, nor a label that is none, nor chunks change others'
    losses and gradients."""
    labels = LABELS.at[1, 2].set(-1)
    of = functools.partial(fp8_loss, reduction="none")

    def run(hidden, labels, chunk):
        loss = functools.partial(of, chunk_tokens=chunk)
        return with_gradients(lambda h, y: loss(h, HEAD, labels=y), hidden, labels, numbers=(0,))

    others = np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) != LENGTH + 2
    value, gradient = run(HIDDEN, LABELS, 13)
    for hidden, own, chunk in ((HIDDEN.at[1, 2].mul(1e6), LABELS, 13), (HIDDEN, labels, 13),
                               (HIDDEN, LABELS, 5), (HIDDEN, LABELS, None)):  # fmt: skip
        other, of_hidden = run(hidden, own, chunk)
        np.testing.assert_allclose(other[others], value[others], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(of_hidden[others], gradient[others], rtol=1e-5, atol=1e-6)
    assert np.isnan(run(HIDDEN, labels, 13)[1][1, 2]).all()


@pytest.mark.parametrize("products", FP8)
def test_fp8_numbers_that_are_none_show(products):
    loss = functools.partial(layers.linear_cross_entropy, products=products)
    for given in ((HIDDEN.at[0, 0, 0].set(jnp.inf), HEAD), (HIDDEN, HEAD.at[0, 0].set(jnp.nan))):
        value, gradients = compiled(jax.value_and_grad(loss, (0, 1)), *given, LABELS)
        assert not np.isfinite(value)
        assert all(np.isnan(g).any() for g in gradients)


def equations(jaxpr, scanned=False):
    """All operations of a program, and whether each is in a loop."""
    for equation in jaxpr.eqns:
        yield equation, scanned
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner, scanned or equation.primitive.name == "scan")


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@pytest.mark.parametrize(("products", "axis"), [("input", 1), *BOTH])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_product_that_is_not_asked_for(products, axis, reduction):
    """One for the loss, one for each gradient; `none` computes the logits twice.

    Of the head, only what they read is quantized.
    """
    hidden, head = HIDDEN.astype(jnp.bfloat16), (HEAD if axis else HEAD.T).astype(jnp.bfloat16)

    def loss(hidden, head):
        return layers.linear_cross_entropy(
            hidden, head, LABELS, reduction=reduction, products=products, vocab_axis=axis, **CHUNKED
        ).sum()

    forward = (E4M3, E4M3) if products == "fp8" else ("bfloat16", "bfloat16")
    again = [forward] if reduction == "none" else []
    backward = ("bfloat16", "bfloat16") if products == "input" else (E5M2, E4M3)
    for numbers in ((), (0,), (1,), (0, 1)):
        function = jax.grad(loss, numbers) if numbers else loss
        program = list(equations(jax.make_jaxpr(function)(hidden, head).jaxpr))
        dots = [
            tuple(str(x.aval.dtype) for x in one.invars)
            for one, _ in program
            if one.primitive.name == "dot_general"
        ]
        assert dots == [forward, *(again if numbers else []), *[backward] * len(numbers)]
        of_head = [
            in_a_chunk
            for one, in_a_chunk in program
            if one.primitive.name == "convert_element_type"
            and one.outvars[0].aval.dtype == E4M3
            and one.outvars[0].aval.shape == head.shape
        ]
        forwards = (products == "fp8") * (1 + len(again) * bool(numbers))
        assert of_head == [False] * (forwards + (0 in numbers and products != "input")), numbers


def test_fp8_under_transformations():
    heads = jnp.stack([HEAD, -2 * HEAD])
    gradients = jax.value_and_grad(functools.partial(fp8_loss, **CHUNKED), (0, 1))
    found = compiled(jax.vmap(gradients, (None, 0, None)), HIDDEN, heads, LABELS)
    single = jax.jit(gradients)
    wanted = [single(HIDDEN, head, LABELS) for head in heads]
    assert_close(found, jax.tree.map(lambda *x: jnp.stack(x), *wanted))

    def total(hidden, head):
        @jax.checkpoint
        def body(sum, own):
            return sum + fp8_loss(own[0], head, own[1], chunk_tokens=5), None

        return jax.lax.scan(body, 0.0, (hidden, LABELS))[0]

    def loop(hidden, head):
        return sum(
            fp8_loss(h, head, y, chunk_tokens=5) for h, y in zip(hidden, LABELS, strict=True)
        )

    assert_close(with_gradients(total, HIDDEN, HEAD), with_gradients(loop, HIDDEN, HEAD))


@pytest.mark.parametrize("products", FP8)
def test_fp8_gradients_have_no_derivative(products):
    """It would be a part of the truth; the gradient of weights is exact."""
    loss = functools.partial(layers.linear_cross_entropy, products=products)
    with pytest.raises(TypeError, match=f"products='{products}'"):
        jax.grad(lambda h: jax.grad(loss)(h, HEAD, LABELS).sum())(HIDDEN)

    def of(weights):
        return loss(HIDDEN, HEAD, LABELS, weights=weights, reduction="sum")

    each = loss(HIDDEN, HEAD, LABELS, reduction="none")
    np.testing.assert_allclose(jax.grad(of)(WEIGHTS), each, rtol=1e-6)


def test_fp8_options_that_are_refused():
    with pytest.raises(ValueError, match="products must be one of input, fp8, fp8-gradients"):
        layers.linear_cross_entropy(HIDDEN, HEAD, LABELS, products="int8")
    with pytest.raises(ValueError, match="precision='highest' with products='fp8'"):
        fp8_loss(HIDDEN, HEAD, LABELS, precision="highest")
    with jax.enable_x64(True):
        wide = jnp.zeros((3, 4), jnp.float64)
        with pytest.raises(ValueError, match="float64 with products='fp8'"):
            fp8_loss(wide, wide.T, jnp.zeros(3, jnp.int32))


def run_fp8(axis, weighted):
    head = HEAD if axis else HEAD.T
    weights = WEIGHTS if weighted else None
    loss = functools.partial(fp8_loss, labels=LABELS, weights=weights, vocab_axis=axis)
    return compiled(jax.value_and_grad(loss, (0, 1)), HIDDEN, head)


fp8_on_one = functools.cache(run_fp8)


@pytest.mark.parametrize(
    ("name", "how", "axis", "weighted"),
    rows(CASES, OFTEN[::2])
    + [("all", "specs", 1, True), ("tensor", "auto", 1, False)]
    + rows([("all", "explicit", 0, True)], []),
)
def test_fp8_on_a_mesh(name, how, axis, weighted):
    """The loss of one device: rows and the head have the same scales. Sums for the head's gradient
    have a scale on each device, and so have parts of a vocabulary in the gradient of logits."""
    value, *found = on_a_mesh(name, how, axis, weighted, chunk_tokens=5, products="fp8")
    same, wanted = fp8_on_one(axis, weighted)
    np.testing.assert_allclose(value, same, rtol=1e-5)
    for a, b in zip(found, wanted, strict=True):
        assert distance(a, b) <= tol.FP8_OTHER_SCALES
    if "tensor" not in LAYOUTS[name][0] or how == "auto":
        assert_close(found[0], wanted[0])


def of_cuda(axis, tokens=256, width=256, vocab=512):
    hidden, labels = (jax.ShapeDtypeStruct((2, tokens // 2, *more), kind)
                      for more, kind in (((width,), jnp.bfloat16), ((), jnp.int32)))  # fmt: skip
    shape = (width, vocab) if axis else (vocab, width)

    def gradients(*given):
        return jax.value_and_grad(functools.partial(fp8_loss, vocab_axis=axis), (0, 1))(*given)

    return lower_for_cuda(gradients, hidden, jax.ShapeDtypeStruct(shape, jnp.bfloat16), labels)


@pytest.mark.parametrize("axis", rows([0, 1], [0]))
def test_fp8_products_reach_a_gpu(axis, on_a_gpu, monkeypatch):
    """As FP8 products of XLA, behind kernels that quantize; on Hopper as kernels."""
    text = of_cuda(axis)
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(lines) == 3
    assert sum(line.count("xf8E4M3FN>") for line in lines) == 4  # of two, and one in each other
    assert sum(line.count("xf8E5M2>") for line in lines) == 2
    rows = ["quantize_rows", "quantize_rows", "quantize_transposed"]
    assert sorted(kernels_in(text)) == rows
    monkeypatch.setattr(fp8_flow, "product_reason", lambda *_: None)
    both = ["fp8_quantize_both", "fp8_transpose"]
    if platform.has_mosaic_gpu():
        monkeypatch.setattr(platform, "not_hopper_reason", lambda: None)
        rows += ["quantized_product"] * 3
    else:  # the kernels around the product of this JAX
        plain = quantized_matmul.multiply_plain
        monkeypatch.setattr(fp8_flow, "multiply", plain)
    assert sorted(kernels_in(of_cuda(axis))) == sorted(both + rows)
