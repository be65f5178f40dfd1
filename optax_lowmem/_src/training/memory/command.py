"""The command `python -m optax_lowmem.plan`: how a known model fits on a GPU."""

import argparse
import dataclasses
import difflib
import functools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from optax_lowmem._src.optim.optimizers import OPTIMIZERS
from optax_lowmem._src.training.memory.decoders import Decoder, decoder, lora_names
from optax_lowmem._src.training.memory.plan import (
    OFFLOAD,
    RELEASE,
    RESIDENT,
    STREAM,
    STREAM_FROZEN,
    ModePlan,
    Plan,
    plan,
)

PLAIN = "optax.adamw"  # with f32 weights, as in examples/finetune.py
# MiB that nvidia-smi reports
_CARDS = {
    "T4": 15_360, "V100 16GB": 16_384, "V100 32GB": 32_768, "A10": 23_028, "L4": 23_034,
    "L40S": 46_068, "RTX A6000": 49_140, "A100 40GB": 40_960, "A100 80GB": 81_920, "H100": 81_559,
    "H200": 143_771, "B200": 183_359, "RTX 3060": 12_288, "RTX 3080": 10_240, "RTX 3090": 24_576,
    "RTX 4060 Ti 16GB": 16_380, "RTX 4070": 12_282, "RTX 4080": 16_376, "RTX 4090": 24_564,
    "RTX 5070": 12_227, "RTX 5080": 16_303, "RTX 5090": 32_607,
}  # fmt: skip
# TFLOP/s of 16-bit products with f32 sums, from the vendors' data sheets
_TFLOPS = {
    "V100 16GB": 125, "V100 32GB": 125, "A10": 125, "L4": 121, "L40S": 362, "RTX A6000": 155,
    "A100 40GB": 312, "A100 80GB": 312, "H100": 989, "H200": 989, "B200": 2250, "RTX 3080": 60,
    "RTX 3090": 71, "RTX 4080": 97, "RTX 4090": 165, "RTX 5080": 113, "RTX 5090": 210,
}  # fmt: skip
_OF_PEAK = 0.7  # what the products of a step reach of these
_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 2**30, "MB": 2**20}  # GB: as cards are sold
USABLE = 0.93  # of a GPU's memory; the rest is for the driver and gaps between arrays
LORA, QLORA, LORA_STREAM, QLORA_STREAM = "lora", "qlora", "lora-stream", "qlora-stream"
_MEANING = {
    RESIDENT: "An ordinary step: all gradients exist at once.",
    RELEASE: "Each layer is updated inside the backward pass.",
    OFFLOAD: "Like release, with the optimizer's state in host memory.",
    STREAM: "Like release, with weights and state in host memory, copied layer by layer.",
    LORA: "Adapters are trained; the weights are frozen.",
    QLORA: "Adapters are trained; the weights are frozen, the layers' matrices in 4 bits.",
    LORA_STREAM: "Like lora, with the frozen weights in host memory, copied layer by layer.",
    QLORA_STREAM: "Like qlora, with the frozen weights in host memory, copied layer by layer.",
}
# number of parameters -> model, and by mode: tokens per second with flash_adamw on an NVIDIA H200,
# and the step
MEASURED = {
    8_030_261_248: (
        "Llama-3.1-8B",
        {
            RELEASE: (10_831, "8 rows of 2048 tokens"),
            OFFLOAD: (8_815, "8 rows of 2048 tokens in 4 micro-batches, 22.2 GiB free"),
        },
    ),
    134_515_008: (
        "SmolLM2-135M",
        {
            RESIDENT: (187_784, "8 rows of 1024 tokens"),
            LORA: (166_932, "8 rows of 1024 tokens"),
        },
    ),
}
_SHORTEST = 128  # rows that are worth a try
_SOURCE = (
    "download it with `hf download ORGANIZATION/MODEL config.json --local-dir FOLDER`, or from "
    "'Files' on the model's page of https://huggingface.co"
)
Adapters = tuple[tuple[str, ...], int]  # names of the adapted matrices, rank


def bytes_of(text: str) -> int:
    """Return the bytes of a size, such as `24GiB`, or of a GPU by its name, such as `RTX 4090`.

    `24GB` is `24GiB`: cards sold with 24 GB have 24 GiB.
    """
    text = text.strip()
    if match := re.fullmatch(rf"(\d+\.?\d*)\s*({'|'.join(_UNITS)})", text):
        return round(float(match[1]) * _UNITS[match[2]])
    cards = {_plain(card): card for card in _CARDS}
    if (name := _plain(text)) in cards:
        return _CARDS[cards[name]] * 2**20
    near = [plain for plain in cards if name and plain.startswith(name)]
    near = near or difflib.get_close_matches(name, cards, 3, 0.5)
    told = ", ".join(cards[plain] for plain in near or cards)
    raise ValueError(
        f"{text!r} is neither a size, such as 24GiB ({', '.join(_UNITS)}), nor a known GPU: {told}"
    )


