"""The command line of a training benchmark, and the runs of its variants and seeds.

One run follows the other. A later command may go on with a run that the time limit ended.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import records, training
from benchmarks.curves import WHERE, store
from benchmarks.training import Curve, Experiment, Kept, Program, Run, changed, say


def parser(
    doc: str | None,
    limit: int,
    curves: Path,
    variants: Iterable[str],
    presets: Iterable[str] = ("gpu", "cpu", "smoke"),
    several: bool = False,
) -> argparse.ArgumentParser:
    """The command line of a training benchmark; `several`: with lists of `--steps` and `--lr`."""
    made = records.command_line(doc)
    add = made.add_argument
    many: dict[str, Any] = {"nargs": "+"} if several else {}
    each = "one or more, of which each combination is trained; " if several else ""
    add("--preset", choices=list(presets), help="default: gpu, or cpu where there is none")
    add("--variants", nargs="+", choices=list(variants), metavar="NAME",
        help=f"of {', '.join(variants)} (default: all)")  # fmt: skip
    add("--steps", type=int, help=f"of a run; {each}default: the preset's", **many)
    add("--lr", type=float, help=f"peak learning rate; {each}default: the preset's", **many)
    add("--attention", choices=("xla", "cudnn"), help="default: the preset's")
    add("--seed", type=int, default=0, help="of weights, batches and what else is random")
    add("--limit", type=float, default=limit, metavar="S",
        help="start no run that would end later (default: %(default)s s)")  # fmt: skip
    add("--cache", type=Path, default=Path("demo_output"), help="where a tokenizer is kept")
    add("--curves", type=Path, help=f"default: {curves.name} in benchmarks/results")
    return made


def usual(presets: dict[str, Any], name: str | None) -> Any:
    """The preset of that name; without one, that of this device."""
    return presets[name or ("cpu" if jax.default_backend() == "cpu" else "gpu")]


def built(args: argparse.Namespace, experiment: Any, preset: Run) -> Any:
    more = {"learning_rate": args.lr, "attention": args.attention}
    run = changed(preset, steps=args.steps, batch=getattr(args, "batch", None), **more)
    return experiment(run, training.load_text(run, args.cache), args.seed)


def about(experiment: Experiment, parameters: int) -> dict[str, Any]:
    """Return the settings that runs share, for the curves and the records."""
    return experiment.flags() | {
        "seed": experiment.seed,
        "parameters": parameters,
        "device": records.device(),
        "jax": jax.__version__,
        "commit": records.commit(),
    }


def settings_of(flags: dict[str, Any]) -> dict[str, Any]:
    """The settings without where they ran, for records."""
    return {key: value for key, value in flags.items() if key not in WHERE}


class Part:
    """The runs of a part, one after the other, until the limit; stored and recorded.

    `programs` are the traced variants and `flags` what their runs share; `runs` are the curves of
    what was trained, and `late` is whether a run is to go on in a later command.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        make: Callable[[], Experiment],
        names: Iterable[str],
        path: Path,
        part: str | None = None,
    ):
        self._began, self._longest = time.perf_counter(), 0.0
        self.args, self.part, self.experiment = args, part, make()
        run = self.experiment.run
        self.path = args.curves or (None if run.preset.startswith("smoke") else path)
        self.programs: dict[str, Program] = {}
        self._compiled: dict[str, Future[tuple[Any, Any]]] = {}
        pool = ThreadPoolExecutor()
        for name in names:  # a variant is traced while those before it are compiled
            self.programs[name] = program = self.experiment.lower(name)
            self._compiled[name] = pool.submit(program.compile)
        pool.shutdown(wait=False)
        self.flags = about(self.experiment, next(iter(self.programs.values())).parameters)
        self.runs: dict[str, Curve] = {}
        self.late = False

    def compiled(self, name: str) -> tuple[Any, Any]:
        """Return the steps and the evaluation of a variant, once they are compiled."""
        return self._compiled[name].result()

    def wait(self) -> None:
        """Wait until all variants are compiled."""
        for name in self.programs:
            self.compiled(name)

    def train_all(self, seeds: Iterable[int] = (), folder: Path | None = None) -> dict[str, Curve]:
        """Trains each variant, from each of the seeds if there are some, until the limit.

        With a folder, an unfinished run is kept there, and the same command goes on from it.
        """
        self.wait()
        run, weights = self.experiment.run, self.flags["parameters"]
        size = f"{weights:,} weights, {run.steps} steps of {run.batch * run.context:,}"
        say(f"{run.preset}: {size} {run.tokenizer}s; {len(self.programs)} variants")
        if seeds:
            del self.flags["seed"]
        settings, until = settings_of(self.flags), self._began + self.args.limit
        for seed, name in itertools.product(list(seeds) or [self.experiment.seed], self.programs):
            label = f"{name} seed {seed}" if seeds else name
            kept = Kept(folder / f"{label}.npz", settings, until) if folder else None
            if kept is not None and kept.ended or not self.begins(label, kept is None):
                continue
            self.experiment.turn_to(name, seed)
            program = self.programs[name]
            found, *_ = self.experiment.follow(program.start, *self.compiled(name), say, kept)
            if kept is not None and found["step"][-1] < self.experiment.run.steps:
                say(f"{label} is to go on in {kept.path}")
                self.late = True
                break
            self.add(label, found, self.experiment.values(found, program))
            if kept is not None:
                kept.end()
        say("\n".join(self.summary()))
        return self.runs

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def begins(self, label: str, whole: bool = True) -> bool:
        """Return whether a run is to begin; otherwise it would end too late, unless kept."""
        self._at = self.seconds()
        late = whole and self._at + self._longest > self.args.limit
        say(f"{label} {'is left out ' if late else ''}after {self._at:.0f} s")
        return not late

    def add(self, label: str, curves: Curve, values: dict[str, tuple[float, str]]) -> None:
        self._longest = max(self._longest, self.seconds() - self._at)
        self.runs[label] = curves
        self.store()
        self.record(label.partition(" seed ")[0], values, **self.experiment.fields(curves))

    def store(self) -> None:
        if self.path is not None:
            store(self.path, self.part, self.flags, self.runs)

    def record(
        self, name: str, values: dict[str, tuple[float, str]], bench: str | None = None, **more: Any
    ) -> None:
        """Keeps records of a run: metric -> value and unit; the first has `more`."""
        of, own = self.experiment, settings_of(self.flags)
        rows = records.records_of(bench or of.bench, of.case, name, values, seed=of.seed, flags=own)
        rows[0] |= more
        records.keep(rows, self.args.record)

    def summary(self) -> Iterator[str]:
        """Last values of each run, and its loss over the base's."""
        for label, own in self.runs.items():
            _, *seed = label.partition(" seed ")
            plain = self.runs.get("".join([self.experiment.base, *seed]), {"val_loss": [np.nan]})
            loss, base = own["val_loss"][-1], plain["val_loss"][-1]
            last = {name: values[-1] for name, values in own.items() if values.ndim == 1}
            more = "  ".join(f"{name} {value:.5g}" for name, value in last.items())
            yield f"{label:<28}{100 * (loss / base - 1):>+8.2f} %  {more}"
