"""Gradient release: the ordinary step, bit for bit, without the stack of gradients."""

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
from optax_lowmem._src.arrays import random
from optax_lowmem._src.arrays.groups import Tile
from optax_lowmem._src.optim.step import gpu as gpu_step
from tests import launch_cases, small_leaves, tolerances
from tests.compilation import FULL_COMPILE, SAME_BITS
from tests.contract_cases import POLICY, RULES, assert_alike, assert_same, changes, distance
from tests.tiers import rows

LAYERS, WIDTH, WORDS = 3, 40, 17
BLOCKS = lowmem.blocks.Structure(default="elementwise", rules=(("layers/w?", (1,)),))
ACROSS = lowmem.blocks.Structure(default="elementwise", rules=(("layers/w1", (0, 1)),))
SOFTSIGN = lowmem.codecs.softsign()
MINI = ("q_adam_mini", "flash_adam_mini")
FEWER = (*MINI, "flash_factored_adamw")  # second moments than weights


# ---- a model: tied embedding, a weight that all layers share, one that nothing reads -------------
def row(vector):
    return vector[None, None]


def embed(rest, batch):
    return rest["embed"][batch["tokens"]]


def block(own, rest, x, batch):
    del batch
    h = (x * row(own["norm"])).astype(x.dtype)  # norms may be f32
    h = jnp.tanh(h @ own["w1"] + row(rest["shared"]))
    return x + h @ own["w2"]