def _plain(card: str) -> str:
    """Return the name of a card without its maker, in one spelling."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", card.lower())


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
      optimizer: name in `OPTIMIZERS`, or `optax.adamw`, whose weights are f32.
      budget: bytes of the device that the step may use.
      sequence: tokens per row.
      lora: adapters, for more modes that train them alone: with the weights in bf16, and with the
        layers' matrices in NF4 where the model's widths are multiples of 64; each with the weights
        on the device, and in host memory.
      accumulate: as in `memory.plan`.

    Returns:
      A `Plan` of the modes of `memory.plan`, for all parameters, and of the adapters.
    """
    tx = optax.adamw(1e-5) if optimizer == PLAIN else OPTIMIZERS[optimizer].make(1e-5)
    weights, adapters = sizes.params(), sizes.params(lora) if lora else None
    make = functools.partial(plan, tx, budget=budget, stacks=("layers",), accumulate=accumulate)
    activations = functools.partial(sizes.activations, sequence=sequence, accumulate=accumulate)
    trained = weights
    modes: tuple[str, ...] = (RESIDENT, RELEASE, OFFLOAD, STREAM)
    if optimizer == PLAIN:
        trained, adapters = jax.tree.map(lambda w: w.update(dtype=jnp.float32), (weights, adapters))
        activations = functools.partial(activations, in_f32=True)
    if optimizer == PLAIN or sizes.mixed:  # the others need our optimizers, and equal layers
        modes = (RESIDENT,)
    plans: list[ModePlan] = []
    for mode in modes:
        plans += make(
            trained, activations=functools.partial(activations, mode=mode), modes=(mode,)
        ).modes
    in_4_bits = sizes.in_4_bits()
    bases = {
        LORA: (weights, RESIDENT),
        QLORA: (in_4_bits, RESIDENT),
        LORA_STREAM: (weights, STREAM_FROZEN),
        QLORA_STREAM: (in_4_bits, STREAM_FROZEN),
    }
    for name, (frozen, mode) in bases.items():
        if lora is None or frozen is None or (mode != RESIDENT and STREAM not in modes):
            continue
        of_adapters = functools.partial(
            activations, mode=mode, lora=lora[0], in_f32=False, in_4_bits=frozen is in_4_bits
        )
        (mode_plan,) = make(adapters, frozen=frozen, activations=of_adapters, modes=(mode,)).modes
        plans.append(dataclasses.replace(mode_plan, name=name))
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


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a function that reads a number of an argument."""

    def number(text: str) -> float:
        if not 0 < (value := kind(text)) < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return number


def _read(file: Path) -> Decoder:
    """Return the decoder of a `config.json`; errors name the file."""
    if not file.exists():
        path = file if file.suffix == ".json" else file / "config.json"
        raise ValueError(f"no file {path}: {_SOURCE}")
    try:
        return decoder(json.loads(file.read_text("utf-8")))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON ({error}): {_SOURCE}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def main(arguments: list[str] | None = None) -> None:
    """Print the plan of a model on a GPU, and the command that fine-tunes it."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_lowmem.plan",
        description="Print how a Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3 fits on a GPU, "
        "from its config.json. Nothing is allocated, and no GPU is needed.",
    )
    add = parser.add_argument
    add("--params", required=True, help=f"config.json, or a folder with one: {_SOURCE}")
    add("--gpu", required=True,
        help="a GPU's name or memory: 'RTX 4090', 24GB; GB are GiB, as for GPUs")  # fmt: skip
    add("--sequence", type=_positive(int), default=2048, help="tokens per row (2048)")
    add("--optimizer", choices=(*OPTIMIZERS, PLAIN), default="flash_adamw", metavar="NAME",
        help=f"{', '.join((*OPTIMIZERS, PLAIN))} (flash_adamw)")  # fmt: skip
    add("--lora", default="q_proj,v_proj", help="adapted matrices, or all-linear (q_proj,v_proj)")
    add("--rank", type=_positive(int), default=16, help="of the adapters (16)")
    add("--pcie", type=_positive(float), default=25.0, metavar="GB/S",
        help="speed of copies to and from the host (25: PCIe 4 x16)")  # fmt: skip
    add("--tflops", type=_positive(float), help="of 16-bit products; default: of a known GPU")
    args = parser.parse_args(arguments)
    folder = Path(args.params)
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        sizes, memory = _read(file), bytes_of(args.gpu)
        budget = int(USABLE * memory)
        lora = lora_names(args.lora), args.rank
        result = plan_decoder(sizes, args.optimizer, budget, args.sequence, lora)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    print(
        f"{args.optimizer}, rows of {args.sequence} tokens; {args.gpu}: {memory / 2**30:.2f} GiB, "
        f"of which {budget / 2**30:.2f} GiB are usable ({USABLE:.0%})\n\n{result}\n"
    )
    mode = result.best
    if mode is None:
        raise SystemExit(advice(sizes, args.optimizer, budget, args.sequence, lora))
    for line in recommendation(mode, sizes, args, file.parent):
        print(line)


