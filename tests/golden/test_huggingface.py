"""Models of the examples against logits that transformers computed (tools/tiny_models.py)."""

import dataclasses
import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _llama import configuration, huggingface, mesh
from _llama.model import Llama, Lora, Packed, joined
from jax.sharding import NamedSharding
from safetensors.numpy import load_file, save_file

from tests.tiers import rows

FOLDERS = sorted(file.parent for file in Path(__file__).parent.glob("huggingface/*/golden.npz"))
BY_NAME = {folder.name: folder for folder in FOLDERS}
VARIANTS = np.load(Path(__file__).parent / "huggingface/variants.npz")
every_model = pytest.mark.parametrize("folder", FOLDERS, ids=list(BY_NAME))


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


def model_of(folder, compute="float32", **more):
    return Llama(huggingface.shape_of(huggingface.read_config(folder)), compute, **more)


def loaded(folder, compute="float32", **more):
    model = model_of(folder, compute, **more)
    return model, huggingface.load(folder, model, lambda path: jnp.bfloat16)


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


def test_every_architecture_has_logits():
    assert BY_NAME.keys() == configuration.FAMILIES.keys()


@every_model
def test_logits_and_text(folder):
    """In f32 to rounding; in bf16, with separate layers, with an error like transformers' own."""
    golden = np.load(folder / "golden.npz")
    tokens, wanted = golden["tokens"].astype(np.int32), golden["logits"]
    model, params = loaded(folder)
    found = jax.jit(model.logits)(params, tokens)[:, 3::4]
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
    generate = jax.jit(model.generate, static_argnums=2)
    np.testing.assert_array_equal(generate(params, tokens[:, :8], 12, jax.random.key(0)), tokens)
    model, params = loaded(folder, "bfloat16", stacked=False)
    error = np.asarray(jax.jit(model.logits)(params, tokens))[:, 3::4] - wanted
    assert rms(error) < 1.5 * golden["error"]


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"configs"}))
def test_configurations_mean_what_they_do_in_transformers(name, tmp_path):
    source, config = json.loads(str(VARIANTS["configs"]))[name]
    folder = shutil.copytree(BY_NAME[source], tmp_path / "model")
    (folder / configuration.CONFIG).write_text(json.dumps(config))
    model = Llama(huggingface.read_shape(folder, say=lambda text: None), "float32")
    tokens = np.load(folder / "golden.npz")["tokens"].astype(np.int32)
    found = jax.jit(model.logits)(huggingface.load(folder, model), tokens)[:, 3::4]
    np.testing.assert_allclose(found, VARIANTS[name], atol=1e-4, rtol=0)


@every_model
def test_written_as_it_was_read(folder, tmp_path):
    """Every tensor's name, dtype, shape and bits, from stacked layers; in several files too."""
    model, params = loaded(folder)
    written = tmp_path / "model"
    huggingface.save(written, folder, model, params)
    assert huggingface.read_config(written) == huggingface.read_config(folder)
    before, after = huggingface.tensors_of(folder), huggingface.tensors_of(written)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        np.testing.assert_array_equal(
            tensor.read().view(np.uint16), after[name].read().view(np.uint16), name
        )


def test_files_of_limited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "_SHARD_BYTES", 4000)
    folder = BY_NAME["llama"]
    model, params = loaded(folder, stacked=False)
    huggingface.save(tmp_path / "model", folder, model, params, jnp.float32)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert huggingface.read_config(tmp_path / "model")["dtype"] == "float32"
    again = huggingface.load(tmp_path / "model", model, lambda path: jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_loaded_onto_a_mesh():
    folder = BY_NAME["qwen2"]
    model, params = loaded(folder)
    devices = jax.make_mesh((1, 4, 2), mesh.AXES)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(devices, spec), mesh.parameter_specs(params)
    )
    placed = huggingface.load(folder, model, lambda path: jnp.bfloat16, shardings)
    same = lambda p, sharding: p.sharding.is_equivalent_to(sharding, p.ndim)  # noqa: E731
    assert all(jax.tree.leaves(jax.tree.map(same, placed, shardings)))
    query = placed["layers"]["self_attn"]["q_proj"]
    shards = [p.sharding.shard_shape(p.shape) for p in (query["kernel"], query["bias"])]
    assert shards == [(2, 8 / 4, 8 / 2), (2, 8 / 2)]
    jax.tree.map(np.testing.assert_array_equal, placed, params)


def test_memory_of_reading_and_writing(tmp_path, monkeypatch):
    """Reading holds a few copies of the largest tensor, and writing one file."""
    source = tmp_path / "source"
    source.mkdir()
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64}
    config = huggingface.read_config(BY_NAME["llama"]) | sizes
    (source / configuration.CONFIG).write_text(json.dumps(config))
    model = model_of(source)
    params = jax.jit(lambda key: model.weights(key, lambda path: jnp.bfloat16))(jax.random.key(0))
    arrays = {part.name: np.ascontiguousarray(part.read()) for part in huggingface.parts(params)}
    save_file(arrays, source / huggingface.WEIGHTS)
    del arrays
    largest, whole = 2 * 256 * 1024, sum(p.nbytes for p in jax.tree.leaves(params))
    monkeypatch.setattr(huggingface, "_SHARD_BYTES", 2 * largest)
    huggingface.load(source, model)  # compiles
    huggingface.save(tmp_path / "written", source, model, params)
    peaks = []
    for work in (
        lambda: huggingface.load(source, model),
        lambda: huggingface.save(tmp_path / "again", source, model, params),
        lambda: huggingface.save(tmp_path / "again", source, model, {}),
    ):
        of_runs = []  # of which JAX's own traces and caches may enlarge one
        for _ in range(2):
            tracemalloc.start()
            work()
            of_runs.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        peaks.append(min(of_runs))
    assert max(peaks) < 6 * largest < whole / 4


