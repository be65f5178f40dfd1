"""adam_mini against the adam-mini package, and the affine codecs against Q-Adam-mini's own."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden import make_adam_mini as peer

import optax_lowmem as lowmem
from optax_lowmem import codecs
from tests import tolerances as tol
from tests.oracle import adam_mini as oracle

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = dict(np.load(FOLDER / "adam_mini.npz"))
META = json.loads(str(GOLDEN.pop("meta")))
CODEC = dict(np.load(FOLDER / "q_adam_mini_codec.npz"))
GROUPS = json.loads(str(CODEC.pop("meta")))["groups"]
WORDS = {"spans": "spans 0", "ties": "ties", "ends": "ends at 0", "one": "one sign"}

# ---- the optimizer -------------------------------------------------------------------------------
PATHS = {  # the package's names -> ours, whose kernels are (in, out)
    "embed_tokens.weight": "embed_tokens/embedding",
    "layers.0.input_norm.weight": "layers_0/input_norm/scale",
    "layers.0.mlp.up_proj.bias": "layers_0/mlp/up_proj/bias",
}
PATHS |= {
    name: name.replace("layers.0", "layers_0").replace(".weight", "/kernel").replace(".", "/")
    for name in peer.SHAPES
    if name not in PATHS
}
MEANS = {
    "embed_tokens/embedding": (20, 1), "layers_0/self_attn/q_proj/kernel": (1, 4),
    "layers_0/self_attn/k_proj/kernel": (1, 4), "layers_0/self_attn/v_proj/kernel": (1, 16),
    "layers_0/self_attn/o_proj/kernel": (1, 16), "layers_0/mlp/up_proj/kernel": (1, 24),
    "layers_0/mlp/down_proj/kernel": (1, 16), "layers_0/mlp/up_proj/bias": (24,),
    "layers_0/input_norm/scale": (1,), "lm_head/kernel": (1, 20),
}  # fmt: skip


def flat(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def ours(arrays):
    """A tree of ours from the package's arrays."""
    tree = {}
    for name, array in arrays.items():
        *above, last = PATHS[name].split("/")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = jnp.asarray(array.T if last == "kernel" else array)
    return tree


def build(**structure):
    """Adam-mini with the package's blocks and decay, and its hyperparameters."""
    hyper = META["hyperparameters"]
    return lowmem.adam_mini(
        hyper["lr"],
        *hyper["betas"],
        hyper["eps"],
        weight_decay=hyper["weight_decay"],
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        blocks=lowmem.blocks.Structure(
            **{"heads": peer.HEADS, "rules": (("*/bias", "elementwise"),), **structure}
        ),
    )