def _speeds(
    mode: ModePlan, number: int, args: argparse.Namespace, peak: float | None
) -> Iterator[str]:
    """Yield the speed computed for the card, and the one measured with such a model."""
    tokens = args.sequence * mode.batch
    if peak is None:
        yield "For a computed speed, name the GPU, or give --tflops of its data sheet."
    else:
        speed = _tokens_per_second(mode, number, peak, 1e9 * args.pcie, tokens)
        yield (
            f"Speed, computed for {args.gpu}: at most {speed:,.0f} tokens/s (at {_OF_PEAK:.0%} of "
            f"{peak:g} TFLOP/s)."
        )
    for parameters, (model, by_mode) in MEASURED.items():
        alike = abs(number / parameters - 1) < 0.05 and args.optimizer == "flash_adamw"
        if alike and mode.name in by_mode:
            speed, step = by_mode[mode.name]
            h200 = _TFLOPS["H200"]
            computed = _tokens_per_second(mode, number, h200, math.inf, tokens)
            yield (
                f"Measured with {model} on an NVIDIA H200 ({step}): {speed:,} tokens/s, of the "
                f"{computed:,.0f} computed for its {h200} TFLOP/s."
            )


def _tokens_per_second(mode: ModePlan, number: int, peak: float, link: float, tokens: int) -> float:
    """Return the speed that computation or copies allow.

    A forward pass takes 2 FLOP per parameter and token, a backward pass with a recomputed forward
    pass 6, or 4 if weights are frozen.

    Args:
      mode: the mode.
      number: number of parameters.
      peak: TFLOP/s of the GPU's data sheet.
      link: bytes per second between host and device.
      tokens: tokens per step.
    """
    each = number * tokens / (_OF_PEAK * peak * 1e12)
    forward, backward, back = (size / link for size in mode.copies)
    in_backward = 4 if mode.name in (LORA, QLORA, LORA_STREAM, QLORA_STREAM) else 6
    return tokens / (max(2 * each, forward) + max(in_backward * each, backward, back))


def recommendation(
    mode: ModePlan, sizes: Decoder, args: argparse.Namespace, folder: Path
) -> Iterator[str]:
    """Yield the sentences about a mode that fits, and how to run it."""
    yield f"Recommended: {mode.name}, with at most {mode.batch} rows. {_MEANING[mode.name]}"
    number = sum(leaf.size for leaf in jax.tree.leaves(sizes.params()))
    peak = args.tflops or next(
        (speed for card, speed in _TFLOPS.items() if _plain(card) == _plain(args.gpu)), None
    )
    yield from _speeds(mode, number, args, peak)
    if mode.host:
        forward, backward, back = mode.copies
        copied, link = forward + backward, 1e9 * args.pcie
        inputs = 2 * (sizes.layers + 1) * sizes.width
        tokens = mode.batch * args.sequence
        yield (
            f"A step copies {copied / 2**30:.2f} GiB to the GPU and {back / 2**30:.2f} GiB back, "
            f"whatever its batch: {copied / link:.2f} s and {back / link:.2f} s at {args.pcie:g} "
            "GB/s (computed)."
        )
        if peak:
            enough = mode.copies.tokens(number, _OF_PEAK * peak * 1e12, link)
            yield (
                f"Steps of more than {enough:,.0f} tokens compute for longer than they copy; "
                f"the command below has {tokens:,}."
            )
        yield (
            f"The inputs of the layers and the head, {inputs / 2**10:.0f} KiB per token, also go "
            f"to host memory and back: {inputs * tokens / 2**30:.2f} GiB."
        )
    flags = {
        RELEASE: " --release",
        OFFLOAD: f" --offload --micro-batch {mode.batch}",
        STREAM: f" --offload weights --micro-batch {mode.batch}",
        LORA: f" --lora {','.join(lora_names(args.lora))} --rank {args.rank}",
    }
    flags[QLORA] = f"{flags[LORA]} --base nf4"
    for one, streamed in ((LORA, LORA_STREAM), (QLORA, QLORA_STREAM)):
        flags[streamed] = flags[one] + flags[STREAM]
    # XLA's default allocator divides the memory that is left into pieces that are too small
    # https://github.com/jax-ml/jax/pull/25082, https://github.com/marin-community/marin/issues/7115
    allocator = "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async " if mode.host else ""
    yield (
        f"    {allocator}python examples/finetune.py --model {shlex.quote(str(folder))} "
        f"--data FILE --optimizer {args.optimizer} --sequence {args.sequence} --batch {mode.batch}"
        + flags.get(mode.name, "")
    )
