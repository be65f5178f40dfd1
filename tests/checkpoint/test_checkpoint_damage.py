"""Tests of checkpoints under wrong arguments, other folders, flipped bits, cuts and kills."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import xxhash
from etils import epath

import optax_lowmem as lowmem
from optax_lowmem import checkpoint
from optax_lowmem._src.training.checkpoint import checksums
from tests import contract_cases as cases
from tests.checkpoint_cases import SMALL, assert_same_bits, two_steps

# of a read that failed, tensorstore's other reads end after Orbax has closed its event loop
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# ---- arguments -----------------------------------------------------------------------------------
@pytest.mark.parametrize("step", [0.5, -1, "a", None, True, jnp.float32(1)])
def test_a_step_that_is_no_number_of_a_step_is_not_written(step, tmp_path):
    tx = lowmem.flash_lion(1e-3, storage=SMALL)
    params, state = lowmem.init(tx, cases.masters())
    with pytest.raises(ValueError, match="step must be a whole number from 0 up, got"):
        checkpoint.save(tmp_path / "run", tx, params, state, step=step)
    assert not (tmp_path / "run").exists()


def test_a_state_in_the_place_of_a_step_is_named_and_not_printed(tmp_path):
    tx = lowmem.flash_lion(1e-3, storage=SMALL)
    params, state = lowmem.init(tx, cases.masters())
    with pytest.raises(ValueError, match="step must be a whole number from 0 up, got a FlashLionS"):
        checkpoint.save(tmp_path, tx, params, 3, state)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "1"])
def test_keep_never_means_none_at_all(keep, tmp_path):
    tx = lowmem.flash_lion(1e-3, storage=SMALL)
    params, state = lowmem.init(tx, cases.masters())
    with pytest.raises(ValueError, match="keep must be a whole number from 1 up, .* got"):
        checkpoint.save(tmp_path / "run", tx, params, state, step=0, keep=keep)
    assert not (tmp_path / "run").exists()


def test_steps_of_numpy_and_jax_are_numbers(tmp_path):
    tx = lowmem.flash_lion(1e-3, storage=SMALL)
    params, state = lowmem.init(tx, cases.masters())
    checkpoint.save(tmp_path, tx, params, state, step=jnp.int32(3), keep=jnp.int32(2))
    assert checkpoint.latest_step(tmp_path) == 3
    assert_same_bits(checkpoint.restore(tmp_path, tx, params, step=jnp.int32(3)), (params, state))
    with pytest.raises(ValueError, match="step must be a whole number from 0 up, got True"):
        checkpoint.restore(tmp_path, tx, params, step=True)


# ---- bits and cuts -------------------------------------------------------------------------------
def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def damages(folder, count, seed=0):
    """Files one after another, each with a bit flipped, cut or deleted; undone when consumed."""
    rng = np.random.default_rng(seed)
    paths = files_of(folder)
    for index in range(count):
        path = paths[index % len(paths)]
        whole = path.read_bytes()
        at = int(rng.integers(len(whole)))
        kind = ("flip", "flip", "cut")[int(rng.integers(3))]
        if kind == "cut":
            path.write_bytes(whole[:at])
        else:
            flipped = bytearray(whole)
            flipped[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(flipped)
        try:
            yield f"{kind} at {at} of {path.relative_to(folder)}", path
        finally:
            path.write_bytes(whole)


# what Orbax writes after the files are summed: times and marks, of which nothing is restored
LATER = {"commit_success.txt", "_CHECKPOINT_METADATA"}


def is_detected(folder):
    """Return whether checksums detect damage, as in `restore`; an unreadable file counts."""
    try:
        return any(list(checksums.damaged(item)) for item in folder.iterdir() if item.is_dir())
    except (ValueError, KeyError, TypeError, AttributeError):  # a damaged file of checksums
        return True


@pytest.mark.parametrize(
    ("count", "every"), [(90, 15), pytest.param(1000, 10, marks=pytest.mark.full)]
)
def test_flips_and_cuts_are_detected_or_harmless(count, every, tmp_path):
    """In every file; the checksums of all damages, and a whole restore of a share of them."""
    tx, _, later = two_steps(tmp_path)
    found = {"told": 0, "harmless": 0}
    for index, (what, path) in enumerate(damages(tmp_path / "2", count)):
        if path.name not in LATER:
            assert is_detected(tmp_path / "2"), what
            found["told"] += 1
        if path.name not in LATER and index % every:
            continue
        try:
            restored = checkpoint.restore(tmp_path, tx, later[0], step=2)
        except ValueError as error:
            assert "step 2" in str(error), what
        else:
            assert path.name in LATER, what
            assert_same_bits(restored, later)
            found["harmless"] += 1
    assert found["told"] > count * 0.7
    assert_same_bits(checkpoint.restore(tmp_path, tx, later[0], step=2), later)


@pytest.mark.parametrize("item", ["params", "opt_state", "optax_lowmem"])
def test_a_flipped_bit_is_named(item, tmp_path):
    tx, first, _ = two_steps(tmp_path)
    path = max(files_of(tmp_path / "2" / item), key=lambda p: ("/d/" in str(p), p.stat().st_size))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    name = path.relative_to(tmp_path / "2")
    with pytest.raises(ValueError, match=rf"'{name}' has other bytes than were written"):
        checkpoint.restore(tmp_path, tx, first[0])
    assert_same_bits(checkpoint.restore(tmp_path, tx, first[0], step=1), first)


def test_checksums_that_are_gone_are_missed(tmp_path):
    tx, first, _ = two_steps(tmp_path)
    (tmp_path / "2" / "params" / checksums.NAME).unlink()
    with pytest.raises(ValueError, match="step 2 .* was saved with checksums, .* missing"):
        checkpoint.restore(tmp_path, tx, first[0])


def test_checkpoints_from_before_checksums_are_restored(tmp_path):
    """As `save` wrote them, by a manager without our handlers."""
    tx = lowmem.flash_adamw(1e-2, storage=SMALL)
    saved = lowmem.init(tx, cases.masters())
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(**checkpoint.args(tx, *saved)))
    assert not list(tmp_path.rglob(checksums.NAME))
    assert_same_bits(checkpoint.restore(tmp_path, tx, saved[0]), saved)


@pytest.mark.parametrize("prefix", [None, "run"])
def test_a_manager_with_our_handlers_stores_checksums(prefix, tmp_path):
    tx = lowmem.flash_adamw(1e-2, storage=SMALL)
    saved = lowmem.init(tx, cases.masters())
    options = ocp.CheckpointManagerOptions(step_prefix=prefix, step_format_fixed_length=4)
    registry = checkpoint.handlers()
    with ocp.CheckpointManager(tmp_path, options=options, handler_registry=registry) as manager:
        items = checkpoint.args(tx, *saved)
        manager.save(1, args=ocp.args.Composite(**items, data=ocp.args.JsonSave({"batch": 7})))
        manager.wait_until_finished()
        assert_same_bits(checkpoint.restore_from(manager, tx, saved[0]), saved)
        path = next(p for p in files_of(tmp_path) if "opt_state" in str(p) and "/d/" in str(p))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with pytest.raises(ValueError, match="other bytes than were written"):
            checkpoint.restore_from(manager, tx, saved[0])


def test_files_of_several_processes_are_summed_by_each(tmp_path, monkeypatch):
    """Of process 1 first; process 0 sums the rest, those sums too."""
    item = epath.Path(tmp_path)
    names = ["ocdbt.process_0/d/a", "ocdbt.process_1/d/b", "array_metadatas/process_1", "d/c"]
    for name in names:
        (item / name).parent.mkdir(parents=True, exist_ok=True)
        (item / name).write_text(name)
    for index in (1, 0):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        checksums.write_of_process(item)
    checksums.write_rest(item)
    own = json.loads((item / "checksums.process_1.json").read_text())[checksums.FORM]
    assert sorted(own) == ["array_metadatas/process_1", "ocdbt.process_1/d/b"]
    rest = json.loads((item / checksums.NAME).read_text())[checksums.FORM]
    assert sorted(rest) == ["checksums.process_0.json", "checksums.process_1.json", "d/c"]
    assert not list(checksums.damaged(item))
    for name in [*names, "checksums.process_1.json"]:
        text = (item / name).read_text()
        (item / name).write_text(text[:-1] + " ")
        assert f"'{item.name}/{name}' has other bytes" in next(iter(checksums.damaged(item)))
        (item / name).unlink()
        assert f"'{item.name}/{name}' is missing" in next(iter(checksums.damaged(item)))
        (item / name).write_text(text)


PAGE = 4096


def sums_of(folder):
    """Return a function: the (size, checksum) of a file of these bytes."""
    path = epath.Path(folder / "file")

    def sum_of(data):
        path.write_bytes(data.tobytes())
        return checksums._checksums(path.parent, ["file"])[0]

    return sum_of


def test_every_bit_counts_in_a_checksum(tmp_path, monkeypatch):
    """Of every page, block and remainder; and pages that change places, or become zeros."""
    monkeypatch.setattr(checksums, "_BLOCK", 4 * PAGE)
    monkeypatch.setattr(checksums, "_PIECE", 2 * PAGE)
    rng = np.random.default_rng(0)
    whole, sum_of = rng.integers(0, 256, 9 * PAGE + 13, np.uint8), sums_of(tmp_path)
    first = sum_of(whole)
    assert first[0] == whole.size
    places = [0, whole.size - 1, *rng.integers(0, whole.size, 60)]
    for at in places:
        flipped = whole.copy()
        flipped[at] ^= 1 << int(rng.integers(8))
        assert sum_of(flipped) != first, at
    pages = whole[: 9 * PAGE].reshape(9, -1)
    for a, b in ((0, 1), (0, 4), (3, 8)):
        order = list(range(9))
        order[a], order[b] = b, a
        assert sum_of(np.concatenate([pages[order].ravel(), whole[-13:]])) != first
    for at in range(9):
        zeroed = pages.copy()
        zeroed[at] = 0
        assert sum_of(np.append(zeroed, whole[-13:])) != first
    for cut in (1, 13, 14, PAGE, 5 * PAGE):
        assert sum_of(whole[:-cut]) != first
    for added in (1, PAGE, 3 * PAGE):
        assert sum_of(np.append(whole, np.zeros(added, np.uint8))) != first


@pytest.mark.parametrize("size", [8, 64, 512])
def test_exchanged_bytes_of_a_page_change_a_checksum(size, tmp_path):
    """Words, cache lines and sectors, and a bit that is set in one word and cleared in another."""
    rng, sum_of = np.random.default_rng(0), sums_of(tmp_path)
    whole = rng.integers(0, 256, 2 * PAGE, np.uint8)
    first = sum_of(whole)
    for _ in range(20):
        a, b = rng.choice(PAGE // size, 2, replace=False)
        exchanged = whole.copy().reshape(-1, size)
        exchanged[[a, b]] = exchanged[[b, a]]
        assert sum_of(exchanged) != first, (a, b)
        bit, words = np.uint64(1) << np.uint64(rng.integers(64)), whole.copy().view(np.uint64)
        one, other = (np.flatnonzero((words & bit > 0) == is_set)[0] for is_set in (True, False))
        words[[one, other]] ^= bit
        assert sum_of(words) != first, (bit, one, other)


def test_checksums_of_another_form_are_refused(tmp_path):
    tx, first, _ = two_steps(tmp_path)
    path = tmp_path / "2" / "params" / checksums.NAME
    path.write_text(path.read_text().replace(checksums.FORM, "crc32 of page sums"))
    with pytest.raises(ValueError, match=f"no checksums of the form '{checksums.FORM}'"):
        checkpoint.restore(tmp_path, tx, first[0])


def bytes_of(size):
    """Return bytes that no generator's version changes."""
    steps = np.arange(size, dtype=np.uint64) * np.uint64(2654435761)
    return (steps >> np.uint64(13)).astype(np.uint8).tobytes()


