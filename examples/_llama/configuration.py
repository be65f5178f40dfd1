"""Configurations of Hugging Face folders: what of transformers' normal form our model computes."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import RopeScaling, Shape

CONFIG = "config.json"
TESTED = "5.17 to 5.24"  # versions of transformers
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"

# Keys of transformers' classes, of every model_type. A file must have the sizes.
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
READ = (*SIZES, "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
        "rope_parameters")  # fmt: skip
# Without effect on logits. `max_position_embeddings` matters to rope_types that are refused.
WITHOUT_EFFECT = (
    "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_encoder_decoder", "label2id", "max_position_embeddings",
    "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "transformers_version", "use_cache",
)  # fmt: skip
# Keys of any file -> the values that our model computes. Code that models share reads those that
# no class declares.
SHARED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "per_layer_config": (None,),
    "fusion_config": (None,),
    "transformers_weights": (None,),
    "is_causal": (True,),
}
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Keys of a model_type: those that are read, and those of which some values are supported."""

    read: tuple[str, ...]
    only: dict[str, tuple[Any, ...]]


_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False,)}
_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish")}
_WINDOWS = ("use_sliding_window", "max_window_layers", "sliding_window", "layer_types")
_GEMMA_READ = ("sliding_window", "layer_types", "query_pre_attn_scalar", "final_logit_softcapping")
_GEMMA_ONLY = _NO_BIAS | {
    "hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (None, False),
}  # fmt: skip
FAMILIES = {
    "llama": Family((), _SILU | _NO_BIAS | {"mlp_bias": (False,)}),
    "mistral": Family(("sliding_window",), _SILU),
    "qwen2": Family(_WINDOWS, _SILU),
    "qwen3": Family(_WINDOWS, _SILU | _NO_BIAS),
    "gemma2": Family(_GEMMA_READ + ("attn_logit_softcapping",), _GEMMA_ONLY),
    "gemma3_text": Family(_GEMMA_READ, _GEMMA_ONLY | {"attn_logit_softcapping": (None,)}),
}


def looks_like(file: Path) -> str:
    """Say what a file is that cannot be read, and what to do."""
    with file.open("rb") as stream:
        start = stream.read(200).lstrip()
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer: run `git lfs pull` in its folder"
    if start.startswith(b"<"):
        return "it is an HTML page, such as one that asks to log in: download the file again"
    return "it is damaged: download it again" if start else "it is empty: download it again"


