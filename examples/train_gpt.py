"""Trains a GPT twice from the same start: optax in f32, and optax_lowmem on bf16 weights.

    python examples/train_gpt.py                                    # minutes on 2 CPU cores
    python examples/train_gpt.py --preset gpt-42m --optimizer lion --seeds 3  # minutes on a GPU
    python examples/train_gpt.py --only lowmem --implementation xla

The text is the source of Python's standard library, or of all installed packages, so nothing is
downloaded. The two runs see the same batches and take turns, so that their step times compare. The
results go to a folder (`--out`): a picture, the numbers as JSON, and the tokenizer where one is
trained.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

try:
    from _gpt import arguments as shared
    from _gpt import data, figure, report, train
    from _gpt.arguments import positive
    from _gpt.config import OPTIMIZERS, PRESETS, Settings
    from rich.console import Console
except ModuleNotFoundError as error:
    raise SystemExit(
        f"train_gpt.py needs {error.name}: pip install '.[examples]' in the clone"
    ) from None

_ONLY = {"f32": [train.F32], "lowmem": [train.LOWMEM], "both": [train.F32, train.LOWMEM]}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, told = parser.add_argument, functools.partial(shared.preset_values, PRESETS)
    factors = shared.rate_factors({name: pair.rate_factor for name, pair in OPTIMIZERS.items()})
    add("--preset", choices=PRESETS, default="demo", help="model and run (default: demo)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw")
    add("--only", choices=_ONLY, default="both", help="which of the two to train (default: both)")
    add("--steps", type=positive, help=told("steps"))
    add("--batch", type=positive, help=f"sequences in a batch; {told('batch')}")
    add("--context", type=positive, help=f"tokens in a sequence; {told('context')}")
    add("--lr", type=float,
        help=f"peak learning rate; {told('learning_rate')}, times {factors}")  # fmt: skip
    add("--tokenizer", choices=("byte", "bpe"), help=told("tokenizer"))
    add("--vocab", type=positive, help=f"tokens of the BPE tokenizer; {told('vocab')}")
    add("--text", choices=data.TEXTS, help=told("text"))
    add("--data", type=Path, metavar="PATH", help="a file or folder of text, instead of --text")
    add("--seeds", type=positive, default=1, help="how many seeds to repeat over (default: 1)")
    add("--out", type=Path, default=Path("demo_output"), help="default: demo_output")
    shared.add_common(add)
    return parser.parse_args(arguments)


def make_settings(args: argparse.Namespace) -> Settings:
    """The preset with what the command line changes."""
    preset = PRESETS[args.preset]
    rate = preset.learning_rate * OPTIMIZERS[args.optimizer].rate_factor
    given = {"learning_rate": rate if args.lr is None else args.lr}
    given["compute"] = shared.compute_dtype(args.compute)
    return shared.changed(preset, Settings, vars(args) | given)


def load_tokens(
    settings: Settings, path: Path | None, out: Path
) -> tuple[data.Tokens, dict[str, Any]]:
    """The text as tokens, and what to say of it."""
    corpus = data.load_corpus(path, settings.text)
    if settings.tokenizer == "bpe":
        tokens = data.bpe_tokens(corpus, settings.vocab, out)
    else:
        tokens = data.byte_tokens(corpus)
    if min(len(tokens.train), len(tokens.held_out)) <= settings.context:
        raise SystemExit(f"{corpus.source}: too little text for --context {settings.context}")
    return tokens, {
        "source": corpus.source,
        "files": corpus.files,
        "train_bytes": len(corpus.train),
        "held_out_bytes": len(corpus.held_out),
        "train_tokens": len(tokens.train),
        "bytes_per_token": tokens.bytes_per_token,
        "vocab": tokens.vocab,
    }


def train_seed(
    settings: Settings,
    tokens: data.Tokens,
    seed: int,
    programs: dict[str, train.Program],
    console: Console,
) -> dict[str, Any]:
    """Trains with one seed and returns each run's numbers."""
    runs = {impl: train.Run(program, seed) for impl, program in programs.items()}

    def losses(kind: str, digits: int) -> str:
        last = {report.LABELS[impl]: getattr(run, kind)[-1] for impl, run in runs.items()}
        return "   ".join(f"{label} {loss:.{digits}f}" for label, loss in last.items())

    with shared.progress_bar(f"seed {seed}", console=console) as progress:
        task = progress.add_task("", total=settings.steps, now="")
        for done, is_validated in train.train(runs, settings, tokens, seed):
            progress.update(task, completed=done, now=losses("train_loss", 3))
            if is_validated:
                told = f"step {done:5d}   validation loss   {losses('val_loss', 4)}"
                progress.console.print(told, highlight=False)
    return {impl: report.run_numbers(run, settings) for impl, run in runs.items()}


def main(arguments: list[str] | None = None) -> None:
    start = time.perf_counter()
    args = parse_arguments(arguments)
    console = Console()
    settings = make_settings(args)
    train.check_implementation(settings.implementation)
    args.out.mkdir(parents=True, exist_ok=True)
    tokens, about = load_tokens(settings, args.data, args.out)
    console.print(
        f"{about['files']} files of {about['source']}: {about['train_bytes'] / 1e6:.1f} MB to "
        f"train on, {about['held_out_bytes'] / 1e6:.2f} MB held out; {settings.steps} steps of "
        f"{settings.batch} x {settings.context} tokens on {report.device_name()}",
        highlight=False,
    )
    with console.status("compiling"):
        programs = {
            impl: train.compile_program(impl, settings, tokens.vocab) for impl in _ONLY[args.only]
        }
    by_seed = {}
    for seed in range(args.seed, args.seed + args.seeds):
        by_seed[seed] = train_seed(settings, tokens, seed, programs, console)
        if args.record:  # at once: a later seed may be cut off
            append = shared.records_of_examples().append_gpt
            append(settings, about, seed, by_seed[seed], args.record)
    result = report.summarise(settings, about, by_seed, time.perf_counter() - start)
    console.print(report.table(result))
    if args.only == "both":
        console.print(report.conclusion(result), highlight=False)
    picture, numbers = args.out / "train_gpt.png", args.out / "train_gpt.json"
    figure.draw(result, picture)
    numbers.write_text(json.dumps(result, indent=1), encoding="utf-8")
    console.print(f"Wrote {picture} and {numbers} after {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