SUMS = {
    0: 3244421341483603138,
    1: 36447165797404609,
    4096: 1460928839465006769,
    36877: 9727561468375154345,
    9441283: 1989487877171137481,
}


@pytest.mark.parametrize("piece", [1 << 15, None])
def test_sums_of_stored_checkpoints_stay_what_they_are(piece, tmp_path, monkeypatch):
    """However a file is read: the name of the form promises these numbers."""
    assert checksums.FORM == "xxh3 of blocks"
    monkeypatch.setattr(checksums, "_PIECE", piece or checksums._PIECE)
    for size in SUMS:
        (tmp_path / str(size)).write_bytes(bytes_of(size))
    found = checksums._checksums(epath.Path(tmp_path), [str(size) for size in SUMS])
    assert dict(found) == SUMS


def test_a_file_of_a_stored_checkpoint_is_still_compared(tmp_path):
    item, size = epath.Path(tmp_path), 36877
    sums = {checksums.FORM: {"d": [size, SUMS[size]]}}
    (item / "checksums.json").write_text(json.dumps(sums))
    whole = bytearray(bytes_of(size))
    (item / "d").write_bytes(whole)
    assert not list(checksums.damaged(item))
    whole[20000] ^= 16
    (item / "d").write_bytes(whole)
    assert "has other bytes than were written" in next(checksums.damaged(item))