def trajectory(tx, fused):
    """Our weights after each step, by path."""
    params = ours(peer.weights())
    state = tx.init(params)

    @jax.jit
    def step(grads, state, params):
        if fused:
            return lowmem.step(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    history = []
    for grads in peer.gradients():
        params, state = step(ours(grads), state, params)
        history.append(flat(params))
    return history, state


def assert_follows(found, wanted):
    assert set(found) == set(wanted)
    for path, leaf in wanted.items():
        np.testing.assert_allclose(
            found[path], leaf, rtol=tol.ADAM_MINI_RTOL, atol=tol.ADAM_MINI_ATOL, err_msg=path
        )


def stored(t):
    return flat(ours({name: GOLDEN[f"{name}/{t}"] for name in peer.SHAPES}))


def test_provenance():
    assert META["versions"]["adam-mini"] == "1.1.1" and META["hyperparameters"] == peer.HYPER
    assert META["steps"] == [0, *peer.KEPT] and peer.KEPT[-1] == peer.STEPS
    for path, leaf in flat(ours(peer.weights())).items():  # the generator makes what it made then
        np.testing.assert_array_equal(leaf, stored(0)[path])


@pytest.mark.parametrize("fused", [False, True], ids=["update", "step"])
def test_the_packages_stored_weights(fused):
    history, state = trajectory(build(), fused)
    assert {path: leaf.shape for path, leaf in flat(state.nu).items()} == MEANS
    for t in peer.KEPT:
        assert_follows(history[t - 1], stored(t))


def test_the_package_is_the_same():
    why = "needs the package: pip install torch adam-mini==1.1.1"
    pytest.importorskip("torch", reason=why)
    pytest.importorskip("adam_mini", reason=why)
    history, _ = trajectory(build(), True)
    for found, theirs in zip(history, peer.run(), strict=True):
        assert_follows(found, flat(ours(theirs)))


# ---- the codec -----------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnums=0)
def encode(codec, x):
    return codecs.encode_array(codec, x, 256)


@functools.partial(jax.jit, static_argnums=0)
def decode(codec, codes, scales):
    return codecs.decode_array(codec, codes, scales, 256)


def rows(*kinds):
    """Return the indices of the groups of these kinds."""
    found = [i for i, name in enumerate(GROUPS) if any(name.startswith(WORDS[k]) for k in kinds)]
    assert found
    return found


def parts(scales):
    """Delta and z of stored words, from their definition."""
    words = np.asarray(scales)[..., 0]
    assert words.dtype == np.uint32
    return np.uint32(words >> 8 << 7).view(np.float32), np.int32(words & 0xFF) - 128


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_codes_and_zero_points_are_the_references(jit):
    """Of every group that holds 0, ties included: theirs lie in 0 to 255, ours in -128 to 127."""
    kept = rows("spans", "ties", "ends")
    with jax.disable_jit(not jit):
        codes, scales = encode(codecs.affine_paper(), CODEC["x"][kept])
    delta, zero = parts(scales)
    assert codes.dtype == jnp.int8
    np.testing.assert_array_equal(oracle.codes_of(codes, zero) + 128, CODEC["codes"][kept])
    np.testing.assert_array_equal(zero + 128, CODEC["zero"][kept])
    np.testing.assert_allclose(delta, CODEC["scale"][kept], rtol=tol.AFFINE_DELTA)


def test_groups_of_one_sign_lose_what_the_reference_loses():
    kept = rows("one")
    codes, scales = encode(codecs.affine_paper(), CODEC["x"][kept])
    _, zero = parts(scales)
    np.testing.assert_array_equal(oracle.codes_of(codes, zero) + 128, CODEC["codes"][kept])
    back = np.asarray(decode(codecs.affine_paper(), codes, scales))
    np.testing.assert_allclose(back, CODEC["decoded"][kept], rtol=tol.AFFINE_DECODE)


def test_decoded_values_are_the_references():
    codes, scales = encode(codecs.affine_paper(), CODEC["x"])
    back = decode(codecs.affine_paper(), codes, scales)
    np.testing.assert_allclose(back, CODEC["decoded"], rtol=tol.AFFINE_DECODE)


def test_ours_is_within_delta_where_the_reference_is_not():
    """Relative to the group's largest |x|: theirs loses 50 to 100 %, ours is under Delta."""
    kept = rows("one")
    x = np.float64(CODEC["x"][kept])
    lost = np.abs(CODEC["decoded"][kept] - x).max(-1) / np.abs(x).max(-1)
    assert (lost >= 0.499).all() and lost.max() > 0.99
    codes, scales = encode(codecs.affine(), CODEC["x"][kept])
    delta, _ = parts(scales)
    error = np.abs(np.float64(decode(codecs.affine(), codes, scales)) - x)
    assert (error.max(-1) < delta).all()
    assert (delta < np.abs(x).max(-1) / 253).all()


def test_ours_is_the_exact_quantizer():
    """Codes less their zero-point, and Delta, against float64; nothing clipped, 0 exact."""
    x = np.float64(CODEC["x"])
    codes, scales = encode(codecs.affine(), CODEC["x"])
    delta, zero = parts(scales)
    wanted, exact, z = oracle.zero_inside(x)
    np.testing.assert_allclose(delta, exact, rtol=tol.AFFINE_DELTA)
    steps = oracle.codes_of(codes, zero) - zero[:, None]
    assert (steps[x == 0] == 0).all()
    off = np.abs(steps - (np.int32(wanted) - z[:, None]))
    # of the stored Delta; a group of zeros has none
    position = x / np.where(delta > 0, np.float64(delta), 1)[:, None]
    assert (off[delta == 0] == 0).all() and off.max() <= 1
    assert (np.abs(steps - position) <= 0.5 + tol.AFFINE_POSITION).all()
    back = np.float64(decode(codecs.affine(), codes, scales))
    np.testing.assert_allclose(back, steps * np.float64(delta)[:, None], rtol=tol.F32_EPS)
