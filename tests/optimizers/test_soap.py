"""`flash_soap` and `scale_by_soap`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_lowmem as lowmem
from tests import tolerances

SHAPES = {"square": (24, 24), "wide": (16, 40), "stacked": (2, 16, 16), "bias": (16,)}
STEPS, FREQUENCY, LARGEST = 9, 3, 24
AXES = optax.contrib.MuonDimensionNumbers
MATRICES = {"square": AXES(), "wide": AXES(), "stacked": AXES(1, 2), "bias": None}


def gradients(step):
    """Gradients whose singular values are apart, so that eigenvectors are well-conditioned."""
    rng = np.random.default_rng(step)

    def of(shape):
        *batch, m, n = shape if len(shape) > 1 else (*shape, 1)
        values = np.geomspace(1, 0.2, min(m, n))
        u = np.linalg.qr(rng.normal(size=(*batch, m, min(m, n))))[0]
        v = np.linalg.qr(rng.normal(size=(*batch, n, min(m, n))))[0]
        return ((u * values) @ np.swapaxes(v, -1, -2)).reshape(shape)

    return {name: of(shape) for name, shape in SHAPES.items()}


class Reference:
    """One matrix of SOAP as its authors wrote it, in f64: M is rotated when the basis changes."""

    def __init__(self, sides, b1=0.95, b2=0.95, eps=1e-8):
        self.sides, self.b1, self.b2, self.eps = sides, b1, b2, eps
        self.t, self.m, self.v, self.p, self.q = 0, 0.0, 0.0, [None, None], [None, None]

    def turn(self, x, back=False):
        for axis, q in enumerate(self.q):
            if q is not None:
                x = np.moveaxis(np.tensordot(q.T if not back else q, x, (1, axis)), 0, axis)
        return x

    def __call__(self, g):
        direction = np.zeros_like(g)
        if self.t:
            self.m = self.b1 * self.m + (1 - self.b1) * self.turn(g)
            self.v = self.b2 * self.v + (1 - self.b2) * self.turn(g) ** 2
            m, v = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
            direction = self.turn(m / (np.sqrt(v) + self.eps), back=True)
            self.m = self.turn(self.m, back=True)
        for axis in self.sides:
            product = g @ g.T if axis == 0 else g.T @ g
            old = 0.0 if self.p[axis] is None else self.p[axis]
            self.p[axis] = p = self.b2 * old + (1 - self.b2) * product
            if self.t == 0:
                self.q[axis] = np.linalg.eigh(p)[1][:, ::-1]
            elif self.t % FREQUENCY == 0:
                order = np.argsort(-np.diag(self.q[axis].T @ p @ self.q[axis]))
                self.v = np.take(self.v, order, axis)
                self.q[axis] = np.linalg.qr(p @ self.q[axis][:, order])[0]
        if self.t:
            self.m = self.turn(self.m)
        self.t += 1
        return direction


def test_is_the_authors_algorithm_in_f64():
    tx = lowmem.scale_by_soap(
        precondition_frequency=FREQUENCY,
        max_precondition_dim=LARGEST,
        muon_weight_dimension_numbers=MATRICES,
    )
    state = tx.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
    references = {"square": Reference((0, 1)), "wide": Reference((0,)), "bias": Reference(())}
    stacked = [Reference((0, 1)), Reference((0, 1))]
    update = jax.jit(tx.update)
    for step in range(STEPS):
        exact = gradients(step)
        given = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), exact)
        direction, state = update(given, state)
        expected = {name: of(exact[name]) for name, of in references.items()}
        expected["stacked"] = np.stack(
            [of(g) for of, g in zip(stacked, exact["stacked"], strict=True)]
        )
        for name, wanted in expected.items():
            scale = max(np.abs(wanted).max(), 1e-30)
            assert np.abs(direction[name] - wanted).max() <= tolerances.SOAP * scale, (step, name)
            assert step == 0 or scale > 0.1


def test_sides():
    """A side longer than `max_precondition_dim` has no preconditioner."""
    tx = lowmem.scale_by_soap(max_precondition_dim=LARGEST, muon_weight_dimension_numbers=MATRICES)
    state = tx.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
    shapes = {name: (state.left[name].shape, state.q_right[name].shape) for name in SHAPES}
    assert shapes == {
        "square": ((1, 24, 24), (1, 24, 24)),
        "wide": ((1, 16, 16), ()),
        "stacked": ((2, 16, 16), (2, 16, 16)),
        "bias": ((), ()),
    }


def trained(storage, steps=150):
    """Return the mean losses of the last 50 steps of four seeds; each step has a new batch."""
    tx = lowmem.flash_soap(3e-3, precondition_frequency=5, storage=storage)

    def run(key):
        keys = jax.random.split(key, 4)
        normal = [jax.random.normal(key, (64, 64)) / 8 for key in keys]
        params = {"w1": normal[0], "w2": normal[1]}

        def step(carry, key):
            x = jax.random.normal(key, (64, 64))

            def loss(p):
                return jnp.mean((jax.nn.gelu(x @ p["w1"]) @ p["w2"] - jnp.tanh(x @ normal[2])) ** 2)

            value, grads = jax.value_and_grad(loss)(carry[0])
            return lowmem.step(tx, grads, carry[1], carry[0]), value

        start = lowmem.init(tx, params, dtype=jnp.float32)
        return jax.lax.scan(step, start, jax.random.split(keys[3], steps))[1]

    losses = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 4))
    return np.asarray(losses[:, -50:]).mean(-1)


def test_trains_as_in_f32():
    ratios = trained(lowmem.Storage()) / trained(lowmem.Storage.full_precision())
    assert abs(ratios.mean() - 1) < 0.02, ratios


def test_bytes_per_parameter():
    """The bytes in the docstring, of a square matrix."""
    params = {"w": jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)}
    assert round(lowmem.memory.report(lowmem.flash_soap(1e-3), params).bytes_per_param, 1) == 9.4


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    """The direction does not depend on how parameters are sharded."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    tx = lowmem.scale_by_soap(precondition_frequency=1)
    update, results = jax.jit(tx.update), []
    for sharding in (None, NamedSharding(mesh, PartitionSpec("data", None))):
        steps = [jnp.asarray(gradients(i)["square"], jnp.float32) for i in range(4)]
        steps = steps if sharding is None else jax.device_put(steps, sharding)
        state = tx.init({"w": steps[0]})
        for grads in steps:
            direction, state = update({"w": grads}, state)
        results.append(np.asarray(direction["w"]))
    assert np.abs(results[0] - results[1]).max() <= tolerances.SOAP * np.abs(results[0]).max()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"precondition_frequency": 0}, "precondition_frequency must be an int of at least 1"),
        ({"max_precondition_dim": 2.0}, "max_precondition_dim must be an int"),
        ({"b2": 1.5}, "b2"),
        (
            {"storage": lowmem.Storage(master_weight_bits=None, master_rounding="stochastic")},
            "without master weights to nearest",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        lowmem.flash_soap(1e-3, **arguments)


def test_works_in_a_chain_with_a_schedule():
    tx = lowmem.chain(
        optax.clip_by_global_norm(1.0), lowmem.flash_soap(optax.linear_schedule(1e-3, 0.0, 10))
    )
    params, state = lowmem.init(tx, {"w": jnp.ones((64, 64))})
    grads = {"w": jax.random.normal(jax.random.key(0), (64, 64))}
    before = params
    for _ in range(2):
        params, state = jax.jit(lambda g, s, p: lowmem.step(tx, g, s, p))(grads, state, params)
    assert (params["w"] != before["w"]).any()