def read_json(file: Path) -> Any:
    """Return the content of a JSON file, or raise a ValueError that says what else the file is."""
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}); {looks_like(file)}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a folder, as it is in its file."""
    file = folder / CONFIG
    if not file.exists():
        raise ValueError(f"{folder} has no {CONFIG}: it is no folder of a Hugging Face model")
    config = read_json(file)
    if not isinstance(config, dict):
        raise ValueError(f"{file} has a {type(config).__name__}, not a configuration: download it")
    return config


def shape_of(config: Mapping[str, Any], file: Path | str = CONFIG) -> Shape:
    """Return the shape of a configuration, with the meaning that transformers gives its keys.

    Raises:
      ValueError: for another architecture, or for keys that the model code does not compute.
    """
    try:
        return _shape_of(config)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def _shape_of(config: Mapping[str, Any]) -> Shape:
    kind = config.get("model_type")
    if kind not in list(FAMILIES):
        raise ValueError(f"model_type {kind!r} is not supported: {', '.join(FAMILIES)} are")
    missing = [key for key in SIZES if key not in config]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}: download it again")
    own = normal_form(config)
    wrong = unsupported(own) | {
        key: config[key] for key in SHARED if config.get(key, SHARED[key][0]) not in SHARED[key]
    }
    if wrong:
        told = ", ".join(f"{key} {reprlib.repr(value)}" for key, value in wrong.items())
        raise ValueError(f"{kind} with {told} is not supported")
    for key in (*READ, *FAMILIES[kind].read):
        value = getattr(own, key, None)
        if key != "max_window_layers" and isinstance(value, int | float) and value is not False:
            _above_zero(key, value)
    heads, kv_heads = own.num_attention_heads, own.num_key_value_heads
    head = getattr(own, "head_dim", None)
    head = own.hidden_size // heads if head is None else head
    if not isinstance(head, int) or head % 2 or head < 1:
        raise ValueError(f"head_dim is {head}, not an even number above 0")
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of {kv_heads} key heads")
    gemma, sliding = kind.startswith("gemma"), _sliding(own)
    rope, scaling, local, local_scaling = _rope(own, any(sliding))
    return Shape(
        layers=own.num_hidden_layers,
        width=own.hidden_size,
        hidden=own.intermediate_size,
        heads=heads,
        kv_heads=kv_heads,
        vocab=own.vocab_size,
        rope=rope,
        tied=bool(own.tie_word_embeddings),
        head=head,
        epsilon=own.rms_norm_eps,
        scaling=scaling,
        bias=kind == "qwen2",
        head_norms=kind in ("qwen3", "gemma3_text"),
        gemma=gemma,
        query_scale=own.query_pre_attn_scalar**-0.5 if gemma else None,
        score_cap=own.attn_logit_softcapping if gemma else None,
        logit_cap=own.final_logit_softcapping if gemma else None,
        window=own.sliding_window if any(sliding) else 0,
        sliding=sliding if any(sliding) else (),
        local_rope=local,
        local_scaling=local_scaling,
    )


def normal_form(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration, which has every key of the model_type's class."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    import transformers

    try:
        own = transformers.AutoConfig.for_model(**copy.deepcopy(dict(config)))
        own.standardize_rope_params()  # as models do, with keys that the constructor set last
        return own
    except Exception as error:  # of many kinds, some with several lines
        told = " ".join(str(error).split())
        raise ValueError(f"transformers {transformers.__version__} refuses it: {told}") from None


def unsupported(own: Any) -> dict[str, Any]:
    """Return the keys of a normal form, and their values, that the model code does not compute.

    A key that is unknown, of a newer version of transformers, may have its default.
    """
    family = FAMILIES[own.model_type]
    known = {*READ, *WITHOUT_EFFECT, *SHARED, *family.read}
    wrong = {}
    for field in dataclasses.fields(own):
        value, key = getattr(own, field.name), field.name
        if key not in known and value not in family.only.get(key, (field.default,)):
            wrong[key] = value
    return wrong


def _sliding(own: Any) -> tuple[bool, ...]:
    """Return which layers attend to a window."""
    read = FAMILIES[own.model_type].read
    window = getattr(own, "sliding_window", None)
    if "layer_types" not in read:
        if own.model_type == "mistral" and set(getattr(own, "layer_types", None) or ()) - {_LOCAL}:
            raise ValueError(f"mistral with layer_types {own.layer_types} is not supported")
        return ("sliding_window" in read and window is not None,) * own.num_hidden_layers
    unknown = set(own.layer_types) - {_LOCAL, _GLOBAL}
    if unknown:
        raise ValueError(f"layer_types {sorted(unknown)} are not supported: {_LOCAL}, {_GLOBAL}")
    sliding = tuple(name == _LOCAL for name in own.layer_types)
    if any(sliding) and window is None:
        raise ValueError(f"layers have {_LOCAL}, and no sliding_window is set")
    return sliding


def _rope(own: Any, sliding: bool) -> tuple[Any, ...]:
    """Return base and scaling of the rotary frequencies; of sliding layers too, if they differ."""
    given = own.rope_parameters
    if own.model_type != "gemma3_text":
        return *_scaled("rope_parameters", given), None, None
    if given.keys() - {_LOCAL, _GLOBAL}:
        raise ValueError(f"rope_parameters has {sorted(given)}, not only {_LOCAL} and {_GLOBAL}")
    local = _scaled(f"rope_parameters of {_LOCAL}", given[_LOCAL]) if sliding else (None, None)
    return *_scaled(f"rope_parameters of {_GLOBAL}", given[_GLOBAL]), *local


def _scaled(name: str, given: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    kind = given.get("rope_type")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not supported: {', '.join(ROPE_TYPES)} are")
    read = ("rope_theta", *ROPE_TYPES[kind])
    base, *scaling = (_above_zero(f"{name}: {key}", given.get(key)) for key in read)
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{name}: partial_rotary_factor {given['partial_rotary_factor']}, not 1")
    unread = given.keys() - {*read, "rope_type", "type", "partial_rotary_factor"}
    if unread:
        raise ValueError(f"{name}: rope_type {kind!r} does not read {', '.join(sorted(unread))}")
    return base, RopeScaling(*scaling) if scaling else None


def _above_zero(key: str, value: Any) -> Any:
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ValueError(f"{key} is {value!r}, not a number above 0")
    return value
