"""`Storage`: all static choices of how an optimizer stores its state, and the `Policy` of what.

A policy selects the leaves and slots to compress, with a reason for each that is not.
"""

import dataclasses
import fnmatch
import math
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import optax

from optax_lowmem._src.arrays import patterns
from optax_lowmem._src.arrays.codecs import (
    NAMES,
    GroupCodec,
    softsign,
    softsign_paper,
    sqrt,
    sqrt_paper,
)
from optax_lowmem._src.arrays.codecs.weights import WEIGHT_FORMATS
from optax_lowmem._src.arrays.hyperparameters import check_choice
from optax_lowmem._src.arrays.reprs import ShowsChanges
from optax_lowmem._src.arrays.sharding import sees_shards
from optax_lowmem._src.arrays.trees import check_mask, holds, mask_values, named_leaves
from optax_lowmem._src.optim import context

# ---- what is compressed --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Policy(ShowsChanges):
    """Leaves and slots that stay uncompressed (f32).

    Attributes:
      min_size: leaves with fewer elements stay f32 (biases, norms: 0.1 % of a model's bytes). Of
        leaves that stack layers or experts, the elements of one layer or expert count. In a
        `shard_map`, which sees shards, `init`'s decision for the whole leaf is kept.
      exclude: glob patterns on leaf paths such as `"*embed*"`, or on one slot, `"nu:*embed*"`.
      mask: optax-style mask: a tree (prefix) of one bool per leaf, which may be an Equinox module,
        or a function of the parameters that returns one; False leaves a leaf uncompressed.

    Example:
      >>> Policy(min_size=0, exclude=("*/bias", "nu:embed/*")).reason("embed/w", (512, 64), "nu")
      "excluded by the pattern 'nu:embed/*'"
    """

    min_size: int = 4096
    exclude: tuple[str, ...] = ()
    mask: optax.MaskOrFn | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.min_size, int) or self.min_size < 0:
            raise ValueError(f"Policy.min_size is a number of elements >= 0, got {self.min_size!r}")
        check_mask("Policy.mask", self.mask, "exclude=('*{}*',)")  # what to use instead
        # as a tuple, since a list is not hashable
        object.__setattr__(self, "exclude", patterns.checked("Policy.exclude", self.exclude))

    def reason(
        self,
        path: str,
        shape: tuple[int, ...],
        slot: str,
        stored: bool | None = None,
        layer: tuple[int, ...] | None = None,
        masked_out: bool = False,
    ) -> str | None:
        """Return why mask, size or name keep a slot from being compressed, or None.

        Args:
          path: the leaf's name.
          shape: the leaf's shape.
          slot: the slot's name.
          stored: whether the current state has codes for it, in a step; then `shape` may be a
            shard's.
          layer: the shape of one layer, if the leaf stacks layers.
          masked_out: whether the leaf is among those of `masked_out`.
        """
        if masked_out:
            return "the policy's mask is False here"
        if not shape:
            return "a 0-d leaf has no group"
        if math.prod(shape) == 0:
            return "the leaf is empty"
        size = math.prod(shape if layer is None else layer)
        if stored is not None and sees_shards():
            if not stored:
                return "init left it uncompressed"
        elif size < self.min_size:
            of_layer = "" if layer in (None, shape) else " of each layer"
            return f"{size} elements{of_layer}, fewer than min_size={self.min_size}"
        for pattern in self.exclude:
            of_slot, glob = _parsed(pattern)
            if of_slot in ("", slot) and fnmatch.fnmatchcase(path, glob):
                return f"excluded by the pattern '{pattern}'"
        return None

    def masked_out(self, tree: optax.Params) -> set[str]:
        """Return the paths of the leaves that the mask leaves uncompressed."""
        if self.mask is None:
            return set()
        kept = mask_values("the policy's mask", self.mask, tree)
        return {path for (path, _), keep in zip(named_leaves(tree), kept, strict=True) if not keep}