def loss(rest, x, batch):
    logits = (x @ rest["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


MODEL = release.Layered(embed, {"layers": block}, loss)


def masters():
    rng = np.random.default_rng(0)

    def leaf(*shape, mean=0.0):
        return jnp.asarray(rng.normal(mean, 0.3, shape), jnp.float32)

    return {
        "embed": leaf(WORDS, WIDTH),
        "layers": {
            "norm": leaf(LAYERS, WIDTH, mean=1.0),
            "w1": leaf(LAYERS, WIDTH, 2 * WIDTH),
            "w2": leaf(LAYERS, 2 * WIDTH, WIDTH),
        },
        "shared": leaf(2 * WIDTH),
        "unread": leaf(5),
    }


def batches(count=1):
    rng = np.random.default_rng(1)
    draw = lambda: jnp.asarray(rng.integers(0, WORDS, (4, 6)))  # noqa: E731
    return [{"tokens": draw(), "targets": draw()} for _ in range(count)]


OF_LAYER = optax.contrib.MuonDimensionNumbers(1, 2)
MATRICES = {"embed": optax.contrib.MuonDimensionNumbers(), "shared": None, "unread": None,
            "layers": {"norm": None, "w1": OF_LAYER, "w2": OF_LAYER}}  # fmt: skip
# the rows of stacked norms as columns of one matrix
NORM_AS_MATRIX = {
    **MATRICES,
    "layers": {**MATRICES["layers"], "norm": optax.contrib.MuonDimensionNumbers()},
}


def make(name, learning_rate=lambda count: 1e-2 / (1 + count), **options):
    """An optimizer of the table, with small leaves compressed and blocks inside layers."""
    row = small_leaves.record(name.removesuffix("-int4"))
    storage = dataclasses.replace(row.make(1e-2).engine.storage, policy=POLICY)
    if name.endswith("-int4"):
        storage = lowmem.Storage.four_bit(policy=POLICY)
    if name == "flash_muon":
        options = {"muon_weight_dimension_numbers": MATRICES, **options}
    if name in MINI:
        options = {"blocks": BLOCKS, **options}
    return row.make(learning_rate, storage=storage, **options)


def ordinary(tx, model=MODEL, each=None):
    def step(params, state, batch):
        value, grads = jax.value_and_grad(model, has_aux=model.has_aux)(params, batch)
        if each is not None:
            grads = jax.tree.map(each, grads)
        return value, *lowmem.step(tx, grads, state, params)

    return step


def run(step, params, state, steps=3, options=SAME_BITS):
    compiled = jax.jit(step, compiler_options=options)
    for batch in batches(steps):
        value, params, state = compiled(params, state, batch)
    return value, params, state


def both(tx, params, state, model=MODEL, options=SAME_BITS, steps=3, **how):
    return [
        run(step, params, state, steps, options)
        for step in (ordinary(tx, model), release.train_step(tx, model, **how))
    ]


# ---- the same results ----------------------------------------------------------------------------
DTYPES = {
    "bfloat16": jnp.bfloat16,
    "float32": jnp.float32,
    "float16": jnp.float16,
    "mixed": lambda path, leaf: jnp.float32 if "norm" in path else jnp.bfloat16,
}

# each rule with every dtype, what differs from one in its codecs with one of them in turn
CASES = [
    (name, dtype)
    for i, name in enumerate(lowmem.OPTIMIZERS)
    for j, dtype in enumerate(DTYPES)
    if name in RULES or (i + j) % len(DTYPES) == 0
]
CASES += [("flash_adamw-int4", "bfloat16")]
OFTEN = [("flash_adamw", "bfloat16")]


def assert_moved_alike(start, found, wanted):
    """Muon's: its iterations enlarge last bits, of which 24 round to others."""
    begun = lowmem.master_params(*start)
    moved = [changes(begun, lowmem.master_params(*end[1:])) for end in (found, wanted)]
    exact = all(p.dtype == jnp.float32 for p in jax.tree.leaves(start[0]))
    assert distance(*moved) <= (tolerances.MUON_EXACT if exact else tolerances.MUON_ROUNDED)


@pytest.mark.parametrize("name, dtype", rows(CASES, OFTEN))
def test_it_is_the_ordinary_step(name, dtype):
    # below this threshold it does not show that RMS_t is taken layer by layer
    tx = make(name, **({"threshold": 1e3} if name == "stable_adamw" else {}))
    start = lowmem.init(tx, masters(), DTYPES[dtype])
    # an f32 weight shows the last bits of a mean or a product, and training drives them apart
    steps = 1 if name == "flash_muon" or name in FEWER and dtype in ("float32", "mixed") else 3
    if name in FEWER and name not in MINI and dtype == "float16":  # as does fp16 from the second on
        steps = 2
    wanted, found = both(tx, *start, steps=steps, per_layer=name == "stable_adamw")
    if name in FEWER:
        means = 1 if name in MINI else 3  # whose order an element's v depends on
        assert_alike(found, wanted, steps * means)
    elif name == "flash_muon":
        assert_moved_alike(start, found, wanted)
    else:
        assert_same(found, wanted)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found[1]):
        old = functools.reduce(lambda node, key: node[key.key], path, start[0])
        assert (old != leaf).any() or "unread" in str(path), path


@pytest.mark.full
@pytest.mark.parametrize(
    "options, said",
    [
        (dict(adaptive=True), "reduces over a whole tensor.*per_layer=True"),
        (
            dict(muon_weight_dimension_numbers=NORM_AS_MATRIX),
            "norm.*row or column axis of its matrices",
        ),
    ],
)
def test_layers_that_muon_cannot_take_apart(options, said):
    tx = make("flash_muon", **options)
    params, state = lowmem.init(tx, masters())
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(release.train_step(tx, MODEL), params, state, batches()[0])


@pytest.mark.full
@pytest.mark.parametrize("name", lowmem.OPTIMIZERS)
def test_it_is_the_ordinary_step_as_users_compile_it(name):
    tx = make(name, **({"threshold": 1e3} if name == "stable_adamw" else {}))
    muon = name == "flash_muon"
    start, steps = lowmem.init(tx, masters(), jnp.float32 if muon else jnp.bfloat16), 3 - 2 * muon
    wanted, found = both(
        tx, *start, options=FULL_COMPILE, steps=steps, per_layer=name == "stable_adamw"
    )
    if muon:
        assert_moved_alike(start, found, wanted)
    else:
        assert_alike(found, wanted, steps)


def test_gradients_are_those_of_a_loop_over_the_layers():
    """With a rate of 1 the step of plain SGD is the gradient; `Layered` plays no part in it."""

    def unrolled(params, batch):
        x = embed(params, batch)
        for i in range(LAYERS):
            own = {name: w[i] for name, w in params["layers"].items()}
            x = block(own, params, x, batch)
        return loss(params, x, batch)

    params, (batch,) = masters(), batches()
    tx = lowmem.flash_sgd(1.0)
    value, new, _ = jax.jit(release.train_step(tx, MODEL))(params, tx.init(params), batch)
    wanted, gradients = jax.jit(jax.value_and_grad(unrolled))(params, batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(MODEL(params, batch), wanted, rtol=1e-6)
    for old, now, g in zip(*map(jax.tree.leaves, (params, new, gradients)), strict=True):
        np.testing.assert_allclose(old - now, g, atol=1e-6)
    assert np.abs(gradients["shared"]).max() > 1e-3  # and of the embedding: it is tied


@pytest.mark.full
def test_stacks_in_turn_with_integers_in_x_and_an_aux():
    """Layers know their number; the later stack reads what only the first stage reads else."""

    def first(rest, batch):
        return embed(rest, batch), jnp.int32(0)

    def counting(own, rest, x, batch):
        h, number = x
        h = jnp.where(number == 1, -h, h)
        return block(own, rest, h, batch), number + 1

    def second(own, rest, x, batch):
        h, number = x
        h = h + jnp.tanh(h @ own["w"]) * row(rest["embed"][0])
        return h, number

    def last(rest, x, batch):
        return loss(rest, x[0], batch), {"layers": x[1]}

    model = release.Layered(first, {"layers": counting, "more/late": second}, last, has_aux=True)
    params = masters()
    rng = np.random.default_rng(2)
    w = jnp.asarray(rng.normal(0, 0.2, (2, WIDTH, WIDTH)), jnp.float32)
    params["more"] = {"late": {"w": w}, "unstacked": jnp.ones(3)}
    tx = make("flash_adamw")
    wanted, found = both(tx, *lowmem.init(tx, params), model)
    assert_same(found, wanted)
    assert found[0][1]["layers"] == LAYERS


def test_each_gradient_is_elementwise_work_on_it():
    tx = make("flash_lion")
    start = lowmem.init(tx, masters())
    wanted = run(ordinary(tx, each=jnp.sign), *start)
    assert_same(run(release.train_step(tx, MODEL, each_gradient=jnp.sign), *start), wanted)


@pytest.mark.full
def test_codes_of_a_second_moment_a_block():
    """Groups of 40 of the 80 values a layer of w1: they end where layers do, and round alike."""
    linear = lowmem.codecs.linear(signed=False)
    policy = dataclasses.replace(POLICY, exclude=("nu:layers/norm",))
    storage = lowmem.Storage(nu=linear, group_size=40, policy=policy)
    tx = lowmem.flash_adam_mini(1e-3, eps=1e-2, storage=storage, blocks=BLOCKS)
    params = masters()
    state = tx.init(params)
    assert state.nu["layers"]["w1"].dtype == jnp.uint8
    wanted, found = both(tx, params, state)
    assert_alike(found, wanted, steps=3)
    assert (np.asarray(found[2].nu["layers"]["w1"]) > 0).any()


def test_layers_round_second_moments_a_block_with_bits_of_their_own():
    """Every layer has the same gradient, so that rounding alone tells their codes apart."""
    gradient = jnp.linspace(0.1, 1, 64)[None]
    model = release.Layered(
        first=lambda rest, batch: batch,
        layers={"layers": lambda own, rest, x, batch: x + jnp.sum(own["w"] * gradient)},
        last=lambda rest, x, batch: x,
    )
    storage = lowmem.Storage(mu=None, nu=lowmem.codecs.linear(signed=False), policy=POLICY)
    blocks = lowmem.blocks.Structure(rules=(("layers/w", (1,)),))
    tx = lowmem.flash_adam_mini(1e-3, storage=storage, blocks=blocks)
    params, batch = {"layers": {"w": jnp.ones((LAYERS, 1, 64))}}, jnp.float32(0)
    state = tx.init(params)
    (_, _, wanted), (_, _, found) = (
        jax.jit(step, compiler_options=SAME_BITS)(params, state, batch)
        for step in (ordinary(tx, model), release.train_step(tx, model))
    )
    assert_same(found, wanted)
    codes = np.asarray(found.nu["layers"]["w"]).reshape(LAYERS, 64)
    assert (codes[0] != codes[1]).any() and (codes[1] != codes[2]).any()


def test_one_number_a_layer():
    """A leaf whose only axis is that of the layers, in f32; its gradient is a sum of a layer."""

    def scaled(own, rest, x, batch):
        return x + own["gain"] * jnp.tanh(x * row(own["norm"]))

    model = release.Layered(embed, {"layers": scaled}, loss)
    params = masters()
    params["layers"] = {"norm": params["layers"]["norm"], "gain": jnp.ones(LAYERS)}
    tx = make("flash_adamw")
    wanted, found = both(tx, *lowmem.init(tx, params), model)
    assert_alike(found, wanted, steps=3)
    assert (found[1]["layers"]["gain"] != 1).all()


def furthest(one, other):
    rows = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in rows)


@pytest.mark.full
def test_rms_of_each_layer_is_that_of_the_model_unrolled():
    """Rounded to nearest, so that names do not matter; the threshold makes RMS_t count."""
    storage = lowmem.Storage(policy=POLICY, rounding="nearest")
    tx = lowmem.stable_adamw(0.1, threshold=0.1, storage=storage)
    params = masters()
    leaves, treedef = jax.tree.flatten(params["layers"])
    apart = {**params, "layers": [treedef.unflatten(own) for own in zip(*leaves, strict=True)]}

    def unrolled(params, batch):
        x = embed(params, batch)
        for own in params["layers"]:
            x = block(own, params, x, batch)
        return loss(params, x, batch)

    def step(params, state, batch):
        value, grads = jax.value_and_grad(unrolled)(params, batch)
        return value, *lowmem.step(tx, grads, state, params)

    value, wanted, _ = run(step, apart, tx.init(apart))
    found_value, found, _ = run(
        release.train_step(tx, MODEL, per_layer=True), params, tx.init(params)
    )
    np.testing.assert_allclose(found_value, value, rtol=1e-5)
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *wanted["layers"])
    assert furthest(found["layers"], stacked) < 2e-5
    of_stack = run(ordinary(tx), params, tx.init(params))[1]["layers"]
    assert furthest(of_stack, stacked) > 1e-4


