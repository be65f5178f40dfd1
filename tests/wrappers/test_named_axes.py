"""Arrays with named axes, as haliax has them, in parameters and states, and shardings by names.

Levanter gives each array of a training state the mesh axes to which it maps the names of its axes.
"""

import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem.sharding import state_shardings
from tests.checkpoint_cases import abstract, assert_same_bits
from tests.compilation import SAME_BITS
from tests.contract_cases import code_differences
from tests.integration_cases import mesh_of
from tests.tiers import in_turn, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*(blocks of .* are a guess|stored in 4 bits)")
RATE = 1e-2
STORAGE, FOUR = lowmem.Storage(policy=lowmem.Policy(min_size=0)), lowmem.Storage.four_bit()
MAPPING = {"embed": "data"}
MESH = functools.partial(mesh_of, data=4)


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


class _Checked:
    """haliax checks its constructor's arguments; these check what JAX unflattens as well."""

    unflattened: ClassVar[bool] = True

    def __post_init__(self):
        if self.unflattened:
            self.check()

    def check(self):
        names, array = names_of(self), self.array
        if len({*names}) < len(names):
            raise ValueError(f"axes must be unique: {names}")
        if not (hasattr(array, "dtype") and hasattr(array, "shape")):  # a bool, no leaf, ...
            return
        axes = axes_of(self)
        sizes = [getattr(axis, "size", n) for axis, n in zip(axes, array.shape, strict=False)]
        if len(names) != len(array.shape) or sizes != [*array.shape]:
            raise ValueError(f"axes {axes} do not fit the shape {array.shape}")

    def tree_flatten(self):
        return (self.array,), axes_of(self)

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(*children, axes)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Named(_Checked):
    """haliax 1.4: axes have names and sizes."""

    array: Any
    axes: tuple[Axis, ...]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class NamedByString(_Checked):
    """marin-haliax 0.2: the sizes are the array's."""

    array: Any
    axis_names: tuple[str, ...]


def axes_of(node):
    return node.axes if isinstance(node, Named) else node.axis_names


def name_of(axis):
    return getattr(axis, "name", axis)


def is_leaf(node):
    return is_named(node) or isinstance(node, optax.MaskedNode)


def is_named(node):
    return isinstance(node, _Checked)


def names_of(node):
    return tuple(map(name_of, axes_of(node)))


def named(array, *names, cls=Named):
    sizes = array.shape if cls is Named else names
    axes = tuple(map(Axis, names, sizes)) if cls is Named else names
    return cls(array, axes)


SHAPES = {
    "down": ((256, 2048), ("mlp", "embed")),  # 64 groups of the sharded axis
    "up": ((2048, 160), ("embed", "mlp")),
    "norm": ((2048,), ("embed",)),
    "scale": ((), ()),
}


def params_of(dtype=jnp.float32, cls=Named):
    rng = np.random.default_rng(0)

    def leaf(shape, names):
        return named(jnp.asarray(rng.normal(size=shape), dtype), *names, cls=cls)

    return {key: leaf(*of) for key, of in SHAPES.items()}


def plain(tree):
    return jax.tree.map(lambda x: x.array if is_named(x) else x, tree, is_leaf=is_named)


def shardings(tree, mesh):
    """By names alone, without a look at shapes: haliax's `pspec_for` and `named_jit`."""

    def of_node(node):
        names = names_of(node) if is_named(node) else ()
        return NamedSharding(mesh, P(*map(MAPPING.get, names)))

    return jax.tree.map(of_node, tree, is_leaf=is_named)


def assert_fits(tree):
    """The shardings by names can be those of the arrays."""
    for node, sharding in zip(
        jax.tree.leaves(tree, is_leaf=is_named), jax.tree.leaves(shardings(tree, MESH())),
        strict=True,
    ):  # fmt: skip
        if is_named(node):
            node.check()
        for x in jax.tree.leaves(node):
            sharding.shard_shape(x.shape)


