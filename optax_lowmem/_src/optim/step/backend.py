"""Selects the implementation that steps each leaf, while tracing.

The choice depends on the backends' `unsupported`, never on caught errors.
"""

import math
from collections.abc import Iterator

import jax

from optax_lowmem._src.arrays.groups import MAX_ELEMENTS
from optax_lowmem._src.kernels import partitioned, platform, step_arguments
from optax_lowmem._src.kernels.gpu_kernel import BACKENDS
from optax_lowmem._src.optim.step import gpu, on_mesh, tuning, xla
from optax_lowmem._src.optim.step.plan import LeafPlan
from optax_lowmem._src.optim.step.rule import UpdateRule
from optax_lowmem._src.optim.step.state import Leaf, LeafBatch

IMPLEMENTATIONS = ("xla", *BACKENDS, "pallas_tpu")
_TPU = "pallas_tpu"
_UNTRIED = f"no TPU has run the kernel yet; implementation='{_TPU}' of lowmem.step asks for it here"
_ELEMENTWISE = "no slot is compressed: plain elementwise work, which XLA fuses well"
_SMALL = 1 << 16  # elements; for smaller leaves without codes the launches of XLA dominate


def _unsupported(kernel: str, rule: UpdateRule, plan: LeafPlan, shards: bool = False) -> str | None:
    """Return the reason why a kernel cannot step a leaf on any device, or None.

    With `shards`, a kernel for GPUs may step the shards of a leaf that is too large.
    """
    size = math.prod(plan.shape)
    if not plan.shape or size == 0:
        return "a 0-d or empty leaf has no tiles"
    if gpu.is_too_large(plan) and not shards:
        return f"{size} elements, more than a kernel's 32-bit offsets reach"
    if kernel == _TPU:
        from optax_lowmem._src.optim.step.tpu import pallas_tpu

        return pallas_tpu.unsupported(rule, plan)
    return gpu.unsupported(kernel, rule, plan)


def choose(
    rule: UpdateRule, plan: LeafPlan, implementation: str | None = None, g: jax.Array | None = None
) -> tuple[str, str]:
    """Return (implementation of a leaf, reason), on the platform inferred from its gradient `g`.

    Raises if the implementation that the caller chose does not support the leaf, or for the TPU's
    kernel, if the computation is not for a TPU.
    """
    if implementation == "xla":
        return "xla", "asked for"
    if implementation is not None:
        return _requested(rule, plan, implementation, g)
    tpu = platform.may_be_tpu(g)
    if not plan.quantized and (math.prod(plan.shape) > _SMALL or tpu):
        return "xla", _ELEMENTWISE  # on a TPU also small leaves: it has no launch cost
    if tpu:
        reason = _unsupported(_TPU, rule, plan)
        return "xla", _UNTRIED if reason is None else f"{_TPU}: {reason}"
    if platform.no_gpu_reason() is not None:
        return "xla", platform.not_tpu_reason(g)
    reason_against = platform.explicit_axes_reason(g)
    if reason_against is not None:
        return "xla", reason_against
    reasons: list[str] = []
    shards = jax.device_count() > 1 and partitioned.available()
    for kernel in BACKENDS:
        reason = _unsupported(kernel, rule, plan, shards)
        if reason is None:
            words = "fused kernel"
            if gpu.is_too_large(plan):
                words += f" for shards of up to {MAX_ELEMENTS} elements, XLA for larger ones"
            return kernel, "; ".join([words, *reasons])
        reasons.append(f"{kernel}: {reason}")
    return "xla", "; ".join(reasons)


def _requested(
    rule: UpdateRule, plan: LeafPlan, kernel: str, g: jax.Array | None
) -> tuple[str, str]:
    elsewhere = platform.no_gpu_reason()
    if kernel == _TPU:
        elsewhere = None if platform.may_be_tpu(g) else platform.not_tpu_reason(g)
    reason = elsewhere or platform.explicit_axes_reason(g) or _unsupported(kernel, rule, plan)
    small = kernel != _TPU and math.prod(plan.shape) <= _SMALL
    if reason is None and (plan.quantized or small):
        return kernel, "asked for"
    if elsewhere is None and not plan.quantized:
        return "xla", reason or _ELEMENTWISE
    if elsewhere is None and kernel == _TPU:  # so that it can be tried on any model
        return "xla", f"{_TPU}: {reason}"
    raise ValueError(
        f"implementation={kernel!r} cannot take leaf '{plan.path}': {reason}. Pass "
        "implementation=None to choose a supported one."
    )


def fused_updates(
    rule: UpdateRule, batch: LeafBatch, tuned: tuning.Tuning | None = None
) -> list[Leaf]:
    """Compute `reference.fused_update` of each parameter with its fastest implementation.

    `tuned` are tile and launch sizes of a kernel; None for those tuned for the device.
    """
    results: dict[int, Leaf] = {}
    if batch.implementation == _TPU or (
        batch.implementation != "xla" and platform.no_gpu_reason() is None
    ):
        results.update(_on_mesh(rule, batch, tuned))
    chosen: dict[str, list[int]] = {}
    for i, (plan, leaf) in enumerate(zip(batch.plans, batch.leaves, strict=True)):
        if i not in results:
            name, _ = choose(rule, plan, batch.implementation, leaf.g)
            chosen.setdefault(name, []).append(i)
    for name, indices in chosen.items():
        part = batch.take(indices)
        if name == "xla":
            result = xla.step(rule, part)
        elif name == _TPU:
            from optax_lowmem._src.optim.step.tpu import pallas_tpu

            result = pallas_tpu.step(rule, part, tuned)
        else:
            result = gpu.step(name, rule, part, tuned)
        results.update(zip(indices, result, strict=True))
    return [results[i] for i in range(len(batch.plans))]


def _on_mesh(
    rule: UpdateRule, batch: LeafBatch, tuned: tuning.Tuning | None
) -> Iterator[tuple[int, Leaf]]:
    """Yield (index, result) of the parameters whose shards a kernel can step, mesh by mesh."""
    if batch.implementation != _TPU and rule.prepares == "blocks":
        return  # on GPUs XLA computes the means of blocks
    shardings = {}
    for i, (plan, leaf) in enumerate(zip(batch.plans, batch.leaves, strict=True)):
        sharding = on_mesh.leaf_sharding(plan, leaf)
        if sharding is not None and on_mesh.unsupported(plan, sharding) is None:
            shardings[i] = sharding

    def step(part: LeafBatch) -> list[Leaf]:
        with step_arguments.stepping(shardings=None):
            return fused_updates(rule, part, tuned)

    for mesh in dict.fromkeys(sharding.mesh for sharding in shardings.values()):
        mine = [i for i, sharding in shardings.items() if sharding.mesh == mesh]
        result = on_mesh.fused_updates(step, batch.take(mine), [shardings[i] for i in mine])
        yield from zip(mine, result, strict=True)
