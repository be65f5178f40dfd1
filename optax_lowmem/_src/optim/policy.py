"""Selection of the leaves and slots to compress, with a reason for each that is not."""

import dataclasses
import fnmatch
import math
import warnings
from collections.abc import Iterable

import jax
import optax

from optax_lowmem._src.arrays import patterns, varying
from optax_lowmem._src.arrays.reprs import ShowsChanges
from optax_lowmem._src.arrays.trees import check_mask, holds, mask_values, named_leaves
from optax_lowmem._src.optim import context


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
    ) -> str | None:
        """Return why size or name keep a slot from being compressed, or None if they do not.

        `decide_slot` also checks the mask (`masked_out`) and whether the storage has a codec.

        Args:
          path: the leaf's name.
          shape: the leaf's shape.
          slot: the slot's name.
          stored: whether the current state has codes for it, in a step; then `shape` may be a
            shard's.
          layer: the shape of one layer, if the leaf stacks layers.
        """
        if not shape:
            return "a 0-d leaf has no group"
        if math.prod(shape) == 0:
            return "the leaf is empty"
        size = math.prod(shape if layer is None else layer)
        if stored is not None and varying.sees_shards():
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
