"""Folders that fine-tuning reads and writes: configurations, damaged files, exports."""

import dataclasses
import itertools
import json
import re
import resource
import shutil
import signal
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from optax_lowmem import plan
from tests import tolerances as tol
from tests.repo.pages import ROOT

TINY = ROOT / "tests/golden/huggingface"
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
LLAMA = json.loads((TINY / "llama/config.json").read_text())


@pytest.fixture
def hf(example):
    return example("_llama.huggingface")


@pytest.fixture
def configuration(example):
    return example("_llama.configuration")


@pytest.fixture
def models(example):
    return example("_llama.model")


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TINY / "llama", tmp_path / "base")


def set_keys(folder, **keys):
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))


# ---- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_transformers_is_known(configuration, kind):
    """If this fails with a newer transformers: read the new key, refuse it, or say that it has no
    effect on logits."""
    transformers = pytest.importorskip("transformers")
    family = configuration.FAMILIES[kind]
    of = configuration
    known = {*of.READ, *of.WITHOUT_EFFECT, *of.SHARED, *family.read, *family.only}
    fields = {f.name for f in dataclasses.fields(transformers.AutoConfig.for_model(kind))}
    assert fields - known == set()
    assert {*of.READ, *family.read, *family.only} - fields <= {
        "head_dim"
    }  # of Qwen2, which reads it


def test_a_key_of_a_newer_version(configuration):
    """It is refused by name, unless it has its default."""

    @dataclasses.dataclass
    class Newer:
        model_type = "mistral"
        vocab_size: int = 3
        hidden_act: str = "silu"
        attention_dropout: float = 0.0
        norm_of_values: str | None = None

    assert configuration.unsupported(Newer()) == {}
    assert configuration.unsupported(Newer(norm_of_values="l2")) == {"norm_of_values": "l2"}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
REFUSED = [
    ("llama", {"attention_bias": True}, "llama with attention_bias True is not supported"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"is_causal": False}, "is_causal False"),
    ("llama", {"rope_scaling": YARN}, "rope_type 'yarn' is not supported"),
    (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"factor": 4.0}},
        "'default' does not read",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": "4"}},
        "factor is '4', not a number",
    ),
    ("llama", {"rope_parameters": ["linear"]}, "refuses it"),
    ("llama", {"rope_theta": None, "rope_parameters": None}, "rope_theta is None"),
    ("llama", {"hidden_size": "16"}, "refuses it: .*hidden_size"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ("llama", {"num_key_value_heads": 3}, "4 is no multiple of 3"),
    ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "mistral with layer_typ"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "no sliding_window is set"),
    ("qwen3", {"layer_types": ["full_attention"]}, "refuses it"),
    ("gemma2", {"sliding_window": None}, "no sliding_window is set"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping 30.0"),
    (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
        "not only sliding",
    ),
]


@pytest.mark.parametrize(("kind", "keys", "message"), REFUSED)
def test_refused_configurations(configuration, tmp_path, kind, keys, message):
    """In one line that names the file."""
    config = json.loads((TINY / kind / "config.json").read_text()) | keys
    with pytest.raises(ValueError, match=message) as raised:
        configuration.shape_of(config, tmp_path / "config.json")
    told = str(raised.value)
    assert told.startswith(f"{tmp_path}/config.json: ") and "\n" not in told


SMALL = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 12, "num_hidden_layers": 7}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
ACCEPTED = [
    *(json.loads((TINY / kind / "config.json").read_text()) for kind in KINDS),
    *(SMALL | HEADS | {"model_type": kind} for kind in KINDS),
    *(SMALL | {"num_attention_heads": 32, "model_type": kind} for kind in KINDS),
    *(config for _, config in json.loads(str(np.load(TINY / "variants.npz")["configs"])).values()),
    SMALL | HEADS | {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
    SMALL | HEADS | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
    SMALL | HEADS | {"model_type": "gemma3_text", "sliding_window_pattern": 8},
    SMALL | HEADS | {"model_type": "gemma2", "layer_types": ["full_attention"] * 7},
]


@pytest.mark.parametrize("config", ACCEPTED, ids=itertools.count())
def test_the_planner_reads_what_finetune_reads(configuration, models, config):
    """The planner needs no transformers; its sizes are those of the normal form."""
    shape, sizes = configuration.shape_of(config), plan.decoder(config)
    head = shape.head_width
    assert dataclasses.asdict(sizes) == dict(
        layers=shape.layers, width=shape.width, hidden=shape.hidden, heads=shape.heads * head,
        kv_heads=shape.kv_heads * head, vocab=shape.vocab, tied=shape.tied, bias=shape.bias,
        head_norms=head if shape.head_norms else 0, gemma=shape.gemma, caps=bool(shape.logit_cap),
        scores=0 if head % 8 == 0 and head <= 128 and not shape.score_cap else shape.heads,
        mixed=len(set(shape.sliding)) > 1,
    )  # fmt: skip
    counted, model = ({}, models.Llama(shape))
    for keys, leaf in jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.weights, KEY)):
        counted[keys] = leaf.size
    assert sum(counted.values()) == sum(leaf.size for leaf in jax.tree.leaves(sizes.params()))


