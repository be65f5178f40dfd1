"""Folders of Hugging Face models: weights in and out, adapters in PEFT's format.

Weights are read one tensor at a time, and written one file at a time, so that no second copy of the
model exists in host or device memory. A folder is written beside its place and then renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # numpy's bfloat16, by name
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from optax_lowmem.layers import nf4

from .config import Shape
from .configuration import CONFIG, looks_like, read_config, read_json, shape_of
from .model import LAYERS, Llama, is_matrix, leaf_path

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_SHARD_BYTES = 2 * 10**9  # of a file, which is in host memory while it is written

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


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of a file: a parameter, or what a stack of parameters has of one layer.

    `name` and `shape` are those in the file.
    """

    path: str
    index: int | None
    leaf: Any

    @property
    def name(self) -> str:
        return file_name(self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.leaf.shape if self.index is None else self.leaf.shape[1:])
        return shape[::-1] if self.path.endswith(_TRANSPOSED) else shape

    def read(self) -> np.ndarray:
        """Return the array that the file has, from the device."""
        array = np.asarray(self.leaf if self.index is None else self.leaf[self.index])
        return array.T if self.path.endswith(_TRANSPOSED) else array


def parts(tree: Any) -> Iterator[Part]:
    """Yield the tensors of a tree; `layers` is a list, or a dict of stacks."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = leaf_path(keys)
        if path.startswith(f"{LAYERS}/") and isinstance(tree[LAYERS], dict):
            for i in range(leaf.shape[0]):
                yield Part(path.replace(LAYERS, f"{LAYERS}/{i}", 1), i, leaf)
        else:
            yield Part(path, None, leaf)


# ---- reading -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file."""

    file: Path
    name: str
    dtype: Any
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """Return a copy."""
        with safe_open(self.file, "numpy") as opened:
            return opened.get_tensor(self.name)