def unmatched_patterns(exclude: Iterable[str], tree: optax.Params) -> list[str]:
    """Return a warning for each pattern of `Policy.exclude` that matches no leaf of the tree."""
    paths = [path for path, _ in named_leaves(tree)]
    messages = (
        patterns.unmatched(f"the pattern {pattern!r} of Policy.exclude", _parsed(pattern)[1], paths)
        for pattern in dict.fromkeys(exclude)
    )
    return [message for message in messages if message is not None]


def warn_of_patterns(policy: Policy, tree: optax.Params) -> None:
    """Warn of patterns that match nothing, unless `tree` is masked or a caller will warn."""
    now = context.current()
    if now.decisions is not None or now.masters is not None:
        return
    if not policy.exclude or not jax.tree.leaves(tree):
        return
    if not holds(tree, lambda node: isinstance(node, optax.MaskedNode)):
        for warning in unmatched_patterns(policy.exclude, tree):
            warnings.warn(warning, stacklevel=3)


def _parsed(pattern: str) -> tuple[str, str]:
    """Split a pattern into its slot (or "") and its glob on paths."""
    of_slot, _, glob = pattern.rpartition(":")
    return of_slot, glob


# ---- how it is stored ----------------------------------------------------------------------------

DEFAULT = "default"  # the codec of the optimizer
_ROUNDINGS = ("stochastic", "nearest", "nu", "embeddings")
NEAREST_OR_NOT = ("stochastic", "nearest")
_SPLITS = ("bits", "ulp")
_UPDATE_DTYPES = ("float32", "gradient", "param")


def check_group_size(group_size: object) -> None:
    """Raise unless a group size is a positive int."""
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(
            f"group_size must be an int known when tracing, got {type(group_size).__name__}. "
            "Inside lowmem.inject_hyperparams name it in static_args, or pass it through "
            "storage=Storage(group_size=...)."
        )
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")


def check_bits(name: str, bits: object) -> None:
    """Raise unless the width of master weights is the int 24 or 32."""
    if type(bits) is not int or bits not in (24, 32):
        raise ValueError(
            f"{name} is the width of the master weights: 24 or 32, known when tracing (for no "
            f"correction, Storage(master_weight_bits=None)), got {bits!r}. To inject "
            "hyperparameters, use lowmem.inject_hyperparams."
        )


def codec_of(slot: str, codec: object, signed: bool) -> GroupCodec | None:
    """Return the codec of a slot, given it or one of `NAMES`; None for f32."""
    if codec is None:
        return None
    if isinstance(codec, str):
        if codec not in NAMES:
            raise ValueError(
                f"{slot}: no codec has the name {codec!r}; the names are {', '.join(NAMES)} (None "
                "for f32)"
            )
        codec = NAMES[codec][0 if signed else 1]
    if not isinstance(codec, GroupCodec):
        raise TypeError(
            f"{slot} takes a codec such as lowmem.codecs.softsign(), the name of one such as "
            f"'int8', or None for f32; got {codec!r}"
        )
    if signed and not codec.signed:
        raise ValueError(
            f"slot '{slot}' has negative values and '{codec.name}' is unsigned: it would store "
            "their magnitude. Use a signed codec, for example lowmem.codecs.softsign()."
        )
    return codec