KEY = jax.random.key(0)


@pytest.mark.parametrize(
    "change",
    [{"quantization_config": {"bits": 4}}, {"attention_bias": True}, {"rope_scaling": YARN},
     {"num_hidden_layers": -1}, {"hidden_size": "8"}],
)  # fmt: skip
def test_the_planner_refuses_what_finetune_refuses(configuration, change):
    with pytest.raises(ValueError, match=next(iter(change)).split("_")[0]):
        plan.decoder(LLAMA | change)
    with pytest.raises(ValueError):
        configuration.shape_of(LLAMA | change)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "has a list, not a configuration"),
        ("{", "is no JSON .*it is damaged: download it again"),
        ("", "it is empty"),
        ("<!doctype html><html>", "it is an HTML page"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull"),
        (json.dumps({**LLAMA, "model_type": "mamba"}), "'mamba' is not supported"),
        (json.dumps({k: v for k, v in LLAMA.items() if k != "hidden_size"}), "lacks hidden_size"),
    ],
)
def test_files_that_are_no_configuration(hf, folder, content, message):
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        hf.read_shape(folder)
    assert str(raised.value).startswith(f"{folder}/config.json")
    assert "\n" not in str(raised.value)


# ---- weights -------------------------------------------------------------------------------------


def write_raw(file, header, data):
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def header_and_data(file):
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


NORM = "model.norm.weight"


def overlapping(header):
    for tensor in header.values():
        tensor["data_offsets"] = [0, 4]


def negative(header):
    header[NORM]["data_offsets"] = [-4, 28]


def beyond(header):
    header[NORM]["data_offsets"] = [10**6, 10**6 + 32]


def of_another_size(header):
    header[NORM]["shape"] = [10**6]


def of_another_dtype(header):
    header[NORM]["dtype"] = "F32"


@pytest.mark.parametrize("lie", [overlapping, negative, beyond, of_another_size, of_another_dtype])
def test_headers_that_lie(hf, folder, lie):
    file = folder / "model.safetensors"
    header, data = header_and_data(file)
    header.pop("__metadata__", None)
    lie(header)
    write_raw(file, header, data)
    with pytest.raises(ValueError, match="is no safetensors file .*; it is damaged") as raised:
        hf.read_shape(folder)
    assert str(raised.value).startswith(str(file)) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n", "git lfs pull"),
        (b"<html><body>Please log in</body></html>", "it is an HTML page"),
        (b"PK\x03\x04" + bytes(400), "it is damaged"),
        ((2**62).to_bytes(8, "little") + b"{}", "it is damaged"),
        ((2).to_bytes(8, "little") + b"[]", "it is damaged"),
    ],
)
def test_files_that_are_no_weights(hf, folder, content, message):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        hf.read_shape(folder)
    assert "model.safetensors is no safetensors file" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_cut_short(hf, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="it is damaged: download it again"):
        hf.tensors_of(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {"a": 3}}, "has no weight_map"),
        ({"weight_map": {"a": "model-1.safetensors"}}, "lacks model-1.safetensors"),
    ],
)
def test_indices_that_name_no_files(hf, folder, index, message):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        hf.tensors_of(folder)


def test_a_tensor_in_two_files(hf, folder):
    weights = folder / "model.safetensors"
    shutil.copy(weights, folder / "b.safetensors")
    weights.rename(folder / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is in .*b.safetensors and in .*a.safetensors"):
        hf.tensors_of(folder)


def test_weights_in_other_formats(hf, folder):
    weights = load_file(folder / "model.safetensors")
    save_file(
        {n: w.astype(np.int8) if n == NORM else w for n, w in weights.items()},
        folder / "model.safetensors",
    )
    with pytest.raises(ValueError, match="model.norm.weight in .* is I8, not F32 or F16 or BF16"):
        hf.tensors_of(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="lacks model.safetensors, but has pytorch_model.bin"):
        hf.tensors_of(folder)


def test_one_file_counts_more_than_an_index(hf, folder):
    """As transformers chooses."""
    shutil.copytree(TINY / "qwen2", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("c*"))
    assert (folder / "model.safetensors.index.json").exists()
    tensors = hf.tensors_of(folder)
    assert {tensor.file.name for tensor in tensors.values()} == {"model.safetensors"}


def test_a_head_that_differs_from_the_embedding(hf, models, folder, tmp_path):
    """It is loaded and written as weights of its own, and that is said; an equal one is tied."""
    set_keys(folder, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="lm_head.weight differs from the embedding"):
        shape = hf.read_shape(folder)
    assert not shape.tied
    model = models.Llama(shape, "float32")
    params = hf.load(folder, model)
    hf.save(tmp_path / "written", folder, model, params)
    assert hf.read_config(tmp_path / "written")["tie_word_embeddings"] is False
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "written"))
    np.testing.assert_array_equal(before["lm_head.weight"], after["lm_head.weight"])
    before["lm_head.weight"] = before["model.embed_tokens.weight"].copy()
    save_file(before, folder / "model.safetensors")
    assert hf.read_shape(folder).tied