def tensors_of(folder: Path, file: str = WEIGHTS) -> dict[str, Tensor]:
    """Return the tensors of a file, or if it is not there, of all that the folder's index names."""
    files = [folder / file]
    if not files[0].exists() and (folder / INDEX).exists():
        files = [folder / name for name in _indexed(folder / INDEX)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        other = next((f", but has {f.name}: convert it" for f in folder.glob("*.bin")), "")
        raise ValueError(f"{folder} lacks {', '.join(missing)}{other}")
    result: dict[str, Tensor] = {}
    for file in files:
        for tensor in _tensors(file):
            if tensor.name in result:
                raise ValueError(f"{tensor.name} is in {file} and in {result[tensor.name].file}")
            result[tensor.name] = tensor
    return result


def _indexed(file: Path) -> list[str]:
    index = read_json(file)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not (isinstance(files, dict) and files and all(isinstance(f, str) for f in files.values())):
        raise ValueError(f"{file} has no weight_map from tensors to files: download it again")
    return sorted(set(files.values()))


def _tensors(file: Path) -> Iterator[Tensor]:
    try:
        with safe_open(file, "numpy") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                dtype = part.get_dtype()
                if dtype not in _DTYPES:
                    raise ValueError(f"{name} in {file} is {dtype}, not {' or '.join(_DTYPES)}")
                yield Tensor(file, name, np.dtype(_DTYPES[dtype]), tuple(part.get_shape()))
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file ({error}); {looks_like(file)}") from None


def read_shape(folder: Path, say: Callable[[str], Any] = warnings.warn) -> Shape:
    """Return the shape of a folder's model, and `say` if its head differs from a tied embedding."""
    shape, tensors = shape_of(read_config(folder), folder / CONFIG), tensors_of(folder)
    if (folder / ADAPTER_CONFIG).exists():
        raise ValueError(f"{folder} has {ADAPTER_CONFIG}: merge its adapters, or remove the file")
    head, table = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    if not (shape.tied and head and table) or np.array_equal(head.read(), table.read()):
        return shape
    say(
        f"{folder / CONFIG} has tie_word_embeddings, but lm_head.weight differs from the embedding:"
        " the head is loaded, trained and written as weights of its own"
    )
    return dataclasses.replace(shape, tied=False)


def stored_dtype(folder: Path) -> Callable[[str], Any]:
    """Return a function: path -> dtype in the folder, of a stack the widest; f32 if it has none."""
    widest: dict[str, Any] = {}
    for name, tensor in tensors_of(folder).items():
        name = _of_stack(name)
        widest[name] = jnp.promote_types(widest.get(name, tensor.dtype), tensor.dtype)
    return lambda path: widest.get(_of_stack(file_name(path)), np.dtype(np.float32))


def _of_stack(name: str) -> str:
    """Return `model.layers.up_proj.weight` of `model.layers.3.up_proj.weight`."""
    return re.sub(rf"\.{LAYERS}\.\d+\.", f".{LAYERS}.", name)


def load(
    folder: Path, model: Llama, dtype: Callable[[str], Any] | None = None, shardings: Any = None
) -> dict[str, Any]:
    """Return the weights of a folder; adapters are not in the folder, nor in the result.

    Where the model has matrices in 4 bits, each is quantized when it is read.

    Args:
      folder: with `config.json` and safetensors.
      model: of the folder's shape.
      dtype: of the weight at each path; None: the file's.
      shardings: of the result; None: the default device.

    Raises:
      ValueError: that lists missing and unexpected tensors and wrong shapes.
    """
    like, read = _opened(folder, model)
    dtype = dtype or stored_dtype(folder)

    @functools.partial(jax.jit, donate_argnums=0)
    def put(stack: Any, tensor: Any, index: int) -> Any:
        return jax.tree.map(
            lambda s, t: jax.lax.dynamic_update_index_in_dim(s, t, index, 0), stack, tensor
        )

    def leaf(keys: tuple[Any, ...], _: jax.ShapeDtypeStruct, sharding: Any) -> Any:
        path = leaf_path(keys)
        kind = dtype(path)
        if not (model.stacked and path.startswith(f"{LAYERS}/")):
            return jax.device_put(read(path, kind), sharding)
        layers, of_one, stack = model.shape.layers, sharding, None

        def empty(x: jax.Array) -> jax.Array:
            return jnp.zeros((layers, *x.shape), x.dtype, device=sharding)

        if isinstance(sharding, NamedSharding):
            of_one = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
        for i in range(layers):
            tensor = jax.device_put(read(path.replace(LAYERS, f"{LAYERS}/{i}", 1), kind), of_one)
            if stack is None:
                stack = jax.tree.map(empty, tensor)
            stack = jax.block_until_ready(put(stack, tensor, i))  # one tensor at a time in memory
        return stack

    if shardings is None:
        shardings = jax.tree.map(lambda _: None, like)
    return jax.tree_util.tree_map_with_path(leaf, like, shardings, is_leaf=lambda x: x is None)


def load_in_turn(folder: Path, model: Llama, dtype: Callable[[str], Any]) -> dict[str, Any]:
    """Return the same as NumPy arrays, with an iterator that reads a layer when it is asked for."""
    like, read = _opened(folder, model)

    def tree(like: Any, prefix: str, place: str) -> Any:
        def leaf(keys: tuple[Any, ...], _: Any) -> np.ndarray:
            return read(place + leaf_path(keys), dtype(prefix + leaf_path(keys)))

        return jax.tree_util.tree_map_with_path(leaf, like)

    of_layers = like.pop(LAYERS)
    numbers = range(model.shape.layers)
    layers = (tree(of_layers, f"{LAYERS}/", f"{LAYERS}/{i}/") for i in numbers)
    return tree(like, "", "") | {LAYERS: layers}


def _opened(folder: Path, model: Llama) -> tuple[Any, Callable[[str, Any], Any]]:
    """Return the shapes of a folder's weights, and a function of path and dtype that reads one."""
    plain, tensors = dataclasses.replace(model, lora=None, in_4_bits=False), tensors_of(folder)
    like = jax.eval_shape(plain.weights, jax.random.key(0))
    _check(folder, plain, like, tensors)

    def read(path: str, dtype: Any) -> Any:
        stored = tensors[file_name(path)].read()
        if model.in_4_bits and is_matrix(path):
            return nf4.quantize(stored)
        stored = stored.T if path.endswith(_TRANSPOSED) else stored
        return np.ascontiguousarray(stored).astype(dtype)

    return like, read


def _check(folder: Path, model: Llama, like: Any, tensors: Mapping[str, Tensor]) -> None:
    wanted = {part.name: part.shape for part in parts(like)}
    known = {"lm_head.weight"} if model.shape.tied else set()  # some files repeat the embedding
    extra = [n for n in tensors if n not in wanted and n not in known and "inv_freq" not in n]
    unlike = {
        "missing": [name for name in wanted if name not in tensors],
        "unexpected": extra,
        "of another shape": [
            f"{name} {list(tensors[name].shape)}, not {list(shape)}"
            for name, shape in wanted.items()
            if name in tensors and tensors[name].shape != shape
        ],
    }

    def some(names: list[str]) -> str:
        return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")

    if any(unlike.values()):
        lists = "; ".join(f"{len(n)} {what}: {some(n)}" for what, n in unlike.items() if n)
        raise ValueError(f"the tensors of {folder} do not fit its {CONFIG}: {lists}")


# ---- writing -------------------------------------------------------------------------------------

_COPIED = (".json", ".jinja", ".txt", ".model")
_TEMPLATES = "additional_chat_templates"  # a folder


def save(folder: Path, source: Path, model: Llama, trained: Any, dtype: Any = None) -> None:
    """Write a folder that transformers loads: a source folder with trained weights.

    Configuration, tokenizer and weights that were not trained are copied from `source`. Adapters
    are merged in f32. A matrix that the model has in 4 bits is written as what its codes stand for,
    beside which adapters were trained. A model in `folder` is replaced once the new one is
    complete.

    Args:
      folder: to write.
      source: folder of the model that was loaded.
      model: the model.
      trained: its trained weights, or its adapters.
      dtype: of trained weights in the file; None: that of the source.

    Raises:
      ValueError: by `check_place`, or if trained weights are not finite; nothing is written.
      OSError: in one line, if there is not enough space.
    """
    stored = tensors_of(source)
    changed = {part.name: part for part in parts(trained)}
    lora = model.lora and model.lora.alpha / model.lora.rank
    plain = dataclasses.replace(model, lora=None, in_4_bits=False)
    like = [*parts(jax.eval_shape(plain.weights, jax.random.key(0)))]
    in_4_bits = {part.name for part in like if model.in_4_bits and is_matrix(part.path)}

    def adapter(name: str, letter: str) -> str:
        return name.replace(".weight", f".lora_{letter}.weight")

    def kind(name: str) -> np.dtype:
        trains = name in changed or adapter(name, "A") in changed or name in in_4_bits
        return jnp.dtype(dtype) if dtype and trains else stored[name].dtype

    def base(name: str) -> np.ndarray:
        value = stored[name].read()
        return np.asarray(nf4.dequantize(nf4.quantize(value))) if name in in_4_bits else value

    def array(name: str) -> np.ndarray:
        if name in changed:
            value = changed[name].read()
        elif adapter(name, "A") in changed:
            a, b = (changed[adapter(name, of)].read().astype(np.float32) for of in "AB")
            value = base(name).astype(np.float32) + np.float32(lora) * (b @ a)
        elif name in in_4_bits:
            value = base(name)
        else:
            return stored[name].read()
        with np.errstate(over="ignore"):
            value = np.ascontiguousarray(value.astype(kind(name)))
        if not np.isfinite(value).all():
            raise ValueError(f"{name} has numbers that are not finite in {value.dtype}")
        return value

    sizes = {part.name: math.prod(part.shape) * kind(part.name).itemsize for part in like}
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=lambda size: size, max_shard_size=_SHARD_BYTES,
        filename_pattern="model{suffix}.safetensors",
    )  # fmt: skip
    with _in_place_of(folder, source, sum(sizes.values())) as fresh:
        _copy(source, fresh, model, {kind(name).name for name in sizes})
        for file, names in split.filename_to_tensors.items():
            save_file({name: array(name) for name in names}, fresh / file, {"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (fresh / INDEX).write_text(json.dumps(index, indent=2), "utf-8")


def _copy(source: Path, folder: Path, model: Llama, dtypes: set[str]) -> None:
    """Copy all but the weights, with the configuration of the new ones."""
    for file in source.iterdir():
        apart = "safetensors" in file.name or file.name.endswith(".bin.index.json")
        if file.is_file() and not apart and file.suffix in _COPIED:
            shutil.copy(file, folder)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, folder / _TEMPLATES)
    config = read_config(source)
    if len(dtypes) == 1:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtypes.pop()
    if shape_of(config).tied != model.shape.tied:
        config["tie_word_embeddings"] = model.shape.tied
    (folder / CONFIG).write_text(json.dumps(config, indent=2), "utf-8")


def save_adapters(folder: Path, source: Path, model: Llama, adapters: Any) -> None:
    """Write the adapters of a model as PEFT does; `source` is the folder that they adapt."""
    lora = model.lora
    assert lora is not None
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_name(source),
        "r": lora.rank, "lora_alpha": int(lora.alpha) if lora.alpha % 1 == 0 else lora.alpha,
        "lora_dropout": 0.0, "bias": "none", "target_modules": list(lora.names),
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    arrays = {
        f"base_model.model.{part.name}": np.ascontiguousarray(part.read().astype(np.float32))
        for part in parts(adapters)
    }
    with _in_place_of(folder, source, sum(a.nbytes for a in arrays.values())) as fresh:
        (fresh / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), "utf-8")
        save_file(arrays, fresh / ADAPTERS, {"format": "pt"})


