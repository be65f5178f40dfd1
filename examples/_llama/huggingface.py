"""Models of Hugging Face folders: configuration, weights in and out, adapters in PEFT's format.

Weights are read from memory-mapped files and written to files one tensor at a time, so that no
second copy of the model exists in host or device memory.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .config import RopeScaling, Shape
from .model import LAYERS, Llama, leaf_path

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_SHARD_BYTES = 5 * 10**9

# ---- config.json ---------------------------------------------------------------------------------

# What a config.json may leave out, by model_type; it names only what differs from these.
_GEMMA = dict(
    tie_word_embeddings=True, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256,
    hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": dict(num_key_value_heads=8, sliding_window=4096),
    "qwen2": dict(sliding_window=4096, use_sliding_window=False, max_window_layers=28),
    "qwen3": dict(
        head_dim=128, sliding_window=4096, use_sliding_window=False, max_window_layers=28
    ),
    "gemma2": _GEMMA | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "gemma3_text": _GEMMA | dict(rope_theta=1e6, rope_local_base_freq=1e4),
}
# What this model code does not compute: key -> the values that it does.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
}


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape of a `config.json`.

    Raises:
      ValueError: for another architecture, or options that the model code does not compute.
    """
    kind = config.get("model_type")
    if kind not in _DEFAULTS:
        raise ValueError(f"model_type {kind!r} is not supported: {', '.join(_DEFAULTS)} are")
    own = _DEFAULTS[kind] | config
    gemma = kind.startswith("gemma")
    wrong = {key: own[key] for key, known in _ONLY.items() if own.get(key) not in known}
    activation = own.get("hidden_activation") if gemma else own.get("hidden_act", "silu")
    if activation != ("gelu_pytorch_tanh" if gemma else "silu"):
        wrong["hidden_activation" if gemma else "hidden_act"] = activation
    if wrong:
        raise ValueError(f"{kind} with {wrong} is not supported")
    heads, layers = own["num_attention_heads"], own["num_hidden_layers"]
    sliding = _sliding(own, layers)
    rope, scaling, local = _rope(own)
    return Shape(
        layers=layers,
        width=own["hidden_size"],
        hidden=own["intermediate_size"],
        heads=heads,
        kv_heads=own.get("num_key_value_heads") or heads,
        vocab=own["vocab_size"],
        rope=rope,
        tied=own.get("tie_word_embeddings", False),
        head=own.get("head_dim"),
        epsilon=own.get("rms_norm_eps", 1e-6),
        scaling=scaling,
        bias=kind == "qwen2",
        head_norms=kind in ("qwen3", "gemma3_text"),
        gemma=gemma,
        query_scale=own["query_pre_attn_scalar"] ** -0.5 if gemma else None,
        score_cap=own.get("attn_logit_softcapping"),
        logit_cap=own.get("final_logit_softcapping"),
        window=own["sliding_window"] if any(sliding) else 0,
        sliding=sliding if any(sliding) else (),
        local_rope=local,
    )