@dataclasses.dataclass(frozen=True)
class Storage(ShowsChanges):
    """Storage format of weights and slots; static, hashable, never a traced value.

    By default each optimizer has its codecs and group size: `coat_adamw(lr,
    storage=Storage(seed=1))` has COAT's. Those of `flash_adamw` are `codecs.softsign()`,
    `codecs.sqrt()` and 32.

    Attributes:
      master_weight_bits: 24 or 32 for 16-bit parameters (1 or 2 bytes more per parameter); None
        keeps no correction. f32 parameters are their own master weights.
      mu: codec of first moments: `"int8"` or another name of `codecs.NAMES`, a codec such as
        `codecs.softsign()`, None for f32, or `"default"` for the optimizer's.
      nu: codec of second moments, likewise.
      group_size: neighbours on the last axis that share a scale; None is the optimizer's.
      rounding: rounding of codes. `stochastic` is unbiased: slow averages keep changing. `nearest`
        has half the maximum error, but loses changes below half a code. `nu` rounds only second
        moments stochastically, since first moments forget errors in 1 / (1 - b1) steps; a first
        moment without gradients, in a group with some, then never decays. `embeddings` rounds only
        embedding tables stochastically (Q-Adam-mini; for optimizers that take `blocks`).
      seed: seed of stochastic rounding; `lowmem.init(..., seed=)` overrides it.
      policy: leaves and slots to leave in f32.
      split: `bits`, or `ulp` for FlashOptim's Algorithm 1; fp16 always uses `ulp`.
      update_dtype: `float32` is exact through `optax.apply_updates`. `gradient` is for wrappers
        that select between updates and gradients, or zeros like them (`optax.apply_if_finite`,
        `conditionally_mask`): the weight's dtype if the gradient has it too, else float32. `param`
        is for loops that add without a cast (Equinox, Levanter). The correction absorbs the
        rounding of 16-bit updates that are smaller than the weight. For optimizers that return
        directions without updating weights, `param` means the dtype of the gradients.
      master_rounding: rounding of 24-bit master weights, whose resolution is 2^-16 of a weight.
        `stochastic` is unbiased: steps far below the resolution add up as in f32. `nearest` loses
        steps below 2^-17 of a weight. For 32-bit master weights the rounding does not matter.
        Without master weights (`master_weight_bits=None`), `stochastic` rounds bf16 weights to one
        of the two neighbours of the result of the step, unbiased and without additional bytes; the
        noise is 2^-8 of a weight if the step is smaller. None means `stochastic`, but without
        master weights `nearest`, as `optax.apply_updates` rounds.
      error_feedback: add the rounding error of each weight to its first moment, so that the
        following steps move the weight by it. For bf16 weights that are rounded stochastically
        (`master_weight_bits=None`, `master_rounding="stochastic"`), and optimizers whose direction
        is proportional to a first moment: AdamW and its variants, and SGD with momentum.
      weights: values of bf16 weights without a correction, in leaves whose moments are stored as
        codes: all of `bfloat16`; or those of 8-bit codes, 7 bits and a sign (`int8`) or FP8
        (`e4m3`), times a power of two for each group of `group_size`. The weights stay bf16 arrays.

    Memory: 3.19 bytes per 16-bit parameter for AdamW's state (1 + 2/32, 1 + 4/32, 1).

    Example:
      >>> import optax_lowmem as lowmem
      >>> Storage(mu="int8", nu=None) == Storage(mu=lowmem.codecs.softsign(), nu=None)
      True
    """

    master_weight_bits: int | None = 24
    mu: GroupCodec | str | None = DEFAULT
    nu: GroupCodec | str | None = DEFAULT
    group_size: int | None = None
    rounding: str = "stochastic"
    seed: int = 0
    policy: Policy = dataclasses.field(default_factory=Policy)
    split: str = "bits"
    update_dtype: str = "float32"
    master_rounding: str | None = None
    error_feedback: bool = False
    weights: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.master_weight_bits is not None:
            check_bits("master_weight_bits", self.master_weight_bits)
        if self.group_size is not None:
            check_group_size(self.group_size)
        check_choice("rounding", self.rounding, _ROUNDINGS)
        check_choice("split", self.split, _SPLITS)
        check_choice("update_dtype", self.update_dtype, _UPDATE_DTYPES)
        check_choice("master_rounding", self.master_rounding, (*NEAREST_OR_NOT, None))
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"error_feedback must be True or False, got {self.error_feedback!r}")
        check_choice("weights", self.weights, WEIGHT_FORMATS)
        for changed in ("error_feedback", "weights"):
            value = getattr(self, changed)
            if value not in (False, "bfloat16") and not self.rounds_weights:
                raise ValueError(
                    f"{changed}={value!r} is for weights without a correction that are rounded "
                    "stochastically: also pass master_weight_bits=None and "
                    "master_rounding='stochastic'. Corrections store the rounding error themselves."
                )
        if self.weights != "bfloat16" and self.update_dtype != "float32":
            raise ValueError(
                f"weights={self.weights!r} needs update_dtype='float32', got "
                f"{self.update_dtype!r}: with 16-bit updates, sums may lie between its values."
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(
                f"seed must be an int, got {self.seed!r}; pass a traced seed to lowmem.init"
            )
        if not isinstance(self.policy, Policy):
            raise TypeError(f"policy takes a lowmem.Policy, got {self.policy!r}")
        for slot, signed in (("mu", True), ("nu", False)):
            if getattr(self, slot) == DEFAULT:
                continue
            codec = codec_of(slot, getattr(self, slot), signed)
            object.__setattr__(self, slot, codec)
            if codec is not None and self.group_size is not None:
                codec.check_group_size(self.group_size)

    @property
    def rounds_weights(self) -> bool:
        """Return whether 16-bit weights without a correction are rounded stochastically."""
        return self.master_weight_bits is None and self.master_rounding == "stochastic"

    @classmethod
    def paper(cls, **changes: Any) -> "Storage":
        """FlashOptim as published: FP16 scales, nearest rounding, Algorithm 1's split."""
        paper = cls(
            mu=softsign_paper(), nu=sqrt_paper(), group_size=32, rounding="nearest", split="ulp",
            master_rounding="nearest",
        )  # fmt: skip
        return dataclasses.replace(paper, **changes)

    @classmethod
    def full_precision(cls, **changes: Any) -> "Storage":
        """Storage of moments in f32; `exact` also has master weights of 32 bits instead of 24."""
        return dataclasses.replace(cls(mu=None, nu=None, group_size=32), **changes)

    @classmethod
    def exact(cls, **changes: Any) -> "Storage":
        """Storage without loss: moments in f32, master weights of 32 bits.

        The master weights of a run are those of the same run on f32 weights, bit for bit, if XLA
        fuses the same multiply-adds. Only the gradients are those of 16-bit weights.

        Memory: 10 bytes per 16-bit parameter for AdamW's state (4, 4, 2).

        Example:
          >>> Storage.exact().master_weight_bits
          32
        """
        exact = cls(mu=None, nu=None, group_size=32, master_weight_bits=32)
        return dataclasses.replace(exact, **changes)

    @classmethod
    def four_bit(cls, **changes: Any) -> "Storage":
        """Storage of both moments in 4-bit codes: 1.0625 bytes per parameter, including scales.

        Prefer `flash_factored_adamw(lr, storage=Storage.four_bit(nu=None, group_size=32))`, which
        takes 0.56 bytes per parameter for both moments and stores no second moments in 4 bits:
        `init` warns if elementwise second moments are stored in 4 bits.

        First moments are companded, second moments linear, in groups of 64 with 16-bit scales. Of
        the 4-bit codecs this pair has the smallest error of Adam's step in closed loop if the
        second moments of a group are within a factor of 15. Smaller ones are stored as 1/15 of the
        largest, so their weights move too slowly. With log-normal curvature the relative error of
        the step is 0.43, with `nu` in f32 it is 0.02. The final loss of a GPT with 42 million
        parameters is 0 to 1 % higher (8 bits: within 0.1 %).

        Example:
          >>> Storage.four_bit(master_weight_bits=32).group_size
          64
        """
        return dataclasses.replace(cls(mu="int4", nu="int4", group_size=64), **changes)


FLASH = Storage(mu=softsign(), nu=sqrt(), group_size=32)  # of flash_adamw
_LEFT_TO_OPTIMIZERS: dict[str, object] = {"mu": DEFAULT, "nu": DEFAULT, "group_size": None}


def completed(storage: Storage, default: Storage = FLASH) -> Storage:
    """Replace the fields that `storage` leaves to the optimizer by those of its `default`."""
    if not isinstance(storage, Storage):
        return storage  # the optimizer raises the error
    left = {
        name: getattr(default, name)
        for name, value in _LEFT_TO_OPTIMIZERS.items()
        if getattr(storage, name) == value
    }
    return dataclasses.replace(storage, **left)