def base_name(source: Path) -> str:
    """Return the hub's name of a folder in its cache, or else the absolute path."""
    source = Path(source).absolute()
    hub = next((p.name for p in source.parents if p.name.startswith("models--")), None)
    return hub.removeprefix("models--").replace("--", "/") if hub else str(source)


def check_place(folder: Path, source: Path) -> None:
    """Raise a ValueError unless a model can be written to `folder`, which is then replaced."""
    if folder.resolve() in (source.resolve(), *source.resolve().parents):
        raise ValueError(f"{folder} has the model that is read: choose another folder to write")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another folder to write")
    models = (CONFIG, ADAPTER_CONFIG)
    if folder.exists() and any(folder.iterdir()) and not any((folder / m).exists() for m in models):
        raise ValueError(f"{folder} has files that are no model: move them, or choose another")


@contextlib.contextmanager
def _in_place_of(folder: Path, source: Path, size: int) -> Iterator[Path]:
    """Yield a new folder for `size` bytes, which takes the place of `folder` once it is complete.

    A process that is killed leaves `folder` as it was, or complete, and perhaps a hidden folder
    beside it, which the next call removes.
    """
    check_place(folder, source)
    fresh, old = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "replaced"))
    if old.exists() and not folder.exists():  # killed between the two renames below
        old.rename(folder)
    for left in (fresh, old):
        shutil.rmtree(left, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        free = shutil.disk_usage(fresh).free
        if size > free:
            raise OSError(f"{size / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
        yield fresh
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{folder} was not written: {error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
