"""An optimizer and its low-memory forms, trained from the same weights on the same batches.

    python -m benchmarks.run pairs --preset gpt2-124m --variants adamw flash_adamw --record
    python -m benchmarks.run pairs --preset gpt-42m --variants lion flash_lion --seeds 20 --record
    python -m benchmarks.run pairs --preset smoke-gpt2 --folder /tmp/pairs   # anywhere, seconds

What is unfinished at the limit is kept in `--folder`, and the same command goes on from there.
GPT-2 124M has the hyperparameters of FlashOptim's Table 7; its text is all sources and pages of
documentation that Python packages bring. Curves go to benchmarks/results/pairs-PRESET-RULE.npz.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from _gpt import data

from benchmarks import records
from benchmarks.curves import store
from benchmarks.suites.pairs import kept
from benchmarks.suites.pairs.presets import BASES, PRESETS, VARIANTS
from benchmarks.suites.pairs.training import Clock, Experiment, Seed, affordable
from benchmarks.training import Text, about, changed, compile_all, load_text, say

TOKENS = ("tokens", "held_out")  # what of a text is arrays


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = records.command_line(__doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="smoke-gpt2")
    add("--variants", nargs="+", choices=VARIANTS, default=["adamw", "flash_adamw"],
        metavar="NAME", help=f"of {', '.join(VARIANTS)} (default: adamw flash_adamw)")  # fmt: skip
    add("--seeds", type=int, default=1, help="how many (default: 1)")
    add("--first-seed", type=int, default=0, help="default: 0")
    add("--steps", type=int, help="of a run; default: the preset's")
    add("--batch", type=int, help="windows in a step; default: the preset's")
    add("--micro", type=int, help="windows whose gradients are computed at once")
    add("--attention", choices=("xla", "cudnn"), help="default: the preset's")
    add("--seconds", type=float, metavar="S", help="for the steps of a seed, which are fewer than "
        "the preset's where this device is slower (default: no bound)")  # fmt: skip
    add("--limit", type=float, default=3600, metavar="S",
        help="stop after this; the next command goes on (default: %(default)s s)")  # fmt: skip
    add("--folder", type=Path, help="where an unfinished run is kept (default: demo_output/PRESET)")
    add("--cache", type=Path, default=Path("demo_output"), help="where a tokenizer is kept")
    add("--curves", type=Path, help="default: benchmarks/results/pairs-PRESET-RULE.npz")
    add("--text", type=Path, metavar="FILE.npz",
        help="the text's tokens, made if they are not there (default: made each time)")  # fmt: skip
    add("--files", type=Path, metavar="FILE.xz",
        help="make the tokens, write the list of the text's files, train nothing")  # fmt: skip
    return parser.parse_args(arguments)


def listed(run: Any, path: Path) -> None:
    """Write a line for each file of a run's text: half of its sha256, bytes, name."""
    _, texts = data.read_texts(None, run.text)
    lines = [
        f"{hashlib.sha256(own).hexdigest()[:32]} {len(own):7d} {name}\n" for name, own in texts
    ]
    whole = "".join(lines).encode()
    path.write_bytes(lzma.compress(whole))
    say(f"{len(lines):,} files; {hashlib.sha256(whole).hexdigest()} is the hash of their list")


def text_of(run: Any, args: argparse.Namespace) -> Text:
    """The text, from `--text` if it is there."""
    found = kept.read(args.text) if args.text else None
    if found is not None:
        about, arrays = found
        return Text(*map(jnp.asarray, (arrays["tokens"], arrays["held_out"])), **about)
    text = load_text(run, args.cache)
    if args.text:
        own = {"vocab": text.vocab, "awake": text.awake, "bytes_per_token": text.bytes_per_token}
        kept.write(args.text, own, {name: np.asarray(getattr(text, name)) for name in TOKENS})
    return text


def rule_of(names: list[str]) -> str:
    """Return the rule that all variants share."""
    rules = {VARIANTS[name].rule for name in names}
    if len(rules) > 1:
        raise SystemExit(f"--variants {' '.join(names)}: of {len(rules)} rules; run one at a time")
    return rules.pop()


