"""Saving and resuming a run, on whatever mesh."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from optax_lowmem import checkpoint

from . import choose
from .config import AUTO, WEIGHTS, Settings
from .train import Program, Run

_FILE = "run.json"
# What a run may go on with differently: how it is computed, not what.
_FREE = (
    "implementation", "attention", "compute", "linear", "activations", "head", "remat", "release",
    "offload",
    "data", "fsdp", "tensor", "zero", "unroll", "accumulate",
)  # fmt: skip


def _described(settings: Settings) -> dict[str, Any]:
    found = json.loads(json.dumps(dataclasses.asdict(settings)))
    return {name: value for name, value in found.items() if name not in _FREE}


def begin(folder: Path | None, settings: Settings, resume: bool) -> tuple[int, Settings]:
    """The step to go on from, and the run with its layers stacked or apart, as they were saved.

    Ends the program where the folder does not fit.
    """
    if folder is None:
        if resume:
            raise SystemExit("--resume needs --checkpoint with the folder of the run")
        return 0, settings
    step, file = checkpoint.latest_step(folder), folder / _FILE
    if step is not None and not resume:
        raise SystemExit(f"{folder} has a run at step {step}: add --resume, or name another folder")
    if step is None:  # also where a first run was killed before its first checkpoint
        settings = dataclasses.replace(settings, stacked=choose.stacked(settings))
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_described(settings), indent=1), encoding="utf-8")
        return 0, settings
    saved = {"stacked": True} | json.loads(file.read_text(encoding="utf-8"))
    if settings.stacked == AUTO:
        settings = dataclasses.replace(settings, stacked=saved["stacked"])
    if settings.release and not settings.stacked:
        raise SystemExit(
            f"--release goes along stacked layers, and {folder} has a run without: leave out "
            "--release, or begin another run with it"
        )
    own = _described(settings)
    unlike = [name for name in own if saved.get(name) != own[name]]
    if unlike:
        name = unlike[0]
        raise SystemExit(
            f"{folder} has a run with {name}={saved.get(name)!r}, not {own[name]!r}: resume it "
            "with the flags that it was begun with (the mesh and what computes it may differ)"
        )
    return step, settings


def start_or_restore(folder: Path | None, program: Program, step: int) -> Run:
    """The run, at a step of its checkpoints; 0: from the start."""
    if step == 0:
        return Run(*program.start(), 0, [], [])
    assert folder is not None
    (params, _), places = program.like, program.shardings
    if program.settings.offload:
        places = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), places)
    if program.settings.offload == WEIGHTS:
        params = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), params, places[0])
    params, state = checkpoint.restore(folder, program.tx, params, step=step, shardings=places[1])
    return Run(*program.moved(params, state), step, [], [])


def save(folder: Path, program: Program, run: Run) -> None:
    """Saves the run; the two newest checkpoints are kept."""
    checkpoint.save(folder, program.tx, run.params, run.state, run.step, keep=2)


def stopped(folder: Path | None) -> str:
    """Return the message of a run that was interrupted."""
    if folder is None:
        return "stopped; nothing was saved (--checkpoint DIR --save-every N keeps a run)"
    step = checkpoint.latest_step(folder)
    if step is None:
        return f"stopped before the first checkpoint; begin again with --checkpoint {folder}"
    return f"stopped; continue from step {step} with --checkpoint {folder} --resume"