def _sliding(own: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return which layers attend to a window."""
    kind = own["model_type"]
    if not own.get("sliding_window") or own.get("use_sliding_window") is False:
        return (False,) * layers
    if own.get("layer_types"):
        unknown = set(own["layer_types"]) - {_LOCAL, _GLOBAL}
        if unknown or len(own["layer_types"]) != layers:
            raise ValueError(f"layer_types {own['layer_types']} of {layers} layers")
        return tuple(name == _LOCAL for name in own["layer_types"])
    if kind.startswith("gemma"):
        every = own.get("sliding_window_pattern", 2 if kind == "gemma2" else 6)
        return tuple((i + 1) % every != 0 for i in range(layers))
    return tuple(i >= own.get("max_window_layers", 0) for i in range(layers))


def _rope(own: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float | None]:
    """Return base and scaling of the rotary frequencies, and the base of sliding layers."""
    given = own.get("rope_parameters") or {}
    local = own.get("rope_local_base_freq")
    if _GLOBAL in given:
        local, given = given[_LOCAL]["rope_theta"], given[_GLOBAL]
    given = given or own.get("rope_scaling") or {}
    base = given.get("rope_theta") or own.get("rope_theta", 10_000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return base, None, local
    if kind == "linear":
        return base, RopeScaling(given["factor"]), local
    if kind == "llama3":
        limits = (given[f"{name}_freq_factor"] for name in ("low", "high"))
        original = given["original_max_position_embeddings"]
        return base, RopeScaling(given["factor"], original, *limits), local
    raise ValueError(f"rope_type {kind!r} is not supported: default, linear and llama3 are")


# ---- names ---------------------------------------------------------------------------------------

_LEAVES = {
    "kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias",
    "lora_a": "lora_A.weight", "lora_b": "lora_B.weight",
}  # fmt: skip
_TRANSPOSED = ("kernel", "lora_a", "lora_b")  # [inputs, outputs] here, [outputs, inputs] in a file


def file_name(path: str) -> str:
    """Return a parameter's name in a file: `layers/3/input_norm/scale` is that of a layernorm."""
    *modules, leaf = path.split("/")
    modules = [
        m.replace("_norm", "_layernorm") if m not in ("q_norm", "k_norm") else m for m in modules
    ]
    model = [] if modules[0] == "lm_head" else ["model"]
    return ".".join([*model, *modules, _LEAVES[leaf]])


def _parts(tree: Any, stacked: bool) -> Iterator[tuple[str, tuple[Any, ...], int | None, Any]]:
    """Yield (path, keys, index in a stack, leaf) of every tensor in a file."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = leaf_path(keys)
        if stacked and path.startswith(f"{LAYERS}/"):
            for i in range(leaf.shape[0]):
                yield path.replace(LAYERS, f"{LAYERS}/{i}", 1), keys, i, leaf
        else:
            yield path, keys, None, leaf


def _shape_in_file(path: str, index: int | None, leaf: Any) -> tuple[int, ...]:
    shape = tuple(leaf.shape if index is None else leaf.shape[1:])
    return shape[::-1] if path.endswith(_TRANSPOSED) else shape


# ---- reading -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a safetensors file."""

    file: Path
    offset: int
    dtype: Any
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """Map the file's part into memory."""
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


def tensors_of(folder: Path, file: str = WEIGHTS) -> dict[str, Tensor]:
    """Return the tensors of a file, or of all that the folder's index names, from their headers."""
    files = [folder / file]
    if (folder / INDEX).exists():
        names = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values()
        files = [folder / name for name in sorted(set(names))]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}")
    found = {}
    for file in files:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for name, one in header.items():
            if one["dtype"] not in _DTYPES:
                raise ValueError(f"{name} in {file} is {one['dtype']}, not one of {list(_DTYPES)}")
            start = 8 + size + one["data_offsets"][0]
            found[name] = Tensor(file, start, _DTYPES[one["dtype"]], tuple(one["shape"]))
    return found


