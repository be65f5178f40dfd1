"""implementation="auto": what is chosen where, why, and that it is what runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import linen, nnx  # noqa: E402

from benchmarks import records  # noqa: E402
from benchmarks.suites.linear import tables as linear_tables  # noqa: E402
from optax_lowmem import layers  # noqa: E402
from optax_lowmem._src.kernels import platform  # noqa: E402
from optax_lowmem._src.layers.switchback import choice  # noqa: E402
from tests.lowering import kernels_in, lower_for_cuda, needs_mosaic  # noqa: E402

auto = functools.partial(layers.switchback_dot_general, implementation="auto")
LARGE, SMALL = (16384, 4096, 16384), (8192, 256, 256)


def multiply(dot_general, x, w):
    return dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def run_in_8_bits(dot_general, sizes, dtype=jnp.bfloat16):
    tokens, inputs, outputs = sizes
    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((tokens, inputs), (inputs, outputs)))
    text = lower_for_cuda(functools.partial(multiply, dot_general), x, w)
    return "quantize_rows" in kernels_in(text)


@pytest.mark.full
def test_sizes_decide_on_hopper(on_hopper):
    for format in ("int8", "fp8", "fp8-e5m2"):
        for sizes, wanted in ((LARGE, True), (SMALL, False), ((16, *LARGE[1:]), False)):
            found = auto("switchback", format).choose(*sizes)
            assert found.quantized == wanted and "ms estimated in 8 bits" in found.reason
            assert found.reason.startswith("in 8 bits: " if wanted else "standard: ")
            assert run_in_8_bits(auto("switchback", format), sizes) == wanted
            always = layers.switchback_dot_general("switchback", format)
            assert always.choose(*sizes) == (True, 'in 8 bits: implementation="quantized"')
            assert run_in_8_bits(always, sizes)
    assert auto("llm_int8").choose(*SMALL).quantized
    assert "empty" in auto().choose(0, 8, 8).reason


@needs_mosaic
def test_what_the_kernel_does_not_take_pays_later(on_hopper):
    """An estimate knows which product is left to XLA, each for its own sizes and formats."""
    settings = layers.switchback_dot_general().settings
    taken = choice.estimates(settings, 8192, 2048, 2048, "bfloat16")
    left = choice.estimates(settings, 8192, 2048, 2048 + 32, "bfloat16")
    assert left[0] - taken[0] > 0.9 * 2e-12 * 8192 * (2048 + 2080) > 0.03 * taken[0]
    assert abs(left[1] / taken[1] - 1) < 0.02


def test_estimates_are_what_was_measured(monkeypatch):
    """Of the records that docs/results/layers.md shows, taken by the Hopper kernels."""
    monkeypatch.setattr(choice, "product_reason", lambda *_: None)
    rows = records.newest(records.on_gpus(records.all_records()), bench="linear")
    if not rows:
        pytest.skip("no records here: a source distribution")
    _, times = linear_tables.values(rows, "device_ms")
    assert len(times) >= 12
    for shape, own in times.items():
        sizes = [int(size) for size in shape.split("x")]
        for name in ("switchback-int8", "switchback-fp8", "switchback_m-int8", "switchback_m-fp8"):
            layer = layers.switchback_dot_general(*name.split("-"))
            estimated = np.multiply(choice.estimates(layer.settings, *sizes, "bfloat16"), 1e3)
            measured = np.array([own[name], own["bf16"]])
            np.testing.assert_allclose(estimated, measured, rtol=0.07, err_msg=f"{name}, {shape}")
            slower = measured.argmax()
            if measured[slower] > 1.03 * measured[1 - slower]:
                assert estimated.argmax() == slower, (name, shape)


def test_elsewhere_it_quantizes(on_a_gpu):
    """On another GPU, and without one: numerics are those that are asked for."""
    found = auto().choose(*SMALL)
    assert found.quantized and "(Hopper), not None" in found.reason
    assert run_in_8_bits(auto(), SMALL)


def test_without_a_gpu():
    found = auto().choose(*SMALL)
    assert found.quantized and "default backend is cpu" in found.reason
    x, w = jnp.linspace(-1, 1, 24).reshape(4, 6), jnp.linspace(-1, 2, 18).reshape(6, 3)
    np.testing.assert_array_equal(
        multiply(auto(), x, w), multiply(layers.switchback_dot_general(), x, w)
    )
    assert (multiply(auto(), x, w) != x @ w).any()


def test_the_standard_products_are_jaxs(on_hopper):
    x, w = jnp.linspace(-1, 1, 48).reshape(2, 4, 6), jnp.linspace(-1, 2, 36).reshape(6, 2, 3)
    numbers = (((2,), (0,)), ((0,), (1,)))
    how = {"precision": "highest", "preferred_element_type": jnp.float32}
    low = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(
        auto()(low, w, numbers, **how),
        jax.lax.dot_general(low.astype(jnp.float32), w, numbers, **how),
    )
    weights = w.reshape(6, 6)
    loss = lambda dot, w: (multiply(dot, x, w) ** 2).sum()  # noqa: E731
    np.testing.assert_array_equal(
        *(jax.grad(loss, 1)(dot, weights) for dot in (auto(), jax.lax.dot_general))
    )
    jax.hessian(loss, 1)(auto(), weights)  # which quantized products have not


def test_tpus_take_standard_products(monkeypatch):
    """Whose 8-bit products were estimated slower, and never measured."""
    monkeypatch.setattr(platform, "may_be_tpu", lambda: True)
    found = auto().choose(*LARGE)
    assert not found.quantized and "TPU" in found.reason and "v5e" in found.reason
    monkeypatch.setattr(platform, "may_be_tpu", lambda: False)
    assert auto().choose(*LARGE).quantized


def test_layers_take_it(on_hopper):
    of_linen = layers.SwitchBackDense(8, implementation="auto")
    of_nnx = layers.SwitchBackLinear(8, 8, implementation="auto", rngs=nnx.Rngs(0))
    for dot_general in (of_linen.dot_general, of_nnx.dot_general):
        assert dot_general == auto() != layers.switchback_dot_general()
        assert not dot_general.choose(*SMALL).quantized
    assert of_linen.clone(implementation="quantized").dot_general.choose(*SMALL).quantized
    model = layers.convert(
        linen.Dense(8), to=functools.partial(type(of_linen), implementation="auto")
    )
    x = jnp.ones((2, 8))
    variables = model.init(jax.random.key(0), x)
    np.testing.assert_array_equal(model.apply(variables, x), linen.Dense(8).apply(variables, x))


def test_another_implementation_is_refused():
    with pytest.raises(ValueError, match="quantized, auto, got 'standard'.*variant=\"standard\""):
        layers.switchback_dot_general(implementation="standard")
