"""The command `python -m optax_lowmem.plan`: what of a known model fits on a GPU."""

import argparse
import dataclasses
import functools
import json
import re
from pathlib import Path

from optax_lowmem._src.memory.decoders import Decoder, decoder
from optax_lowmem._src.memory.plan import RELEASE, Plan, plan
from optax_lowmem._src.optimizers import OPTIMIZERS

_UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
USABLE = 0.93  # of a GPU's memory; the rest is for the driver and gaps between arrays
LORA = "lora"
Adapters = tuple[tuple[str, ...], int]  # names of the adapted matrices, rank


def bytes_of(text: str) -> int:
    """Return the bytes of `24GiB`, `24GB` or the like."""
    found = re.fullmatch(rf"([\d.]+)\s*({'|'.join(_UNITS)})", text.strip())
    if not found:
        raise ValueError(f"{text!r} is no size: write a number and one of {', '.join(_UNITS)}")
    return int(float(found[1]) * _UNITS[found[2]])


def plan_decoder(
    sizes: Decoder, optimizer: str, budget: int, sequence: int, lora: Adapters | None = None
) -> Plan:
    """Plan a decoder in bf16 whose layers are recomputed in the backward pass.

    Args:
      sizes: the decoder.
      optimizer: name in `OPTIMIZERS`.
      budget: bytes of the device that the step may use.
      sequence: tokens per row.
      lora: adapters, for a third mode that trains them alone.

    Returns:
      A `Plan` of all parameters, resident and with gradient release, and of the adapters.
    """
    make = functools.partial(plan, OPTIMIZERS[optimizer].make(1e-5), budget=budget)
    weights = sizes.params()
    activations = functools.partial(sizes.activations, sequence=sequence)
    whole = make(weights, activations=activations, stacks=("layers",))
    if lora is None:
        return whole
    activations = functools.partial(activations, head_gradient=False)
    adapters = make(sizes.params(lora), frozen=weights, activations=activations)
    named = dataclasses.replace(adapters.modes[0], name=LORA)
    return dataclasses.replace(whole, modes=(*whole.modes, named))


def main(arguments: list[str] | None = None) -> None:
    """Print the plan of a model on a GPU, and the command that fine-tunes it."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_lowmem.plan",
        description="Say what of a Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3 fits on a GPU, "
        "from its config.json. Nothing is allocated, and no GPU is needed.",
    )
    parser.add_argument("--params", required=True, help="config.json, or a folder with one")
    parser.add_argument("--gpu", required=True, help="memory of the GPU, such as 24GiB")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens per row (2048)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="flash_adamw", metavar="NAME")
    parser.add_argument("--lora", default="q_proj,v_proj", help="adapted matrices (q_proj,v_proj)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (16)")
    args = parser.parse_args(arguments)
    file = Path(args.params)
    file = file / "config.json" if file.is_dir() else file
    try:
        sizes = decoder(json.loads(file.read_text("utf-8")))
        budget = int(USABLE * bytes_of(args.gpu))
        lora = tuple(args.lora.split(",")), args.rank
        found = plan_decoder(sizes, args.optimizer, budget, args.sequence, lora)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    print(f"{args.optimizer}, rows of {args.sequence} tokens, {USABLE:.0%} of {args.gpu}")
    print(found)
    mode = found.best
    if mode is None:
        raise SystemExit("Nothing fits: shorten --sequence, or choose a smaller model.")
    more = {RELEASE: " --release", LORA: f" --lora {args.lora} --rank {args.rank}"}
    print(
        f"python examples/finetune.py --model {file.parent} --data FILE "
        f"--optimizer {args.optimizer} --sequence {args.sequence} --batch {mode.batch}"
        + more.get(mode.name, "")
    )