def update(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


NAMES = ["flash_adamw", "flash_lion", "flash_adam_mini", "flash_factored_adamw"]


def made(name="flash_adamw", **storage):
    return getattr(lowmem, name)(RATE, storage=dataclasses.replace(STORAGE, **storage))


@pytest.mark.parametrize(
    ("name", "dtype"),
    rows(
        itertools.product(NAMES, [jnp.float32, jnp.bfloat16]),
        [("flash_adam_mini", jnp.float32), ("flash_factored_adamw", jnp.bfloat16)],
    ),
)
def test_sharded_by_names(name, dtype):
    tx, mesh = made(name), MESH()
    params = {key: x for key, x in params_of(dtype).items() if key in ("down", "up")}
    state = jax.eval_shape(tx.init, params)
    places = shardings((params, state), mesh)
    init = jax.jit(tx.init, out_shardings=places[1], compiler_options=SAME_BITS)
    step = jax.jit(functools.partial(update, tx), out_shardings=places, compiler_options=SAME_BITS)
    params = jax.device_put(params, places[0])
    new, state = step(params, init(params), params)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(tx.init, params))
    shared = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
    # of factored moments, sums of rows or columns are on every device
    most = 0.27 if name == "flash_factored_adamw" else 0.26
    assert sum(shared) <= most * sum(x.nbytes for x in jax.tree.leaves(state))
    alone = plain(jax.device_put(jax.device_get(params), jax.devices()[0]))
    other, of_other = update(tx, alone, tx.init(alone), alone)
    gap, share = code_differences(state, of_other)
    assert gap <= 1 and share <= 1e-3  # docs/guides/sharding.md
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-2)


WRAPPED = {
    "chain": lambda tx: lowmem.chain(optax.clip_by_global_norm(1.0), tx),
    "masked": lambda tx: optax.masked(tx, dict.fromkeys(SHAPES, True) | {"scale": False}),
    "partition": lambda tx: optax.partition(
        {"ours": tx, "sgd": optax.sgd(RATE)}, dict.fromkeys(SHAPES, "ours") | {"scale": "sgd"}
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "accumulate": lambda tx: lowmem.accumulate_gradients(tx, 2, "bfloat16"),
    "ema": lambda tx: lowmem.track_master_ema(tx, 0.9),
    "gaussws": lambda tx: lowmem.gaussws_noise(tx),
}
OTHERS = {
    **{name: functools.partial(made, name) for name in (*NAMES[1:], "flash_muon")},
    "four bits": lambda: made(mu=FOUR.mu, nu=FOUR.nu),
    "four bits, adam_mini": lambda: lowmem.flash_adam_mini(RATE, storage=FOUR),
    "four bits, factored": lambda: lowmem.flash_factored_adamw(RATE, storage=FOUR),
    "apply_if_finite": lambda: optax.apply_if_finite(made(update_dtype="gradient"), 3),
    "compress_state": lambda: lowmem.split_master_weights(
        lowmem.compress_state(
            optax.adamw(RATE),
            mu=lowmem.codecs.softsign(),
            nu=lowmem.codecs.sqrt(),
            policy=STORAGE.policy,
        )
    ),
}
EVERY = {name: lambda make=make: make(made()) for name, make in WRAPPED.items()} | OTHERS


@pytest.mark.parametrize(("name", "cls"), in_turn(EVERY, [Named, NamedByString]))
def test_every_array_fits_its_axes(name, cls, monkeypatch):
    tx = EVERY[name]()
    if name == "compress_state":  # which asks the optimizer inside for arrays of one element
        monkeypatch.setattr(_Checked, "unflattened", False)
    for dtype in jnp.float32, jnp.bfloat16:
        params = jax.eval_shape(lambda dtype=dtype: params_of(dtype, cls))
        state = jax.eval_shape(tx.init, params)
        assert_fits(state)
        for step in functools.partial(update, tx), functools.partial(lowmem.step, tx):
            new = jax.eval_shape(step, params, state, params)
            assert jax.tree.structure(new) == jax.tree.structure((params, state))
            assert_same_shapes(new, (params, state))


def assert_same_shapes(one, other):
    assert jax.tree.map(jnp.shape, jax.tree.leaves(one)) == jax.tree.map(
        jnp.shape, jax.tree.leaves(other)
    )


@pytest.mark.parametrize("cls", [Named, NamedByString])
def test_names_of_arrays_with_other_shapes(cls):
    """An axis keeps its name where any mesh axis that divides the parameter divides it."""
    params = jax.eval_shape(lambda: params_of(cls=cls))

    def names(tx, key):
        state = jax.eval_shape(tx.init, params)
        return {f: names_of(getattr(state, f)[key]) for f in ("mu", "mu_scale", "nu", "correction")}

    wide = dict(mu=("mlp", "embed"), mu_scale=("mlp", "embed"), correction=())
    assert names(made(), "down") == {**wide, "nu": ("mlp", "embed")}
    assert names(made(), "up")["mu_scale"] == ("embed", "mlp_groups")
    assert names(made("flash_adam_mini"), "down")["nu"] == ("mlp_groups", "embed_groups")
    assert names(made("flash_factored_adamw"), "down")["nu"] == ("groups_0",)
    four_bit = names(lowmem.flash_adamw(RATE, storage=FOUR), "up")
    assert four_bit["mu"] == ("embed", "mlp_groups")
    assert names(made(), "scale") == dict.fromkeys(("mu", "mu_scale", "nu", "correction"), ())


def test_a_mesh_decides_which_names_stay():
    """128 columns are 4 groups; a step without the mesh leaves the names of `init`."""
    params = {"w": named(jnp.ones((8, 128)), "mlp", "embed"), "v": named(jnp.ones(96), "embed")}
    tx = made()
    with jax.set_mesh(mesh_of(data=2, model=2)):
        state = jax.eval_shape(tx.init, params)
    assert {key: names_of(x) for key, x in state.mu_scale.items()} == {
        "w": ("mlp", "embed"), "v": ("embed_groups",)
    }  # fmt: skip
    with jax.set_mesh(mesh_of(data=8)):
        other = jax.eval_shape(tx.init, params)
    assert names_of(other.mu_scale["w"]) == ("mlp", "embed_groups")
    new = jax.eval_shape(tx.update, params, state, params)[1]
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_map_params():
    params = params_of()
    specs = {key: P(*map(MAPPING.get, names)) for key, (_, names) in SHAPES.items()}
    for make in (lambda tx: tx, *WRAPPED.values()):
        tx = make(made())
        state = jax.eval_shape(tx.init, params)
        found = optax.tree.map_params(tx, lambda _, spec: spec, state, specs,
                                      is_leaf=is_leaf)  # fmt: skip
        for _, tree in optax.tree.get_all_with_path(found, "mu_scale"):
            assert tree["up"] == specs["up"]
        same = optax.tree.map_params(tx, lambda x: x, state)
        assert jax.tree.structure(same) == jax.tree.structure(state)


def test_state_shardings():
    tx, mesh = made(), MESH()
    params = jax.device_put(params_of(), shardings(params_of(), mesh))
    found = state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=found)(params)
    assert state.mu_scale["up"].array.sharding.spec == P("data", None)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(tx.init, params))


