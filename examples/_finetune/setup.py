"""The model of a folder and its optimizer, before anything is allocated."""

import argparse
import dataclasses
import difflib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _gpt.arguments import compute_dtype
from _llama import choose, huggingface
from _llama.config import FULL, NF4, WEIGHTS, Settings, Shape
from _llama.model import LAYERS, Llama, Lora, Packed, in_4_bits, leaf_path
from _llama.optimizer import make_optimizer, weights_dtype

from optax_lowmem import plan


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model, with its adapters, and its optimizer; `is_bf16`: as are the folder's weights."""

    args: argparse.Namespace
    settings: Settings
    schedule: optax.Schedule
    model: Llama
    tx: optax.GradientTransformation
    is_frozen: Callable[[str], bool]  # path of a weight -> whether it is not trained
    is_bf16: bool

    @property
    def dtype(self) -> Callable[[str], Any]:
        """Path of a weight -> the dtype that it is loaded in."""
        if self.model.lora is not None:
            return huggingface.stored_dtype(self.args.model)
        return lambda path: weights_dtype(self.settings, path) if self.is_bf16 else jnp.float32

    @property
    def weights(self) -> Any:
        """Shapes of the folder's weights."""
        model, dtype = dataclasses.replace(self.model, lora=None), self.dtype
        return jax.eval_shape(lambda: model.weights(jax.random.key(0), dtype))

    @property
    def batch(self) -> Packed:
        """Shapes of a batch."""
        rows, length = self.settings.batch, self.settings.sequence
        tokens = jax.ShapeDtypeStruct((rows, length + 1), np.int32)
        return Packed(tokens, tokens, jax.ShapeDtypeStruct((rows, length), np.float32))


def make_schedule(args: argparse.Namespace, steps: int) -> optax.Schedule:
    """Return the learning rate: a linear warm-up, and what --schedule says."""
    warmup = max(1, round(args.warmup * steps))
    rest = max(steps - warmup, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(args.lr, rest),
        "linear": optax.linear_schedule(args.lr, 0.0, rest),
        "constant": optax.constant_schedule(args.lr),
    }[args.schedule]
    rising = optax.linear_schedule(args.lr / warmup, args.lr, warmup)
    return optax.join_schedules([rising, after], [warmup])


def make_setup(args: argparse.Namespace, shape: Shape, steps: int) -> Setup:
    """Return the setup of a run.

    Raises:
      ValueError: for layers of two kinds with gradient release, weights in host memory that are not
        bf16, or a pattern that selects nothing.
    """
    settings = Settings(
        preset=args.model.name, optimizer=args.optimizer, shape=shape, sequence=args.sequence,
        batch=args.batch, steps=steps, learning_rate=args.lr, text=str(args.data), remat=FULL,
        compute=compute_dtype(args.compute), seed=args.seed, clip=args.clip,
        implementation=args.implementation, release=args.release,
        offload=args.offload,
    )  # fmt: skip
    lora = Lora(plan.lora_names(args.lora), args.rank, args.alpha) if args.lora else None
    model = Llama(shape, settings.compute, choose.attention(settings), FULL, lora=lora)
    if args.base == NF4:
        model = in_4_bits(model)
    if settings.release and len(set(model.slides)) > 1:
        raise ValueError("--release needs equal layers, and some of this model's have a window")
    schedule = make_schedule(args, steps)
    tx = make_optimizer(settings, schedule, args.weight_decay, args.decay_all)
    is_frozen = (lambda path: False) if args.freeze is None else frozen_by(args.freeze, model)
    if of_stacks := stacked(is_frozen, model):
        is_frozen = of_stacks
    else:
        model = dataclasses.replace(model, stacked=False)
    is_bf16 = {t.dtype.name for t in huggingface.tensors_of(args.model).values()} == {"bfloat16"}
    if args.offload == WEIGHTS and lora is None and not is_bf16:
        raise ValueError("--offload weights needs a folder whose weights are bf16: use --offload")
    return Setup(args, settings, schedule, model, tx, is_frozen, is_bf16)


def paths_of(model: Llama) -> list[str]:
    """Return the paths of the parameters of a model without adapters, with layers apart."""
    apart = dataclasses.replace(model, stacked=False, lora=None, in_4_bits=False)
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(apart.weights, jax.random.key(0)))
    return [leaf_path(keys) for keys, _ in leaves]


def frozen_by(pattern: str, model: Llama) -> Callable[[str], bool]:
    """Return a function of a path, such as `layers/0/mlp/up_proj/kernel`: is the pattern in it?

    Raises:
      ValueError: if the pattern is none, or matches no parameter of the model, or all of them.
    """
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise ValueError(f"--freeze {pattern!r} is no regular expression: {error}") from None
    paths = paths_of(model)
    matched = [path for path in paths if search(path)]
    if not matched:
        names = [*{name: None for path in paths for name in path.split("/")}, *paths]
        near = ", ".join(difflib.get_close_matches(pattern, names, 3)) or ", ".join(paths[:3])
        raise ValueError(f"--freeze {pattern!r} matches no parameter; near it are: {near}")
    if len(matched) == len(paths):
        raise ValueError(f"--freeze {pattern!r} matches every parameter: nothing would be trained")
    return lambda path: search(path) is not None


def stacked(is_frozen: Callable[[str], bool], model: Llama) -> Callable[[str], bool] | None:
    """Return the same for paths of stacked layers, or None if it differs between layers.

    With stacks, a step of many layers compiles as fast as one of a few.
    """
    frozen: dict[str, bool] = {}
    for path in paths_of(model):
        of_stack = re.sub(rf"^{LAYERS}/\d+/", f"{LAYERS}/", path)
        if frozen.setdefault(of_stack, is_frozen(path)) != is_frozen(path):
            return None
    return frozen.__getitem__