def test_files_that_come_in_parts_have_the_same_sum(monkeypatch):
    class Bucket(io.BytesIO):
        def read(self, count):
            return super().read(min(count, 7))

    monkeypatch.setattr(checksums, "_BLOCK", 50)
    whole = bytes(range(60))
    for kind in (io.BytesIO, Bucket):
        path = SimpleNamespace(open=lambda mode, kind=kind: kind(whole))
        assert checksums._hash(path, 0) == xxhash.xxh3_64_digest(whole[:50])
        assert checksums._hash(path, 50) == xxhash.xxh3_64_digest(whole[50:])


# ---- kills ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("times", [3, pytest.param(100, marks=pytest.mark.full)])
def test_no_acknowledged_step_is_lost_to_a_kill(times, tmp_path):
    """At any moment of a save; the newest step has every bit of what was saved."""
    repo = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(repo), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.checkpoint_killed", str(tmp_path / "run"), str(times)]
    done = subprocess.run(
        command, env=env, cwd=repo, capture_output=True, text=True, timeout=30 + 5 * times
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rounds = json.loads(done.stdout.splitlines()[-1])
    assert len(rounds) == times
    for said, acknowledged, found, _ in rounds:
        assert set(said) <= {"(", ")"}, said
        # a step that was complete and not yet acknowledged may be there too
        newest = -1 if found == "null" else int(found)
        assert newest in (acknowledged, acknowledged + 1), (said, acknowledged, found)
    if times >= 100:  # kills within a save, and between the two
        assert sum(said.endswith("(") for said, *_ in rounds) > times // 2
        assert any(said.endswith(")") or ")" in said for said, *_ in rounds)


# ---- trees that Orbax does not take as they are, and other folders -------------------------------
TREES = {
    "0-size": {"w": jnp.ones((0, 3)), "b": jnp.ones(3)}, "all 0-size": {"w": jnp.ones((0, 3))},
    "bare": jnp.arange(8.0).reshape(2, 4), "bare 0-size": jnp.ones((0, 3)),
    "bare 0-d": jnp.ones(()), "nothing": {}, "None": {"a": None, "b": jnp.ones(3), "c": {}},
    "list": [jnp.ones(3), (jnp.ones(4),)],
}  # fmt: skip


@pytest.mark.parametrize("kind", TREES)
def test_any_tree_comes_back(kind, tmp_path):
    tx = lowmem.flash_adamw(1e-2, storage=SMALL)
    params, state = lowmem.init(tx, TREES[kind])
    checkpoint.save(tmp_path, tx, params, state, step=0)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert checkpoint.latest_step(tmp_path) == 0
    assert_same_bits(checkpoint.restore(tmp_path, tx, params), (params, state))


def test_an_optimizer_without_a_state_comes_back(tmp_path):
    tx, params = optax.sgd(1e-2), {"w": jnp.ones(3)}
    checkpoint.save(tmp_path, tx, params, tx.init(params), step=0)
    assert_same_bits(checkpoint.restore(tmp_path, tx, params), (params, tx.init(params)))


def test_a_save_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    tx, first, later = two_steps(tmp_path)

    def fail(folder):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checksums, "write_rest", fail)
        with pytest.raises(OSError, match="disk full"):
            checkpoint.save(tmp_path, tx, *first, step=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    assert_same_bits(checkpoint.restore(tmp_path, tx, first[0]), later)


def test_the_next_save_removes_what_others_left(tmp_path):
    tx, first, later = two_steps(tmp_path)
    params, state = jax.tree.map(jnp.copy, first)
    state.mu["norm"].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        checkpoint.save(tmp_path, tx, params, state, step=3)
    for name in ("4.orbax-checkpoint-tmp/params", "5.orbax-checkpoint-tmp-17"):  # killed saves
        (tmp_path / name).mkdir(parents=True)
    checkpoint.save(tmp_path, tx, *later, step=6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "6"]
    assert_same_bits(checkpoint.restore(tmp_path, tx, first[0]), later)


def test_one_save_at_a_time_writes(tmp_path, monkeypatch):
    tx, first, later = two_steps(tmp_path)
    write, tried = checksums.write_rest, []

    def while_saving(folder):
        if not tried:
            tried.append(folder)
            for step in (3, 4):
                with pytest.raises(BlockingIOError, match="another save writes to"):
                    checkpoint.save(tmp_path, tx, *first, step=step)
        write(folder)

    monkeypatch.setattr(checksums, "write_rest", while_saving)
    checkpoint.save(tmp_path, tx, *later, step=3)
    assert tried
    assert_same_bits(checkpoint.restore(tmp_path, tx, first[0], step=3), later)
    checkpoint.save(tmp_path, tx, *first, step=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("holds", [[], ["params"], ["notes.txt"], ["params/d", "opt_state"]])
def test_a_folder_that_is_no_step_hides_none(holds, tmp_path):
    tx, first, later = two_steps(tmp_path)
    for name in ["x", *holds]:
        (tmp_path / "7" / name).mkdir(parents=True)
    (tmp_path / "7" / "x").rmdir()
    assert checkpoint.latest_step(tmp_path) == 2
    assert_same_bits(checkpoint.restore(tmp_path, tx, first[0]), later)
    with pytest.raises(ValueError, match=r"no complete checkpoint of step 7; .* \[1, 2\]"):
        checkpoint.restore(tmp_path, tx, first[0], step=7)
    with pytest.raises(ValueError, match="folder of step 7 that is not a complete"):
        checkpoint.save(tmp_path, tx, *first, step=7)
    checkpoint.save(tmp_path, tx, *first, step=3, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "7"]


def test_keep_goes_by_the_numbers_of_steps(tmp_path):
    tx, first, later = two_steps(tmp_path)
    with pytest.raises(ValueError, match=r"step 0 is older than .* \[1, 2\] .* keep=2 keeps"):
        checkpoint.save(tmp_path, tx, *first, step=0, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    checkpoint.save(tmp_path, tx, *first, step=0, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    checkpoint.save(tmp_path, tx, *first, step=3, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    assert_same_bits(checkpoint.restore(tmp_path, tx, first[0], step=2), later)
