"""States that version 0.1.0 wrote: its pickles and its checkpoints are read as they were."""

import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from optax_lowmem import checkpoint
from optax_lowmem._src import pickles
from tests.golden import make_states

REPO = Path(__file__).parents[2]
WRITTEN = REPO / "tests" / "golden" / "states_0.1"
ARRAYS = json.loads((WRITTEN / "arrays.json").read_text())
OF_FLAX = ("layers.",)


@pytest.fixture(scope="module")
def states():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pickle.loads((WRITTEN / "states.pickle").read_bytes())


def test_every_optimizer_was_written(states):
    assert states.keys() == ARRAYS.keys() == make_states.OPTIMIZERS.keys()


@pytest.mark.parametrize("name", make_states.OPTIMIZERS)
def test_a_pickled_state_is_that_of_its_optimizer(name, states):
    tx, params, state = make_states.begun(name)
    now, then = {"params": params, "state": state}, states[name]
    assert jax.tree.structure(then) == jax.tree.structure(now)
    assert make_states.summary(then) == ARRAYS[name]
    forms = [jax.tree.map(lambda x: (x.dtype, x.shape), tree) for tree in (now, then)]
    assert forms[0] == forms[1]


def test_a_pickled_state_goes_on(states):
    tx = make_states.OPTIMIZERS["flash_adamw"]()
    then = states["flash_adamw"]
    params, state = make_states.stepped(tx, then["params"], then["state"], steps=1)
    assert int(state.count) == make_states.STEPS + 1
    assert jax.tree.structure(state) == jax.tree.structure(then["state"])


def test_a_pickle_warns_of_its_old_names():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pickle.loads((WRITTEN / "states.pickle").read_bytes())
    assert all(one.category is DeprecationWarning for one in caught)
    old, new = "optax_lowmem.optimizers.adam", "optax_lowmem._src.optimizers.adam"
    words = f"{old}.FlashAdamState is {new}.FlashAdamState now"
    assert any(str(one.message).startswith(words) for one in caught)


def test_a_pickle_loads_where_the_library_is_not_imported_yet():
    program = "import pickle, sys; s = pickle.load(open(sys.argv[1], 'rb')); print(len(s))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(WRITTEN / "states.pickle")],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == [str(len(ARRAYS))], done.stderr


@pytest.mark.parametrize("old", pickles.MOVED)
def test_old_names_have_their_classes(old):
    if old.startswith(OF_FLAX):
        pytest.importorskip("flax")
    new = importlib.import_module(f"optax_lowmem.{pickles.MOVED[old]}")
    classes = [
        name
        for name, thing in vars(new).items()
        if isinstance(thing, type) and thing.__module__ == new.__name__
    ]
    assert classes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in classes:
            assert getattr(sys.modules[f"optax_lowmem.{old}"], name) is getattr(new, name)


def test_old_modules_have_no_functions():
    with pytest.raises(ImportError, match="flash_adamw"):
        exec("from optax_lowmem.optimizers.adam import flash_adamw")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("optax_lowmem.transforms.chain")


def test_a_checkpoint_is_restored(tmp_path):
    shutil.copytree(WRITTEN / "checkpoint", tmp_path / "run")
    tx, weights, state = make_states.begun(make_states.CHECKPOINT)
    params, restored = checkpoint.restore(tmp_path / "run", tx, jax.eval_shape(lambda: weights))
    assert checkpoint.latest_step(tmp_path / "run") == make_states.STEPS
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    found = make_states.summary({"params": params, "state": restored})
    assert found == ARRAYS[make_states.CHECKPOINT]
