"""The fine-tuning example with a base in NF4: reading, training, the adapters and the model."""

import jax
import numpy as np
import pytest

from optax_lowmem.layers import nf4
from tests.contract_cases import assert_same
from tests.repo.tiny_model import flags, losses, make_wide_folder, weights_of

pytestmark = pytest.mark.usefixtures("finetune")


@pytest.fixture
def wide(tmp_path):
    return make_wide_folder(tmp_path / "wide")


def decoded(stored):
    return np.asarray(nf4.dequantize(nf4.quantize(stored)))


def test_a_base_in_4_bits(finetune, wide, tmp_path):
    """Adapters alone are trained; the model that is written is the one that was trained."""
    more = "--lora q_proj,up_proj --rank 2 --base nf4"
    out = tmp_path / "out"
    run = finetune.main(flags(wide, out, more))
    assert losses(out)[-1] < 0.9 * losses(out)[0]
    before, after = (weights_of(f / "model.safetensors") for f in (wide, out / "model"))
    for name, module in run.frozen["layers"]["mlp"].items():  # stacked, as in the file
        stored = np.stack([before[f"model.layers.{i}.mlp.{name}.weight"] for i in range(2)])
        np.testing.assert_array_equal(nf4.dequantize(module["kernel"]), decoded(stored))
    adapters = weights_of(out / "adapter/adapter_model.safetensors")
    for name, stored in before.items():
        base = decoded(stored) if "_proj" in name else np.float32(stored)
        key = f"base_model.model.{name.replace('.weight', '')}.lora_"
        if f"{key}A.weight" in adapters:
            a, b = (adapters[f"{key}{letter}.weight"] for letter in "AB")
            base = base + 2 * b @ a
        np.testing.assert_allclose(np.float32(after[name]), base, rtol=2**-8, atol=1e-6)
    model = finetune.dataclasses.replace(run.setup.model, lora=None, in_4_bits=False)
    written = finetune.huggingface.load(out / "model", model)
    batch = jax.tree.map(np.asarray, run.batch())
    trained = run.setup.model(finetune.joined(run.trained, run.frozen), batch)
    np.testing.assert_allclose(model(written, batch), trained, rtol=1e-2)  # weights in bf16


def test_layers_apart_are_the_stacked_ones(finetune, wide):
    folder, models = finetune.huggingface, finetune.Llama
    model = models(folder.read_shape(wide, print), in_4_bits=True)
    stacked = folder.load(wide, model)["layers"]
    apart = folder.load(wide, finetune.dataclasses.replace(model, stacked=False))["layers"]
    for i, layer in enumerate(apart):
        assert_same(layer, jax.tree.map(lambda x, i=i: x[i], stacked))


def test_a_model_without_whole_blocks(finetune, folder, tmp_path):
    with pytest.raises(SystemExit, match=r"w has the shape \[16, 24\].* multiple of 64"):
        finetune.main(flags(folder, tmp_path, "--lora q_proj --base nf4"))


def test_a_base_on_the_host(finetune, wide, tmp_path, monkeypatch):
    """Its adapters are those beside a base on the device, up to f32 rounding; also resumed."""
    monkeypatch.setattr(finetune, "_LEAST_COPIED", 0)
    more = "--lora q_proj,up_proj --rank 2 --base nf4 --clip 0 --steps 4 --micro-batch 4"
    here, there = tmp_path / "here", tmp_path / "there"
    finetune.main(flags(wide, here, more))
    more += " --offload weights --resume"
    finetune.main(flags(wide, there, f"{more} --until 2"))
    run = finetune.main(flags(wide, there, more))
    codes = run.frozen["layers"]["mlp"]["gate_proj"]["kernel"].codes
    assert [x.sharding.memory_kind for x in codes.parts] == ["pinned_host"] * 2
    for name in ("loss", "validation_loss"):
        assert losses(there, name) == pytest.approx(losses(here, name), rel=1e-5)
    for file in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        wanted = weights_of(here / file)
        for name, found in weights_of(there / file).items():
            np.testing.assert_allclose(*map(np.float32, (found, wanted[name])), 2**-7, 1e-5)
