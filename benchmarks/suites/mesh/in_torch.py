"""Training of Hugging Face's Llama in torch with FSDP2, which `scaling` compares with ours.

    python -m benchmarks.suites.mesh.in_torch torch-fsdp2 8b 1 2048 20 4

20 steps of batch 1 per GPU and sequence 2048, of new random tokens each, on 4 GPUs, one process
each; without GPUs, on CPUs by gloo. It prints a line of JSON. As in torchtitan, each block is
compiled, `fully_shard`ed and gathered in bf16 in the forward and again in the backward pass.
`torch-fsdp2`: f32 weights and fused AdamW, gradients summed in f32. `+8bit`, `+flash`: bf16 weights
with torchao's AdamW8bit, or flashoptim's FlashAdamW. `+float8`: blocks multiply and are gathered in
FP8, by torchao. `-ckpt` behind a name: each block's activations are computed again.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.suites.end_to_end.in_torch import CHECKPOINTING, llama

FLOAT8 = "+float8"
_OPTIMIZERS = ("torch-fsdp2", "torch-fsdp2+8bit", "torch-fsdp2+flash")
NAMES = [
    f"{name}{products}{remat}"
    for name in _OPTIMIZERS for products in ("", FLOAT8) for remat in ("", CHECKPOINTING)
    if (name, products) != ("torch-fsdp2+8bit", FLOAT8)
]  # fmt: skip
WARM_UP = 3
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _in_bf16(name: str) -> bool:
    return "+8bit" in name or "+flash" in name


def sharded(name: str, shape: Any, sequence: int, device: Any) -> Any:
    """Return the model, sharded over the processes of the default group."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    bf16 = _in_bf16(name)
    model = llama(shape, sequence, torch.bfloat16 if bf16 else torch.float32, device)
    if FLOAT8 in name:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # emulated on CPUs
        how = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
        of_blocks = {"module_filter_fn": lambda _, own: "lm_head" not in own}
        convert_to_float8_training(model, config=how, **of_blocks)
    policy = MixedPrecisionPolicy(torch.bfloat16, None if bf16 else torch.float32)
    inner, blocks = model.model, model.model.layers
    for i, block in enumerate(blocks):
        if name.endswith(CHECKPOINTING):
            block = checkpoint_wrapper(block, preserve_rng_state=False)
        blocks[i] = fully_shard(torch.compile(block), mp_policy=policy)
    if not shape.tied:
        fully_shard(inner.embed_tokens, mp_policy=policy)
        # needed again at once
        head = [inner.norm, model.lm_head]
        fully_shard(head, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mp_policy=policy)


def _stored(tensor: Any) -> Any:
    """This process's part of a DTensor, without torchao's class of weights gathered in FP8."""
    part = tensor.detach().to_local()
    return getattr(part, "_tensor", part)


def updater(name: str, model: Any) -> Callable[[], None]:
    """The optimizer's step, which clears the gradients."""
    import torch

    params = own = list(model.parameters())
    if _in_bf16(name):  # neither optimizer takes all DTensors
        own = [torch.nn.Parameter(_stored(param)) for param in params]
    if "+8bit" in name:
        from torchao.optim import AdamW8bit

        optimizer = AdamW8bit(own, **HYPER, bf16_stochastic_round=True)
    elif "+flash" in name:
        from flashoptim import FlashAdamW

        optimizer = FlashAdamW(own, **HYPER)
    else:
        optimizer = torch.optim.AdamW(own, **HYPER, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for one, param in zip(own, params, strict=True):
            if one is not param:
                one.grad, param.grad = _stored(param.grad), None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if FLOAT8 in name:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)

    return step


def stepper(name: str, shape: Any, batch: int, sequence: int, device: Any) -> Callable[[], Any]:
    """Make the model, and what trains it by a step and returns the loss."""
    import torch

    model = sharded(name, shape, sequence, device)
    update = updater(name, model)
    # apart from what stochastic rounding draws
    draws = torch.Generator(device).manual_seed(torch.distributed.get_rank())

    @torch.compile
    def cross_entropy(logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def step() -> Any:
        size = batch, sequence + 1
        tokens = torch.randint(shape.vocab, size, device=device, generator=draws)
        loss = cross_entropy(model(input_ids=tokens[:, :-1]).logits, tokens[:, 1:])
        loss.backward()
        update()
        return loss.detach()

    return step


def measured(step: Callable[[], Any], steps: int) -> tuple[list[float], list[float]]:
    """Return the losses and the times at which they were read, one step behind the device."""
    import torch

    losses, times, under_way = [], [time.perf_counter()], step()
    for i in range(WARM_UP + steps):
        after = step()
        losses.append(under_way.item())
        times.append(time.perf_counter())
        under_way = after
        if i + 1 == WARM_UP and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
    return losses, times


def process(rank: int, folder: str, name: str, shape: Any, *sizes: int) -> None:
    """One of the processes; the first writes the results into `folder`."""
    import torch
    from torch import distributed

    batch, sequence, steps, devices = sizes
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    where = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": devices}
    distributed.init_process_group("nccl" if on_gpu else "gloo", **where)
    step = stepper(name, shape, batch, sequence, device)
    if on_gpu:
        torch.cuda.empty_cache()
    losses, times = measured(step, steps)
    both = torch.tensor([losses[0], losses[-1]], device=device) / devices
    distributed.all_reduce(both)
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else 0, device=device)
    distributed.all_reduce(peak, distributed.ReduceOp.MAX)
    between = [end - begin for begin, end in zip(times, times[1:], strict=False)][WARM_UP:]
    found = {
        "tokens_per_s": devices * batch * sequence / statistics.median(between),
        "compile_s": times[WARM_UP] - times[0],
        "first_loss": both[0].item(),
        "train_loss": both[1].item(),
    } | ({"peak_bytes": peak.item()} if on_gpu else {})
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


def main(name: str, preset: str, *sizes: int) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # what the presets import takes no GPU
    from _llama.config import PRESETS

    if "JAX_CUDA_VISIBLE_DEVICES" in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["JAX_CUDA_VISIBLE_DEVICES"]
    from torch.multiprocessing import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(process, (folder, name, PRESETS[preset].shape, *sizes), sizes[-1])
        print((Path(folder) / "found.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