# ---- the same random bits in every implementation ------------------------------------------------
@pytest.mark.parametrize("shape, size, start", [((5, 7, 70), 2, 3), ((5, 64), 1, 4), ((96,), 1, 2)])
def test_a_part_draws_what_the_whole_has_there(shape, size, start):
    """Along axis 0, which of an array of rank 1 counts groups."""
    key = random.leaf_key(jnp.uint32(3), jnp.int32(7), "w")
    uniforms = jax.jit(random.uniforms, static_argnums=(1, 2, 3))
    whole = uniforms(key, shape, 32, "mu")
    lengths = [32 if len(shape) == 1 else 1, *shape[1:]]
    part = (size * lengths[0], *shape[1:])
    found = uniforms(random.part_keys(key, jnp.int32(start)), part, 32, "mu")
    at = start * lengths[0]
    np.testing.assert_array_equal(found, whole[at : at + part[0]])
    assert (found != uniforms(key, part, 32, "mu")).any()


@pytest.mark.full
def test_kernels_draw_for_a_part_too():
    tx = lowmem.flash_adamw(1e-3, storage=lowmem.Storage(policy=launch_cases.POLICY))
    case = launch_cases.make(tx, [(1, 7, 40), (1, 64)])
    case = dataclasses.replace(case, keys=random.part_keys(case.keys, jnp.int32(2)))
    kernel = functools.partial(gpu_step.launch, backend="interpret")
    launch_cases.compare(case, launch_cases.launch(case, kernel, Tile(256, 4)))