def test_dtypes_of_the_file(hf, models, folder):
    """Weights are loaded in the dtype that the file has; a stack in the widest of its layers."""
    weights = load_file(folder / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj.weight"
    weights = {n: w.astype(np.float16 if "mlp" in n else w.dtype) for n, w in weights.items()}
    weights[query] = weights[query].astype(np.float32) + np.float32(2**-20)
    save_file(weights, folder / "model.safetensors")
    params = hf.load(folder, models.Llama(hf.read_shape(folder)))
    of_layers = params["layers"]
    assert of_layers["mlp"]["up_proj"]["kernel"].dtype == np.float16
    assert of_layers["self_attn"]["k_proj"]["kernel"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(of_layers["self_attn"]["q_proj"]["kernel"][0].T, weights[query])


# ---- exports -------------------------------------------------------------------------------------


def in_dtype(folder, dtype):
    """Give a folder weights that bf16 does not have."""
    rng = np.random.default_rng(0)
    weights = {
        n: (w.astype(np.float32) * rng.uniform(0.99, 1.01, w.shape)).astype(dtype)
        for n, w in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors")
    set_keys(folder, dtype=np.dtype(dtype).name)
    return weights


def as_bits(x):
    return x.view(np.uint32 if x.dtype == np.float32 else np.uint16)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_adapters_are_merged_in_f32(hf, models, folder, tmp_path, dtype):
    """Other weights keep their bits; all keep the dtype of the source."""
    before = in_dtype(folder, dtype)
    lora = models.Lora(("q_proj", "up_proj"), 3, 2.0)
    model = models.Llama(hf.read_shape(folder), lora=lora)
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(lambda p: p + rng.normal(size=p.shape) / 8, model.adapters(KEY))
    hf.save(tmp_path / "model", folder, model, adapters)
    after = load_file(tmp_path / "model/model.safetensors")
    assert {w.dtype for w in after.values()} == {np.dtype(dtype)}
    for name, w in before.items():
        if "q_proj" not in name and "up_proj" not in name:
            np.testing.assert_array_equal(as_bits(w), as_bits(after[name]), name)
    of_layer = adapters["layers"]["mlp"]["up_proj"]
    a, b = (np.float64(of_layer[f"lora_{x}"][1]) for x in "ab")
    name = "model.layers.1.mlp.up_proj.weight"
    wanted = before[name].astype(np.float64) + 2 / 3 * (a @ b).T
    unit = tol.MERGED_EPS * ml_dtypes.finfo(dtype).eps
    np.testing.assert_allclose(after[name].astype(np.float64), wanted, rtol=unit, atol=unit)
    assert np.abs(wanted - before[name].astype(np.float64)).max() > 0.05


def test_frozen_weights_keep_their_bits(hf, models, example, folder, tmp_path):
    before = in_dtype(folder, np.float32)
    model = models.Llama(hf.read_shape(folder), stacked=False)
    frozen = example("_finetune.setup").frozen_by("embed_tokens|layers/0/", model)
    weights = hf.load(folder, model, lambda path: jnp.bfloat16)
    trained = models.part(weights, lambda path: not frozen(path))
    hf.save(tmp_path / "model", folder, model, trained, "bfloat16")
    after = load_file(tmp_path / "model/model.safetensors")
    kept = {name for name, w in after.items() if w.dtype == np.float32}
    assert kept == {n for n in before if "embed" in n or "layers.0." in n}
    for name in kept:
        np.testing.assert_array_equal(before[name], after[name])


@pytest.fixture
def exported(hf, models, folder, tmp_path):
    """Writes the model of a folder, in a dtype, to `model`."""
    model = models.Llama(hf.read_shape(folder))

    def export(dtype=None, place="model", scale=1.0):
        weights = jax.tree.map(lambda w: w * scale, hf.load(folder, model))
        hf.save(tmp_path / place, folder, model, weights, dtype)
        return tmp_path / place

    return export


def names_in(folder):
    return sorted(file.name for file in folder.iterdir())


def test_an_export_replaces_the_one_before(hf, exported, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(hf, "_SHARD_BYTES", 4000)
        out = exported()
        (out / "extra.bin").write_text("left by the one before")
    assert (out / "model.safetensors.index.json").exists()
    exported()
    assert names_in(out) == ["config.json", "generation_config.json", "model.safetensors"]
    assert names_in(tmp_path) == ["base", "model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_export_that_stops(hf, exported, tmp_path, monkeypatch, error):
    """The files are those of before, and no others."""
    out = exported()
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def stop(*_):
        raise error

    with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, OSError)):
        patched.setattr(hf, "save_file", stop)
        exported("float32")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert names_in(tmp_path) == ["base", "model"]


def test_an_export_that_was_killed(hf, exported, tmp_path, monkeypatch):
    """A later one removes what it left, and finds the model if its name was free for a moment."""
    out = exported()
    before = (out / "model.safetensors").read_bytes()
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial/model.safetensors").write_text("half")
    out.rename(tmp_path / ".model.replaced")
    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(hf, "save_file", lambda *_: (out / "nowhere").stat())
        exported("float32")
    assert (out / "model.safetensors").read_bytes() == before
    assert names_in(tmp_path) == ["base", "model"]


def test_a_full_disk(hf, exported, tmp_path, monkeypatch):
    """One line before anything is written, or if the disk fills up meanwhile."""
    with monkeypatch.context() as patched, pytest.raises(OSError, match="0.0 GB are needed"):
        patched.setattr(hf.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10))
        exported()
    assert names_in(tmp_path) == ["base"]
    before, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(LIMIT)
    try:
        resource.setrlimit(LIMIT, (8000, limits[1]))
        with pytest.raises(OSError, match="model was not written") as raised:
            exported("float32")
    finally:
        resource.setrlimit(LIMIT, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert "\n" not in str(raised.value)
    assert names_in(tmp_path) == ["base"]


LIMIT = resource.RLIMIT_FSIZE


def test_places_that_are_not_written(hf, exported, folder, tmp_path):
    with pytest.raises(ValueError, match="has the model that is read"):
        exported(place="base")
    inside = shutil.copytree(folder, tmp_path / "outer/base")
    with pytest.raises(ValueError, match="has the model that is read"):
        hf.check_place(tmp_path / "outer", inside)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/diary.txt").write_text("dear diary")
    with pytest.raises(ValueError, match="files that are no model"):
        exported(place="notes")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        exported(place="file")
    assert names_in(tmp_path) == ["base", "file", "notes", "outer"]


@pytest.mark.parametrize(("dtype", "scale"), [(None, np.nan), ("float16", 1e38)])
def test_numbers_that_are_not_finite_are_not_written(exported, tmp_path, dtype, scale):
    with pytest.raises(ValueError, match=r"model\..* that are not finite in b?float16"):
        exported(dtype, scale=scale)
    assert names_in(tmp_path) == ["base"]


def test_chat_templates_are_copied(exported, folder):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    assert "additional_chat_templates" in names_in(exported())
    assert "pytorch_model.bin.index.json" not in names_in(exported())


def test_the_base_of_adapters(hf, models, folder, tmp_path, monkeypatch):
    """An absolute path, or the hub's name; alpha is a whole number where it can be."""
    model = models.Llama(hf.read_shape(folder), lora=models.Lora(("q_proj",), 2, 8.0))
    monkeypatch.chdir(tmp_path)
    hf.save_adapters(tmp_path / "adapter", Path("base"), model, model.adapters(KEY))
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert repr(config["lora_alpha"]) == "8" and config["target_modules"] == ["q_proj"]
    cached = Path("/home/me/.cache/hub/models--meta-llama--Llama-3.2-1B/snapshots/9213176726f574")
    assert hf.base_name(cached) == "meta-llama/Llama-3.2-1B"


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("nomatch", "matches no parameter"),
        ("embed_token$", "near it are: embed_tokens"),
        ("layers/7/", "matches no parameter"),
        ("(", r"'\(' is no regular expression"),
        (".", "matches every parameter"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything(example, models, folder, pattern, message):
    model = models.Llama(example("_llama.configuration").shape_of(LLAMA))
    with pytest.raises(ValueError, match=message):
        example("_finetune.setup").frozen_by(pattern, model)


def test_names_of_adapted_matrices():
    assert plan.lora_names("q_proj, v_proj,,q_proj ") == ("q_proj", "v_proj")
    assert len(plan.lora_names("all-linear")) == 7
    cases = {"q_projj": "q_proj", "mlp.up_proj": "up_proj", "lm_head": "all-linear"}
    for wrong, near in cases.items():
        with pytest.raises(ValueError, match=f"named {re.escape(repr(wrong))}: write .*{near}"):
            plan.lora_names(f"q_proj,{wrong}")
    with pytest.raises(ValueError, match="named ''"):
        plan.lora_names("")
