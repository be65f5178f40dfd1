"""Trains a Llama with low-memory state, or with optax.adamw in f32, on one device or many.

    python examples/train_llama.py                                      # seconds on a CPU core
    python examples/train_llama.py --preset 8b --steps 20               # on one 80 GB GPU
    python examples/train_llama.py --preset 8b --optimizer optax.adamw  # does not fit: exit code 3
    python examples/train_llama.py --preset 60m --data my_texts/        # a file or folder of text
    python examples/train_llama.py --preset 1b --fsdp 4 --tensor 2 --data-parallel 1
    python examples/train_llama.py --checkpoint run --save-every 50 --until 100  # and later, on any
    python examples/train_llama.py --checkpoint run --save-every 50 --resume     # mesh, the rest

The text is your own (--data), the source of Python's standard library, or random tokens, so nothing
is downloaded. A batch depends on the seed and the step alone: a resumed run goes on as if it had
not been stopped.
"""

import argparse
import functools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax

try:
    from _gpt import arguments as shared
    from _gpt.arguments import INTERRUPTED, OUT_OF_MEMORY, out_of_memory_message, positive
    from _gpt.data import TEXTS
    from _gpt.train import check_implementation
    from _llama import checkpoints, config, report, train
    from _llama.config import AUTO, FULL, NONE, PLAIN, PRESETS, STANDARD, Settings
    from _llama.optimizer import NAMES, RATE_FACTORS
    from rich.console import Console
except ModuleNotFoundError as error:
    raise SystemExit(
        f"train_llama.py needs {error.name}: pip install '.[examples]' in the clone"
    ) from None