# ---- memory --------------------------------------------------------------------------------------
def compiled(step, tx, layers=8, width=64):
    """A step of 0.25M bf16 parameters in square layers, as XLA's CPU backend plans it."""

    def layer(own, rest, x, batch):
        return x + jnp.tanh(x @ own["w1"]) @ own["w2"]

    def last(rest, x, batch):
        return jnp.mean(jnp.square((x @ rest["head"]).astype(jnp.float32)))

    model = release.Layered(lambda rest, batch: batch, {"layers": layer}, last)
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    stack = {"w1": like((layers, width, 4 * width)), "w2": like((layers, 4 * width, width))}
    params = {"layers": stack, "head": like((width, 8))}
    state = jax.eval_shape(tx.init, params)
    jitted = jax.jit(step(tx, model), donate_argnums=(0, 1))
    found = jitted.lower(params, state, like((4, width))).compile().memory_analysis()
    return found, sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def test_gradients_of_all_layers_never_exist():
    """Bytes per parameter of temporaries; XLA's CPU backend copies a stack too before jax 0.11."""
    tx = lowmem.flash_adamw(1e-3)
    plain, count = compiled(ordinary, tx)
    released, _ = compiled(release.train_step, tx)
    for found in (plain, released):  # all of parameters and state is written in place
        assert found.output_size_in_bytes - found.alias_size_in_bytes <= 1024
    assert plain.temp_size_in_bytes > 4 * count
    newer = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)
    most = 2.5 if newer else 0.75 * plain.temp_size_in_bytes / count
    assert released.temp_size_in_bytes < most * count


