"""The command `python -m optax_lowmem.plan`: how a known model fits on a GPU."""

import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from optax_lowmem._src.memory.decoders import Decoder, decoder
from optax_lowmem._src.memory.plan import MODES, OFFLOAD, RELEASE, RESIDENT, ModePlan, Plan, plan
from optax_lowmem._src.optimizers import OPTIMIZERS

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
USABLE = 0.93  # of a GPU's memory; the rest is for the driver and gaps between arrays
LORA = "lora"
_MEANING = {
    RESIDENT: "All gradients exist at once.",
    RELEASE: "Each layer is updated inside the backward pass.",
    OFFLOAD: "Like release, with the optimizer's state in host memory.",
    LORA: "Adapters are trained; the weights are frozen.",
}
_SHORTEST = 128  # rows that are worth a try
Adapters = tuple[tuple[str, ...], int]  # names of the adapted matrices, rank


def bytes_of(text: str) -> int:
    """Return the bytes of `24GiB`, `24GB` or the like."""
    match = re.fullmatch(rf"([\d.]+)\s*({'|'.join(_UNITS)})", text.strip())
    if not match:
        raise ValueError(f"{text!r} is no size: write a number and one of {', '.join(_UNITS)}")
    return int(float(match[1]) * _UNITS[match[2]])


def plan_decoder(
    sizes: Decoder,
    optimizer: str,
    budget: int,
    sequence: int,
    lora: Adapters | None = None,
    accumulate: bool = False,
) -> Plan:
    """Plan a decoder in bf16 whose layers are recomputed in the backward pass.

    Args:
      sizes: the decoder.
      optimizer: name in `OPTIMIZERS`.
      budget: bytes of the device that the step may use.
      sequence: tokens per row.
      lora: adapters, for one more mode that trains them alone.
      accumulate: as in `memory.plan`.

    Returns:
      A `Plan` of the modes of `memory.plan`, for all parameters, and of the adapters.
    """
    tx, weights = OPTIMIZERS[optimizer].make(1e-5), sizes.params()
    make = functools.partial(plan, tx, budget=budget, stacks=("layers",), accumulate=accumulate)
    activations = functools.partial(sizes.activations, sequence=sequence, accumulate=accumulate)
    plans: list[ModePlan] = []
    for mode in (RESIDENT,) if sizes.gemma else MODES:  # the others need equal layers
        plans += make(
            weights, activations=functools.partial(activations, mode=mode), modes=(mode,)
        ).modes
    if lora is not None:
        of_adapters = functools.partial(activations, lora=lora[0])
        (mode_plan,) = make(
            sizes.params(lora), frozen=weights, activations=of_adapters, modes=(RESIDENT,)
        ).modes
        plans.append(dataclasses.replace(mode_plan, name=LORA))
    return Plan(budget, tuple(plans))


def advice(sizes: Decoder, optimizer: str, budget: int, sequence: int, lora: Adapters) -> str:
    """Return what to change where nothing fits."""
    shorter = sequence // 2
    while shorter >= _SHORTEST:
        best = plan_decoder(sizes, optimizer, budget, shorter, lora).best
        if best is not None:
            return f"Nothing fits. With --sequence {shorter}, {best.name} does."
        shorter //= 2
    least = min(
        plan_decoder(sizes, optimizer, budget, sequence, lora).modes,
        key=lambda mode: mode.total_bytes(1),
    )
    needed = least.total_bytes(1) / USABLE / 2**30
    return (
        f"Nothing fits, not even with shorter rows. {least.name} needs the least memory: a GPU of "
        f"{needed:.1f} GiB. Use one, or a smaller model."
    )


def main(arguments: list[str] | None = None) -> None:
    """Print the plan of a model on a GPU, and the command that fine-tunes it."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_lowmem.plan",
        description="Print how a Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3 fits on a GPU, "
        "from its config.json. Nothing is allocated, and no GPU is needed.",
    )
    parser.add_argument("--params", required=True, help="config.json, or a folder with one")
    parser.add_argument("--gpu", required=True, help="memory of the GPU, such as 24GiB")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens per row (2048)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="flash_adamw", metavar="NAME")
    parser.add_argument("--lora", default="q_proj,v_proj", help="adapted matrices (q_proj,v_proj)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (16)")
    parser.add_argument("--pcie", type=float, default=25.0, metavar="GB/S",
                        help="speed of copies to and from the host (25: PCIe 4 x16)")  # fmt: skip
    args = parser.parse_args(arguments)
    file = Path(args.params)
    file = file / "config.json" if file.is_dir() else file
    try:
        sizes = decoder(json.loads(file.read_text("utf-8")))
        budget = int(USABLE * bytes_of(args.gpu))
        lora = tuple(args.lora.split(",")), args.rank
        result = plan_decoder(sizes, args.optimizer, budget, args.sequence, lora)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    print(
        f"{args.optimizer}, rows of {args.sequence} tokens; {budget / 2**30:.2f} GiB of {args.gpu} "
        f"are usable ({USABLE:.0%})\n\n{result}\n"
    )
    mode = result.best
    if mode is None:
        raise SystemExit(advice(sizes, args.optimizer, budget, args.sequence, lora))
    for line in recommendation(mode, sizes, args, file.parent):
        print(line)


def recommendation(
    mode: ModePlan, sizes: Decoder, args: argparse.Namespace, folder: Path
) -> Iterator[str]:
    """Yield the sentences about a mode that fits, and how to run it."""
    yield f"Recommended: {mode.name}. {_MEANING[mode.name]}"
    if mode.host:
        size, seconds = f"{mode.host / 2**30:.2f} GiB", mode.host / (1e9 * args.pcie)
        inputs = 2 * (sizes.layers + 1) * sizes.width / 2**10
        yield (
            f"A step copies {size} to the GPU and {size} back, whatever its batch: {seconds:.2f} s "
            f"each way at {args.pcie:g} GB/s (computed)."
        )
        yield f"Inputs of the layers and the head take {inputs:.0f} KiB of host memory per token."
    flags = {
        RELEASE: " --release",
        OFFLOAD: f" --offload --micro-batch {mode.batch}",
        LORA: f" --lora {args.lora} --rank {args.rank}",
    }
    # XLA's default allocator divides the memory that is left into pieces that are too small
    allocator = "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async " if mode.name == OFFLOAD else ""
    yield (
        f"    {allocator}python examples/finetune.py --model {folder} --data FILE "
        f"--optimizer {args.optimizer} --sequence {args.sequence} --batch {mode.batch}"
        + flags.get(mode.name, "")
    )