def positive_or_auto(text: str) -> int | str:
    return AUTO if text == AUTO else positive(text)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, told = parser.add_argument, functools.partial(shared.preset_values, PRESETS)
    add("--preset", choices=PRESETS, default="tiny", help="model and run (default: tiny)")
    add("--optimizer", choices=NAMES, default="flash_adamw", metavar="NAME",
        help=f"{', '.join(NAMES)} (default: flash_adamw)")  # fmt: skip
    add("--f32-weights", action="store_true",
        help="keep weights in f32 with any optimizer, as optax.adamw does (split_adamw, AdamW with "
        "f32 moments, splits them): baselines that store weights as others do")  # fmt: skip
    add("--steps", type=positive, help=f"of the whole run; {told('steps')}")
    add("--batch", type=positive, help=f"sequences in a batch; {told('batch')}")
    add("--sequence", type=positive, help=f"tokens in a sequence; {told('sequence')}")
    add("--lr", type=float,
        help=f"peak learning rate; {told('learning_rate')}, times "
        f"{shared.rate_factors(RATE_FACTORS)}")  # fmt: skip
    add("--clip", type=float,
        help="global norm of gradients; 0: any (default: 1; with --release, where it takes a "
        "second backward pass, 0)")  # fmt: skip
    add("--text", choices=("random", *TEXTS), help=told("text"))
    add("--data", metavar="PATH", help="a file or folder of text of your own, instead of --text")
    add("--data-parallel", type=positive, metavar="N",
        help="devices that share a batch; default: all that --fsdp and --tensor leave")  # fmt: skip
    add("--fsdp", type=positive, default=1, metavar="N",
        help="devices that share a batch and keep a part of weights and state each")  # fmt: skip
    add("--tensor", type=positive, default=1, metavar="N",
        help="devices that share each matrix product")  # fmt: skip
    add("--zero", action="store_true",
        help="cut the state between the --data-parallel devices (ZeRO-1)")  # fmt: skip
    add("--remat", nargs="?", choices=(NONE, config.DOTS, FULL, AUTO), const=FULL,
        help="compute layers anew in the backward pass: in full (the meaning without a word), or "
        "all but their products and attention (dots); auto, the default: none on a CPU, elsewhere "
        "what keeps least of those within 3 %% of the fastest, by estimates")  # fmt: skip
    add("--no-remat", dest="remat", action="store_const", const=NONE, help="--remat none")
    add("--unroll", type=positive_or_auto, default=AUTO, metavar="N",
        help="layers in a step of the scan over layers: fewer copies, a longer compilation; with "
        "all of them, each layer has weights of its own, and there is no scan; auto, the default: "
        "all, up to 32, on GPUs or a TPU alone, else 1")  # fmt: skip
    add("--release", action="store_true",
        help="update each layer inside the backward pass: gradients never exist all at once, and "
        "each layer is computed anew")  # fmt: skip
    add("--offload", nargs="?", choices=(config.STATE, config.WEIGHTS, config.ON_DEVICE),
        const=config.STATE,
        help="--release with the optimizer's state in host memory (the default if no value is "
        "given), or weights and state, copied to the device layer by layer; device (to compare): "
        "the same without copies")  # fmt: skip
    add("--accumulate", type=positive, default=1, metavar="N",
        help="micro-batches that --batch is divided into; their gradients are added up in bf16 "
        "with stochastic rounding (default: 1)")  # fmt: skip
    add("--attention", choices=(AUTO, config.XLA, config.CUDNN), default=AUTO,
        help="auto, the default: cudnn where it takes the model")  # fmt: skip
    add("--linear", choices=config.LINEARS, default=STANDARD,
        help="products of the layers' matrices in 8 bits, forward and for the gradient of their "
        "input; embedding and head stay (default: standard)")  # fmt: skip
    add("--activations", choices=(AUTO, STANDARD, config.LEAN, config.FP8), default=AUTO,
        help="lean: the backward pass is given the inputs of norms and activation functions alone, "
        "and no bit of the forward pass is another; fp8: 8-bit codes of them, and layers multiply "
        "in FP8 but where --linear says otherwise; auto, the default: lean on a GPU or TPU, "
        "standard on a CPU")  # fmt: skip
    add("--head", choices=config.HEADS, default=STANDARD,
        help="products of the output head: fp8, all three; fp8-gradients, but for the logits, so "
        "that the loss is what it was (default: standard, in --compute)")  # fmt: skip
    add("--noise", choices=config.NOISE,
        help="noise of a learnt bitwidth on these matrices (GaussWS): `od` are an attention's "
        "projection and the last of an MLP")  # fmt: skip
    add("--checkpoint", type=Path, metavar="DIR", help="where to save the run, at its end too")
    add("--save-every", type=positive, metavar="N", help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--until", type=positive, metavar="STEP", help="stop here, to resume later")
    add("--log", type=Path, metavar="FILE", help="append each step's loss (JSON lines)")
    add("--cache", type=Path, default=Path("demo_output"), metavar="DIR",
        help="of the tokenizer that is trained for a text (default: demo_output)")  # fmt: skip
    shared.add_common(add)
    args = parser.parse_args(arguments)
    if args.data and args.data.isdigit() and not Path(args.data).exists():
        print(f"--data {args.data} is deprecated: --data-parallel {args.data}", file=sys.stderr)
        args.data_parallel, args.data = positive(args.data), None
    args.release = args.release or args.offload is not None
    if args.data and args.text:
        parser.error("--data and --text: leave out one of them")
    return args


def make_settings(args: argparse.Namespace) -> Settings:
    """The preset with what the command line changes."""
    preset, there = PRESETS[args.preset], jax.device_count()
    rate = preset.learning_rate * RATE_FACTORS.get(args.optimizer, 1.0)
    given = {
        "learning_rate": rate if args.lr is None else args.lr,
        "clip": (0.0 if args.release else 1.0) if args.clip is None else args.clip,
        "compute": shared.compute_dtype(args.compute),
        "text": args.data or args.text,
        "data": args.data_parallel or max(1, there // (args.fsdp * args.tensor)),
    }
    settings = shared.changed(preset, Settings, vars(args) | given)
    sharing = settings.data * settings.fsdp
    added_up = args.release and args.accumulate > 1 and not args.offload
    for wrong, message in (
        (args.release and args.optimizer == PLAIN,
         f"--release takes an optimizer of optax_lowmem, not {PLAIN}"),
        (args.release and args.noise,
         "--release and --noise: noise needs the steps of all layers in one call"),
        (added_up, "--release and --accumulate: the gradients that --release never holds would be "
         "added up"),
        (args.f32_weights and args.noise,
         "--f32-weights and --noise: weights with noise are bf16; leave out one"),
        (settings.devices > there,
         f"--data-parallel {settings.data} --fsdp {settings.fsdp} --tensor {settings.tensor} "
         f"takes {settings.devices} devices; there are {there}"),
        (settings.offload and settings.devices > 1,
         "--offload copies the state to one device: add --data-parallel 1"),
        (settings.batch % sharing,
         f"--batch {settings.batch} cannot be shared by {sharing} devices (--data-parallel x "
         "--fsdp)"),
        (settings.batch % (sharing * settings.accumulate),
         f"--batch {settings.batch} cannot be divided into {settings.accumulate} micro-batches "
         f"of as many sequences for each of {sharing} devices"),
    ):  # fmt: skip
        if wrong:
            raise SystemExit(message)
    return settings


@dataclass
class Result:
    """A run that has ended, and its numbers."""

    run: train.Run
    program: train.Program
    numbers: dict[str, float]


def train_run(
    run: train.Run, program: train.Program, batches: train.Batches, args: argparse.Namespace,
    console: Console,
) -> None:  # fmt: skip
    """Takes the steps, showing, logging and saving."""
    settings = program.settings
    last = min(args.until or settings.steps, settings.steps)
    tokens = settings.batch * settings.sequence

    def is_saved(step: int) -> bool:
        due = args.save_every and step % args.save_every == 0
        return bool(args.checkpoint and (due or step == last))

    with shared.progress_bar(settings.optimizer, console=console) as progress:
        task = progress.add_task("", total=last, completed=run.step, now="")
        for _ in train.advance(run, program, batches, last, is_saved):
            now = f"loss {run.losses[-1]:.4f}  {tokens / run.step_s:,.0f} tokens/s"
            progress.update(task, completed=run.step, now=now)
            if args.log:
                row = {"step": run.step, "loss": run.losses[-1], "seconds": run.seconds[-1]}
                with args.log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            if is_saved(run.step):
                checkpoints.save(args.checkpoint, program, run)


def run_it(args: argparse.Namespace, settings: Settings, console: Console) -> Result | None:
    """The run; None where there is no memory for it, which is said."""
    if args.save_every and not args.checkpoint:
        raise SystemExit("--save-every needs --checkpoint with a folder to save to")
    first, settings = checkpoints.begin(args.checkpoint, settings, args.resume)
    text, batches = train.make_batches(settings, args.cache)
    program = train.make_program(settings)
    say = functools.partial(console.print, highlight=False, soft_wrap=True)
    memory, own_bytes = program.report, program.device_bytes
    say(report.headline(program.settings, memory, text))
    found = {"bytes_per_param": memory.bytes_per_param, "device_bytes": own_bytes}
    found |= report.limit()
    begin = time.perf_counter()
    try:
        with console.status("compiling"):
            program.compiled  # noqa: B018 (kept by the program)
        compile_s = time.perf_counter() - begin
        say(f"compiled in {compile_s:.1f} s")
        run = checkpoints.start_or_restore(args.checkpoint, program, first)
        if first:
            say(f"resumed at step {first}")
        train_run(run, program, batches, args, console)
    except jax.errors.JaxRuntimeError as error:
        if not shared.is_out_of_memory(error):
            raise
        run, message = None, out_of_memory_message(error, args.offload)
    if run is None:
        found["fits"] = 0
        print(report.out_of_memory(settings, memory, own_bytes, message), file=sys.stderr)
    elif not run.losses:
        say(f"nothing to do: the run is at step {run.step} already")
    else:
        found |= train.measured(run, settings, program) | {"compile_s": compile_s}
        say(f"{memory}\n{report.summary(found)}")
    if args.record and "fits" in found:
        append = shared.records_of_examples().append_llama
        append(settings, program.settings, memory, found, args.record)
    return None if run is None else Result(run, program, found)


def main(arguments: list[str] | None = None) -> Result:
    # by default JAX takes three quarters of a GPU, too little for what would fit
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")
    args = parse_arguments(arguments)
    if args.offload:
        shared.allow_pinned_memory()
    settings = make_settings(args)
    check_implementation(settings.implementation)
    try:
        result = run_it(args, settings, Console())
    except MemoryError as error:  # of the host, before anything is allocated
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        print(checkpoints.stopped(args.checkpoint), file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    if result is None:
        raise SystemExit(OUT_OF_MEMORY)
    return result


if __name__ == "__main__":
    main()
