"""The command line of finetune.py."""

import argparse
import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path

from _gpt.arguments import number, positive
from _llama.config import NF4, PLAIN, SPLIT, STATE, WEIGHTS
from _llama.optimizer import NAMES, RATE_FACTORS

import optax_lowmem as lowmem
from optax_lowmem import plan

SCHEDULES = ("cosine", "linear", "constant")


def checked(read: Callable[[str], object], what: str = "") -> Callable[[str], str]:
    """Return a type of argparse: a text that `read` accepts."""

    def same(text: str) -> str:
        try:
            read(text)
        except (ValueError, re.error) as error:
            raise argparse.ArgumentTypeError(f"{what}{error}") from None
        return text

    return same


_FROM_0 = number("at least 0", lambda x: 0 <= x < math.inf)
_ABOVE_0 = number("above 0", lambda x: 0 < x < math.inf)
_PART = number("at least 0 and below 1", lambda x: 0 <= x < 1)
_SEED = number("an integer from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32, int)


def parse_arguments(description: str, arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments; ends the program where they contradict each other."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="finetune.py --model FOLDER --data FILE [--help] [OPTION ...]",
    )  # fmt: skip
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="of Hugging Face")
    add("--data", type=Path, required=True, metavar="FILE", help="JSON lines")
    add("--validation", type=Path, metavar="FILE", help="JSON lines; default: a part of --data")
    add("--held-out", type=_PART, default=0.05, help="that part; 0: none (0.05)")
    add("--out", type=Path, default=Path("finetuned"), metavar="DIR", help="(finetuned)")
    add("--optimizer", choices=NAMES, default="flash_adamw", metavar="NAME",
        help=f"{', '.join(NAMES)} (flash_adamw)")  # fmt: skip
    add("--lr", type=_ABOVE_0, help="peak learning rate (AdamW: 1e-5, of adapters 2e-4)")
    add("--schedule", choices=SCHEDULES, default="cosine", help="after the warm-up (cosine)")
    add("--warmup", type=_PART, default=0.03, help="part of the steps (0.03)")
    add("--weight-decay", type=_FROM_0, default=0.0, help="not of biases and norms (0)")
    add("--decay-all", action="store_true", help="decay biases and norms, too")
    add("--clip", type=_FROM_0,
        help="global norm of gradients; 0: any (1; with --release, where it takes a second "
        "backward pass: 0)")  # fmt: skip
    add("--skip-nonfinite", action="store_true",
        help="skip a step whose loss or gradient is not finite, up to 10 in succession, instead "
        "of stopping at the first")  # fmt: skip
    add("--epochs", type=_ABOVE_0, default=1.0, help="passes over the data (1)")
    add("--steps", type=positive, help="instead of --epochs")
    add("--sequence", type=positive, default=1024, help="tokens in a row (1024)")
    add("--batch", type=positive, default=8, help="rows in a step (8)")
    add("--micro-batch", type=positive, metavar="N",
        help="rows whose activations exist at once; gradients of a step's micro-batches are added "
        f"in bf16 with stochastic rounding, with {PLAIN} and {SPLIT} in f32. Default: the most "
        "that the compiled step has memory for")  # fmt: skip
    add("--budget", type=checked(plan.bytes_of), metavar="SIZE",
        help="memory for the step, such as 24GiB; default: what JAX may use of the device, or "
        "on a CPU, what is free")  # fmt: skip
    add("--release", action="store_true",
        help="update each layer inside the backward pass, for less memory")  # fmt: skip
    add("--offload", nargs="?", choices=(STATE, WEIGHTS), const=STATE,
        help="--release with the optimizer's state in host memory (the default if no value is "
        "given), or weights and state, copied layer by layer; micro-batches of one row, "
        "unless --micro-batch is given; with --lora, the frozen weights alone")  # fmt: skip
    add("--lora", type=checked(plan.lora_names), metavar="NAMES",
        help="train adapters of these matrices: q_proj,v_proj or all-linear")  # fmt: skip
    add("--rank", type=positive, default=16, help="of adapters (16)")
    add("--alpha", type=_ABOVE_0, help="of adapters (twice the rank)")
    add("--base", choices=(NF4,), metavar="FORMAT",
        help="of the layers' frozen matrices, with --lora: nf4, 4.13 bits per weight (QLoRA); "
        "default: as in --model")  # fmt: skip
    add("--freeze", type=checked(re.compile, "no regular expression: "), metavar="PATTERN",
        help="regular expression on paths such as layers/0/mlp/up_proj/kernel")  # fmt: skip
    add("--print-every", type=positive, default=10, metavar="N", help="steps (10)")
    add("--evaluate-every", type=positive, default=50, metavar="N", help="steps (50)")
    add("--save-every", type=positive, metavar="N",
        help="steps between checkpoints, of which the newest is kept (ten minutes)")  # fmt: skip
    add("--resume", action="store_true",
        help="go on from the checkpoint in --out; without one, begin at step 0")  # fmt: skip
    add("--until", type=positive, metavar="STEP", help="stop here, to resume later")
    add("--prompt", action="append", default=[], help="generate from it before and after training")
    add("--tokens", type=positive, default=64, help="to generate (64)")
    add("--temperature", type=_FROM_0, default=0.0, help="of generation; 0: the likeliest (0)")
    add("--dtype", choices=("bfloat16", "float32"),
        help="of trained weights in the model written; default: as in --model")  # fmt: skip
    add("--compute", choices=("auto", "float32", "bfloat16"), default="auto",
        help="of matrix products; auto: float32 on a CPU, else bfloat16 (auto)")  # fmt: skip
    add("--implementation", default="auto", metavar="NAME", help="of lowmem.step (auto)")
    add("--seed", type=_SEED, default=0, help="of adapters, batches and rounding (0)")
    args = parser.parse_args(arguments)
    args.release |= args.offload is not None
    args.alpha = 2.0 * args.rank if args.alpha is None else args.alpha
    if args.lr is None:
        args.lr = (2e-4 if args.lora else 1e-5) * RATE_FACTORS.get(args.optimizer, 1.0)
    if args.clip is None:
        args.clip = 0.0 if args.release else 1.0
    if args.micro_batch and args.batch % args.micro_batch:
        parser.error(f"--batch {args.batch} is no multiple of --micro-batch {args.micro_batch}")
    no_decay = args.optimizer in lowmem.OPTIMIZERS and "weight_decay" not in (
        inspect.signature(lowmem.OPTIMIZERS[args.optimizer].make).parameters
    )
    if args.base and not args.lora:
        parser.error(f"--base {args.base} is for frozen weights: add --lora all-linear")
    streams = args.offload == WEIGHTS
    whole = not args.offload and args.micro_batch not in (None, args.batch)
    for one, other, given in (
        ("lora", "--freeze", args.freeze),
        ("lora", "--release, but for --offload weights", args.release and not streams),
        ("release", "--freeze", args.freeze),
        ("release", "--skip-nonfinite", args.skip_nonfinite),
        ("release", f"--optimizer {PLAIN}", args.optimizer == PLAIN),
        ("release", "--micro-batch without --offload", whole),
        ("prompt", "--offload weights", streams),
        ("offload", "--dtype float32", args.dtype == "float32" and not args.lora),
        ("weight_decay", f"--optimizer {args.optimizer}", no_decay),
    ):
        if getattr(args, one) and given:
            one = one.replace("_", "-")
            parser.error(f"--{one} does not go with {other}: leave out one of them")
    return args