def in_bf16(folder: Path) -> bool:
    """Return whether all weights of a folder are stored in bf16."""
    return all(tensor.dtype == ml_dtypes.bfloat16 for tensor in tensors_of(folder).values())


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a folder."""
    file = folder / CONFIG
    if not file.exists():
        raise ValueError(f"{folder} has no {CONFIG}: it is no folder of a Hugging Face model")
    return json.loads(file.read_text("utf-8"))


def load(
    folder: Path, model: Llama, dtype: Callable[[str], Any], shardings: Any = None
) -> dict[str, Any]:
    """Return the weights of a folder.

    Args:
      folder: with `config.json` and safetensors.
      model: of the folder's shape; adapters are not in the folder, nor in the result.
      dtype: of the weight at each path.
      shardings: of the result; None: the default device.

    Raises:
      ValueError: that lists missing and unexpected tensors and wrong shapes.
    """
    model = dataclasses.replace(model, lora=None)
    like = jax.eval_shape(functools.partial(model.weights, dtype=dtype), jax.random.key(0))
    tensors = tensors_of(folder)
    _check(folder, model, like, tensors)

    @functools.partial(jax.jit, donate_argnums=0)
    def put(stack: jax.Array, tensor: jax.Array, index: int) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, tensor, index, 0)

    def read(path: str, dtype: Any) -> np.ndarray:
        stored = tensors[file_name(path)].read()
        stored = stored.T if path.endswith(_TRANSPOSED) else stored
        return np.ascontiguousarray(stored).astype(dtype)

    def leaf(keys: tuple[Any, ...], like: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        path = leaf_path(keys)
        if not (model.stacked and path.startswith(f"{LAYERS}/")):
            return jax.device_put(read(path, like.dtype), sharding)
        stack = jnp.zeros(like.shape, like.dtype, device=sharding)
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
        for i in range(model.shape.layers):
            tensor = read(path.replace(LAYERS, f"{LAYERS}/{i}", 1), like.dtype)
            stack = put(stack, jax.device_put(tensor, sharding), i)
            stack.block_until_ready()  # tensors that are read ahead would wait in memory
        return stack

    if shardings is None:
        shardings = jax.tree.map(lambda _: None, like)
    return jax.tree_util.tree_map_with_path(leaf, like, shardings, is_leaf=lambda x: x is None)


def _check(folder: Path, model: Llama, like: Any, tensors: Mapping[str, Tensor]) -> None:
    wanted = {
        file_name(path): _shape_in_file(path, index, leaf)
        for path, _, index, leaf in _parts(like, model.stacked)
    }
    known = {"lm_head.weight"} if model.shape.tied else set()  # some files repeat the embedding
    extra = [n for n in tensors if n not in wanted and n not in known and "inv_freq" not in n]
    shapes = {n: tensors[n].shape for n in wanted if n in tensors}
    found = {
        "missing": [name for name in wanted if name not in tensors],
        "unexpected": extra,
        "of another shape": [
            f"{name} {list(shape)}, not {list(wanted[name])}"
            for name, shape in shapes.items()
            if shape != wanted[name]
        ],
    }
    if any(found.values()):
        lists = "; ".join(f"{len(n)} {what}: {_some(n)}" for what, n in found.items() if n)
        raise ValueError(f"the tensors of {folder} do not fit its {CONFIG}: {lists}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


# ---- writing -------------------------------------------------------------------------------------


def save(folder: Path, source: Path, model: Llama, params: Any, dtype: Any = jnp.bfloat16) -> None:
    """Write a folder that transformers loads: a source folder with other weights.

    Args:
      folder: to write.
      source: folder of the model that was loaded; configuration and tokenizer are copied.
      model: the model, without adapters.
      params: its weights.
      dtype: of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name and file.suffix in _COPIED:
            shutil.copy(file, folder)
    name = jnp.dtype(dtype).name
    config = read_config(source)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
    (folder / CONFIG).write_text(json.dumps(config, indent=2), "utf-8")
    shards, size = [[]], 0
    for part in _parts(params, model.stacked):
        one = math.prod(_shape_in_file(part[0], *part[2:])) * jnp.dtype(dtype).itemsize
        if shards[-1] and size + one > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += one
    if len(shards) == 1:
        return _write(folder / WEIGHTS, shards[0], dtype, file_name)
    weight_map = {}
    for i, parts in enumerate(shards, 1):
        file = folder / f"model-{i:05}-of-{len(shards):05}.safetensors"
        _write(file, parts, dtype, file_name)
        weight_map |= {file_name(path): file.name for path, *_ in parts}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), "utf-8")


_COPIED = (".json", ".jinja", ".txt", ".model")


def _write(file: Path, parts: Iterable[Any], dtype: Any, name_of: Callable[[str], str]) -> None:
    """Write a safetensors file, one tensor of the device at a time."""
    kind = jnp.dtype(dtype)
    (stored,) = (name for name, known in _DTYPES.items() if known == kind)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for path, _, index, leaf in parts:
        shape = _shape_in_file(path, index, leaf)
        end = offset + math.prod(shape) * kind.itemsize
        header[name_of(path)] = {"dtype": stored, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for path, _, index, leaf in parts:
            array = np.asarray(leaf if index is None else leaf[index]).astype(kind)
            stream.write((array.T if path.endswith(_TRANSPOSED) else array).tobytes())


def save_adapters(folder: Path, base: str, model: Llama, adapters: Any) -> None:
    """Write adapters as PEFT does; `base` is the name or folder of the model that they adapt."""
    assert model.lora is not None
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": model.lora.rank, "lora_alpha": model.lora.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": list(model.lora.names), "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), "utf-8")
    file, parts = folder / "adapter_model.safetensors", list(_parts(adapters, model.stacked))
    _write(file, parts, jnp.float32, lambda path: f"base_model.model.{file_name(path)}")
