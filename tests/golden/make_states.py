"""Write optimizer states of the version of the library that runs it: a pickle and a checkpoint.

`states_0.1` was written by version 0.1.0 with jax 0.10.2:

    python -m tests.golden.make_states --out tests/golden/states_0.1

    states.pickle      optimizer -> {"params": ..., "state": ...}, of NumPy arrays
    arrays.json        optimizer -> path of an array -> [dtype, shape, 16 digits of its SHA-256]
    checkpoint/        one step of the optimizer CHECKPOINT, by `checkpoint.save`
"""

import argparse
import dataclasses
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lowmem as lowmem
from optax_lowmem import checkpoint

STEPS = 3
CHECKPOINT = "accumulate_gradients"
_ALL = lowmem.Policy(min_size=0)
_STORAGE = lowmem.Storage(policy=_ALL)


def _mini() -> optax.GradientTransformation:
    blocks = lowmem.blocks.Structure(default="whole")
    storage = dataclasses.replace(_STORAGE, nu=lowmem.codecs.sqrt())
    return lowmem.flash_adam_mini(1e-2, blocks=blocks, storage=storage)


def _plain() -> optax.GradientTransformation:
    adam = optax.adamw(1e-2)
    return lowmem.compress_state(
        adam, mu=lowmem.codecs.softsign(), nu=lowmem.codecs.sqrt(), policy=_ALL
    )


def _coat() -> optax.GradientTransformation:
    mu, nu = (lowmem.codecs.expanded_e4m3(signed) for signed in (True, False))
    storage = lowmem.Storage(mu=mu, nu=nu, group_size=32, policy=_ALL)
    return lowmem.coat_adamw(1e-2, storage=storage)


def _adamw() -> optax.GradientTransformation:
    return lowmem.flash_adamw(1e-2, storage=_STORAGE)


# Optimizer -> how to make it; each state class that can be saved is in one of them.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "flash_adamw": _adamw,
    "coat_adamw": _coat,
    "flash_adam_mini": _mini,
    "flash_lion": lambda: lowmem.flash_lion(1e-3, storage=_STORAGE),
    "flash_sgd": lambda: lowmem.flash_sgd(1e-2, momentum=0.9, storage=_STORAGE),
    "plain_sgd": lambda: lowmem.flash_sgd(1e-2),
    "compress_state": _plain,
    "split_master_weights": lambda: lowmem.split_master_weights(optax.sgd(1e-2)),
    "gaussws_noise": lambda: lowmem.gaussws_noise(lowmem.flash_lion(1e-3, storage=_STORAGE)),
    "accumulate_gradients": lambda: lowmem.accumulate_gradients(_adamw(), 2),
    "accumulate_moments": lambda: lowmem.accumulate_gradients(_adamw(), 2, into="moments"),
    "track_master_ema": lambda: lowmem.track_master_ema(
        lowmem.flash_sgd(1e-2, momentum=0.9, storage=_STORAGE), 0.9
    ),
    "update_clipping": lambda: lowmem.update_clipping(optax.adamw(1e-2), b2=0.99, eps=1e-6),
}


def parameters() -> dict[str, Any]:
    """Fresh f32 parameters, a matrix and a vector."""
    w = jnp.linspace(-1, 1, 16 * 32, dtype=jnp.float32).reshape(16, 32)
    return {"dense": {"kernel": w, "bias": jnp.zeros(32, jnp.float32)}}


def begun(name: str) -> tuple[Any, Any, Any]:
    """(transformation, weights, state) before any step."""
    tx, params = OPTIMIZERS[name](), parameters()
    if name in ("compress_state", "update_clipping"):  # without a correction, so in f32
        return tx, params, tx.init(params)
    return tx, *lowmem.init(tx, params)


def stepped(tx: Any, params: Any, state: Any, steps: int = STEPS) -> tuple[Any, Any]:
    """Weights and state after some steps of made-up gradients."""
    for step in range(steps):
        grads = jax.tree.map(lambda p, step=step: jnp.sin((9 + step) * p + step), params)
        params, state = lowmem.step(tx, grads, state, params)
    return params, state


def summary(tree: Any) -> dict[str, list[Any]]:
    """Path -> [dtype, shape, hash] of every array of a tree."""
    rows = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        rows[jax.tree_util.keystr(path)] = [str(array.dtype), list(array.shape), digest]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True)
    states = {}
    for name in OPTIMIZERS:
        tx, params, state = begun(name)
        params, state = stepped(tx, params, state)
        states[name] = jax.tree.map(np.asarray, {"params": params, "state": state})
        if name == CHECKPOINT:
            checkpoint.save(out.resolve() / "checkpoint", tx, params, state, step=STEPS)
    (out / "states.pickle").write_bytes(pickle.dumps(states, protocol=4))
    rows = {name: summary(tree) for name, tree in states.items()}
    (out / "arrays.json").write_text(json.dumps(rows, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