class Bench:
    """The seeds of a command, one after the other."""

    def __init__(self, args: argparse.Namespace, clock: Clock):
        self.args, self.clock, self.rule = args, clock, rule_of(args.variants)
        own = {name: getattr(args, name) for name in ("steps", "batch", "micro", "attention")}
        run = changed(PRESETS[args.preset], **own)
        self.experiment = Experiment(run, text_of(run, args))
        self.folder = args.folder or Path("demo_output") / run.preset
        smoke = run.preset.startswith("smoke")
        # steps that were asked for are another case; those that a device had time for are not
        self.case = run.preset + (f" steps={args.steps}" if args.steps else "")
        name = f"pairs-{self.case.replace(' steps=', '-')}-{self.rule}.npz"
        default = None if smoke else records.RESULTS / name
        self.curves = args.curves or default
        self.programs = compile_all(self.experiment, args.variants)
        say(f"compiled {len(self.programs)} variants after {clock.seconds():.0f} s")
        self.steps = self._steps()
        first = next(iter(self.programs.values()))[0]
        # the seed is of a run, not of what the runs share
        shared = about(self.experiment, first.parameters) | {"steps": self.steps}
        self.flags = {key: value for key, value in shared.items() if key != "seed"}
        tokens = self.steps * run.tokens
        epochs = tokens / self.experiment.text.last
        say(f"{run.preset}: {self.flags['parameters']:,} weights, {self.steps} steps of "
            f"{run.tokens:,} tokens: {tokens / 1e6:.1f} million, {epochs:.2f} epochs")  # fmt: skip

    def _steps(self) -> int:
        """Of each run: decided once, whatever later commands find."""
        path, run = self.folder / "steps.json", self.experiment.run
        if path.exists():
            return json.loads(path.read_text())
        seconds = self.args.seconds
        steps = affordable(self.experiment, self.programs, seconds) if seconds else run.steps
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(steps))
        return steps

    def _stored(self, seed: Seed) -> None:
        if self.curves is not None:
            store(self.curves, None, self.flags, seed.curves())

    def _recorded(self, seed: Seed) -> None:
        """Keep the records of a seed that has ended; the losses of groups give an interval."""
        where = ("device", "jax", "commit")
        own = {key: value for key, value in self.flags.items() if key not in where}
        case = f"{self.case}/{self.rule}"
        for name, one in seed.runs.items():
            rows = records.records_of(
                "pairs", case, name, seed.values(name), seed=seed.seed, flags=own
            )
            groups = [round(float(x), 5) for x in one.curves["val_groups"]]
            rows[0] |= {"held_out_groups": groups}
            records.keep(rows, self.args.record)

    def run(self) -> int:
        """Train the seeds until the limit; return how many are left."""
        seeds = range(self.args.first_seed, self.args.first_seed + self.args.seeds)
        left = [seed for seed in seeds if not (self.folder / f"ended-{seed}").exists()]
        while left:
            seed = Seed(self.experiment, self.programs, left[0], self.steps, self.folder)
            ended = seed.train(self.clock)
            self._stored(seed)
            if not ended:
                break
            self._recorded(seed)
            (self.folder / f"ended-{left.pop(0)}").touch()
            seed.path.unlink()
            self._compared(seed)
        say(f"{len(left)} of {len(seeds)} seeds left after {self.clock.seconds():.0f} s")
        return len(left)

    def _compared(self, seed: Seed) -> None:
        losses = {name: one.curves["val_loss"][-1] for name, one in seed.runs.items()}
        base = losses.get(BASES[self.rule], next(iter(losses.values())))
        for name, loss in losses.items():
            rate = seed.values(name)["tokens_per_s"][0]
            say(f"seed {seed.seed:<3}{name:<24}{loss:9.5f}  {100 * (loss / base - 1):+.3f} %  "
                f"{rate:,.0f} tokens/s")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    clock = Clock(args.limit)
    if args.files:
        run = PRESETS[args.preset]
        listed(run, args.files)
        text = text_of(run, args)
        say(f"{text.last:,} tokens to train on, {text.held_out.size:,} of held-out windows; "
            f"vocabulary {text.vocab:,}; after {clock.seconds():.0f} s")  # fmt: skip
        return 0
    Bench(args, clock).run()
    return 0