def damaged(tmp_path, change):
    """A copy of a folder, whose tensors (name -> array) were changed."""
    folder = tmp_path / "damaged"
    shutil.copytree(BY_NAME["llama"], folder)
    tensors = load_file(folder / huggingface.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / huggingface.WEIGHTS)
    return folder


def test_tensors_that_do_not_fit_are_listed(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.0.mlp.bias"] = np.zeros(3, np.float32)
        tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((16, 24), np.float32)

    folder = damaged(tmp_path, change)
    with pytest.raises(ValueError) as raised:
        loaded(folder)
    told = str(raised.value)
    assert "2 missing: lm_head.weight, model.norm.weight" in told
    assert "1 unexpected: model.layers.0.mlp.bias" in told
    assert "1 of another shape: model.layers.1.mlp.up_proj.weight [16, 24], not [24, 16]" in told
    (folder / huggingface.WEIGHTS).unlink()
    with pytest.raises(ValueError, match=f"lacks {huggingface.WEIGHTS}"):
        loaded(folder)
    with pytest.raises(ValueError, match="has no config.json"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported: llama"),
        ({"hidden_act": "relu"}, "llama with hidden_act 'relu' is not supported"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not support"),
    ],
)
def test_configurations_that_are_not_supported(change, message):
    config = huggingface.read_config(BY_NAME["llama"])
    with pytest.raises(ValueError, match=message):
        huggingface.shape_of(config | change)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "mistral"])
def test_configurations_of_older_files(name):
    """They name the base and the scaling of rotary frequencies, and no kinds of layers."""
    new = huggingface.read_config(BY_NAME[name])
    old = {
        key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")
    }
    rope = new["rope_parameters"]
    if name == "gemma3_text":
        old |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        old |= {"sliding_window_pattern": 3}
        rope = rope["full_attention"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    old |= {"rope_theta": rope["rope_theta"]}
    old |= {"rope_scaling": None if scaling["rope_type"] == "default" else scaling}
    assert huggingface.shape_of(json.loads(json.dumps(old))) == huggingface.shape_of(new)


@pytest.mark.parametrize("name", rows(["qwen3", "gemma2"], ["gemma2"]))
def test_packed_texts_do_not_see_each_other(name):
    """Loss and gradients of three texts in two rows are those of the texts alone."""
    model, params = loaded(BY_NAME[name])
    texts = np.random.default_rng(0).integers(1, 48, (3, 7))
    tokens, segments, weights = np.zeros((2, 15), int), np.zeros((2, 15), int), np.zeros((2, 14))
    for row, start, number, text in ((0, 0, 1, texts[0]), (0, 7, 2, texts[1]), (1, 0, 1, texts[2])):
        tokens[row, start : start + 7], segments[row, start : start + 7] = text, number
        weights[row, start : start + 6] = 1 / 18
    packed = Packed(*map(jnp.asarray, (tokens, segments, weights.astype(np.float32))))
    in_f32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    of_model = jax.jit(jax.value_and_grad(model))
    (wanted, slopes), (loss, grads) = of_model(in_f32, jnp.asarray(texts)), of_model(in_f32, packed)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), grads, slopes)


def test_adapters(tmp_path):
    """Of B = 0 they change nothing; they are merged, and written under PEFT's names."""
    folder = BY_NAME["qwen2"]
    lora = Lora(("q_proj", "down_proj"), 2, 4.0)
    model, params = loaded(folder)
    adapted = dataclasses.replace(model, lora=lora)
    adapters = adapted.adapters(jax.random.key(0))
    tokens = np.load(folder / "golden.npz")["tokens"].astype(np.int32)
    plain, with_adapters = jax.jit(model.logits), jax.jit(adapted.logits)
    logits = plain(params, tokens)
    np.testing.assert_allclose(
        with_adapters(joined(params, adapters), tokens), logits, atol=1e-5, rtol=0
    )
    adapters = jax.tree.map(lambda p: p + 0.1, adapters)
    changed = with_adapters(joined(params, adapters), tokens)
    assert rms(changed - logits) > 0.1
    huggingface.save(tmp_path / "merged", folder, adapted, adapters, "float32")
    merged = huggingface.load(tmp_path / "merged", model)
    np.testing.assert_allclose(plain(merged, tokens), changed, atol=1e-4)
    huggingface.save_adapters(tmp_path / "adapter", folder, adapted, adapters)
    tensors = huggingface.tensors_of(tmp_path / "adapter", huggingface.ADAPTERS)
    of_layer = "base_model.model.model.layers.1"
    name = f"{of_layer}.mlp.down_proj.lora_A.weight"
    np.testing.assert_array_equal(
        tensors[name].read(), adapters["layers"]["mlp"]["down_proj"]["lora_a"][1].T
    )
    assert tensors[f"{of_layer}.self_attn.q_proj.lora_B.weight"].shape == (8, 2)
    assert len(tensors) == 8
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)