@pytest.mark.parametrize("name", rows(NAMES, ["flash_adamw"]))
def test_checkpoints(name, tmp_path):
    tx = made(name)
    params, state = lowmem.init(tx, params_of())
    params, state = lowmem.step(tx, params, state, params)
    checkpoint.save(tmp_path / "ours", tx, params, state, 1)
    assert_same_bits(checkpoint.restore(tmp_path / "ours", tx, params), (params, state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", abstract(state))
    assert_same_bits(restored, state)
    masters = lowmem.master_params(params, state)
    assert jax.tree.structure(masters) == jax.tree.structure(params)


@pytest.mark.parametrize("name", rows(["flash_adamw", "flash_adam_mini"], ["flash_adam_mini"]))
def test_conversion_from_and_to_optax(name):
    tx, adamw, params = made(name), optax.adamw(RATE), params_of()
    weights, state = checkpoint.from_optax(tx, adamw.init(params), params, jnp.float32)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    _, back = checkpoint.to_optax(tx, state, weights, adamw)
    assert jax.tree.structure(back) == jax.tree.structure(adamw.init(params))


def test_leaves_have_the_names_of_plain_arrays():
    """Block structures read them, and patterns of a policy; random bits are theirs."""
    params = {"lm_head": {"kernel": named(jnp.ones((64, 32)), "embed", "vocab")}}
    tx = lowmem.flash_adam_mini(RATE)
    state = tx.init(params)
    assert_same_bits(plain(state), tx.init(plain(params)))
    assert state.nu["lm_head"]["kernel"].array.shape == (1, 32)