# ---- several devices -----------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize("axes", ["data", "model"])
def test_on_an_auto_mesh(axes):
    """Batch sharded, or columns of the layers: XLA adds what it must; sums have another order."""
    mesh = jax.make_mesh((2,), (axes,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tx = make("flash_sgd")
    params, state = lowmem.init(tx, masters(), jnp.float32)
    (batch,) = batches()
    step = jax.jit(release.train_step(tx, MODEL), compiler_options=SAME_BITS)
    wanted = step(params, state, batch)

    def spec(path, x):
        columns = axes == "model" and "layers" in str(path) and x.ndim == 3 and x.shape[-1] % 2 == 0
        return NamedSharding(mesh, P(None, None, "model") if columns else P())

    params, state = (
        jax.device_put(tree, jax.tree_util.tree_map_with_path(spec, tree))
        for tree in (params, state)
    )
    batch = jax.device_put(batch, NamedSharding(mesh, P("data") if axes == "data" else P()))
    assert_alike(step(params, state, batch), wanted, steps=3)


@pytest.mark.full
@pytest.mark.parametrize("check_vma", rows([True, False], [True]))
def test_inside_a_shard_map(check_vma):
    """Without check_vma nobody adds the gradients of the devices up: each_gradient does."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def last(rest, x, batch):
        value = loss(rest, x, batch)
        return jax.lax.pmean(value, "data") if check_vma else value

    tx = make("flash_sgd")
    params, state = lowmem.init(tx, masters(), jnp.float32)
    (batch,) = batches()
    mean = None if check_vma else lambda g: jax.lax.pmean(g, "data")
    step = release.train_step(tx, dataclasses.replace(MODEL, last=last), each_gradient=mean)
    local = jax.shard_map(
        lambda *args: step(*args)[1:], mesh=mesh, in_specs=(P(), P(), P("data")),
        out_specs=(P(), P()), check_vma=check_vma,
    )  # fmt: skip
    found = jax.jit(local, compiler_options=SAME_BITS)(params, state, batch)
    wanted = jax.jit(release.train_step(tx, MODEL))(params, state, batch)[1:]
    assert_alike(found, wanted, steps=3)


# ---- limits --------------------------------------------------------------------------------------
def clipped():
    return lowmem.chain(optax.adaptive_grad_clip(1.0), lowmem.flash_adamw(1e-3))


@pytest.mark.parametrize(
    "make_tx, name",
    [
        (clipped, "chain"),
        (lambda: optax.chain(optax.clip_by_global_norm(1.0), lowmem.flash_adamw(1e-3)), "chain"),
        (lambda: lowmem.accumulate_gradients(lowmem.flash_adamw(1e-3), 2, "bfloat16"), "accumul"),
        (lambda: lowmem.accumulate_gradients(lowmem.flash_adamw(1e-3), 2, "moments"), "accumul"),
        (lambda: optax.MultiSteps(lowmem.flash_adamw(1e-3), 2), "MultiSteps"),
        (lambda: optax.apply_if_finite(lowmem.flash_adamw(1e-3), 2), "apply_if_finite"),
        (lambda: lowmem.compress_state(optax.adamw(1e-3), mu=SOFTSIGN), "compress"),
        (lambda: optax.adamw(1e-3), "chain"),
    ],
)
def test_what_may_need_all_gradients_is_refused(make_tx, name):
    with pytest.raises(ValueError, match=rf"takes one of our optimizers itself.*not \S*{name}"):
        release.train_step(make_tx(), MODEL)


@pytest.mark.parametrize(
    "make_tx, match",
    [
        (lambda: make("stable_adamw"), r"'layers/norm' \[3, 40\].*per_layer=True"),
        (
            lambda: lowmem.flash_adam_mini(1e-2, blocks=ACROSS),
            r"'layers/w1'.*share a second moment.*Structure\(rules=\[\('layers/w1', \(1, 2\)\)\]\)",
        ),
        (
            lambda: lowmem.flash_adam_mini(
                1e-2,
                blocks=BLOCKS,
                storage=lowmem.Storage(nu=lowmem.codecs.linear(signed=False), policy=POLICY),
            ),
            r"'layers/.*nu has \d+ values per layer in groups of 32.*Policy\(exclude=\('nu:layers/",
        ),
    ],
)
def test_layers_that_depend_on_each_other_are_refused(make_tx, match):
    tx, params = make_tx(), masters()
    state = tx.init(params)
    with pytest.raises(ValueError, match=match):
        release.train_step(tx, MODEL)(params, state, batches()[0])


def test_codes_along_the_axis_of_layers_are_refused():
    tx, params = make("flash_lion"), masters()
    params["layers"]["gain"] = jnp.ones(64)
    params["layers"] |= {name: jnp.ones((64, 2)) for name in ("norm", "w1", "w2")}
    with pytest.raises(ValueError, match=r"'layers/gain'.*Policy\(exclude=\('layers/gain',\)\)"):
        release.train_step(tx, MODEL)(params, tx.init(params), batches()[0])


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda p: p.pop("layers"), "there is no 'layers' in the parameters .embed"),
        (lambda p: p["layers"].update(norm=jnp.ones((2, WIDTH))), "'layers/w1' has 3 .*'layers/n"),
        (lambda p: p["layers"].update(norm=jnp.ones(())), "'layers/norm'.*no layer axis"),
        (lambda p: p.update(layers={}), "'layers'"),
    ],
)
def test_what_is_no_stack_is_refused(change, match):
    tx, params = make("flash_lion"), masters()
    change(params)
    for call in (MODEL, lambda p, b: release.train_step(tx, MODEL)(p, tx.init(p), b)):
        with pytest.raises(ValueError, match=match):
            call(params, batches()[0])


def test_bad_arguments():
    tx = make("flash_lion")
    with pytest.raises(ValueError, match="bare direction"):
        release.train_step(lowmem.scale_by_flash_adam(), MODEL)
    with pytest.raises(TypeError, match="release.Layered, got dict"):
        release.train_step(tx, masters())
    with pytest.raises(TypeError, match="arguments for a loss function"):
        release.train_step(tx, MODEL, layers="layers")
    with pytest.raises(TypeError, match="each_gradient"):
        release.train_step(tx, MODEL, each_gradient=1.0)
    with pytest.raises(ValueError, match="implementation must be one of"):
        release.train_step(tx, MODEL, implementation="cuda")
    with pytest.raises(ValueError, match="layers is a dict"):
        release.Layered(embed, {}, loss)
    with pytest.raises(TypeError, match="stage 'layers' of the model"):
        release.Layered(embed, {"layers": None}, loss)


def test_a_loss_that_is_no_number_and_a_state_of_another():
    tx, params, (batch,) = make("flash_lion"), masters(), batches()
    vector = dataclasses.replace(MODEL, last=lambda rest, x, batch: x.sum((0, 1)))
    with pytest.raises(TypeError, match=r"must be one float; this is float32\[40\]"):
        release.train_step(tx, vector)(params, tx.init(params), batch)
    other = make("flash_adamw").init(params)
    with pytest.raises(ValueError, match="made by another optimizer"):
        release.train_step(tx, MODEL)(params, other, batch)
