"""The benchmark of 8-bit formats: its closed loop, its errors, its records, and a run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from benchmarks import claims, records, render
from benchmarks.claims import BETTER, NOT, SAME
from benchmarks.claims import coat as paper
from benchmarks.claims.findings import Trained
from benchmarks.suites.formats import bench as bench_formats
from benchmarks.suites.formats import errors as fe
from benchmarks.suites.formats import formats, in_torchao
from benchmarks.suites.formats import states as formats_states
from benchmarks.suites.formats import tables as formats_tables
from benchmarks.suites.formats.formats import EXACT, MU, NEAREST, NU, STOCHASTIC, Copy
from benchmarks.training import Text
from optax_lowmem import codecs
from tests.tolerances import F32_AVERAGE_STEP, LARGEST_ERROR_OF_TORCHAO

pytest.importorskip("flax")
from benchmarks.suites.formats import four_bits, training  # noqa: E402 (needs flax)

DECAYS = {MU: 0.9, NU: 0.999}


@pytest.fixture(autouse=True)
def as_users_do():
    """Models broadcast; only the library is held to explicit ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


# ---- The formats ---------------------------------------------------------------------------------


def test_copies_have_keys_and_whole_groups():
    copies = formats.copies()
    assert len({c.key for c in copies}) == len(copies) > 100
    assert [Copy.of(c.key) for c in copies] == copies
    assert all(training.LONGEST % c.group == 0 for c in copies)
    assert set(formats.stored()) < set(copies)
    assert all(set(pair) <= set(formats.stored()) for pair in formats.OPTIMIZERS.values())


def test_copies_of_four_bits():
    copies, pairs = four_bits.copies(), four_bits.compared()
    assert all(Copy.of(c.key) == c for c in copies) and len({c.key for c in copies}) == len(copies)
    small = [c for c in copies if c.codec.bits == 4]
    assert {c.bytes for c in small} == {0.5 + 2 / group for group in four_bits.GROUPS}
    assert all(c.codec.scale.dtype.itemsize == 2 for c in small)
    assert {c for pair in pairs for c in pair} == {*copies, *EXACT.values()}
    assert not set(small) & set(formats.copies()), "the tables of 8-bit formats have none of them"


@pytest.mark.parametrize("budget", formats.BUDGETS)
def test_equal_bytes(budget):
    for slot, rounding in ((MU, NEAREST), (MU, STOCHASTIC), (NU, NEAREST), (NU, STOCHASTIC)):
        found = formats.column(slot, budget, rounding)
        assert {c.bytes for c in found} == {budget}
        assert set(found) <= set(formats.copies())
        held = {c.format for c in found}
        assert formats.E4M3_X in held and (formats.FLASH_PAPER in held) == (rounding == NEAREST)


def test_what_optimizers_store():
    """The named pairs are those of the package's optimizers."""
    params = {"w": jnp.zeros((64, 256))}
    for name, build in (
        ("flash_adamw", lowmem.flash_adamw),
        ("coat_adamw", lowmem.coat_adamw),
        ("q_adamw", lowmem.q_adamw),
    ):
        mu, nu = formats.OPTIMIZERS[name]
        state = build(1e-3).init(params)
        for copy, codes, scales in (
            (mu, state.mu, state.mu_scale),
            (nu, state.nu, state.nu_scale),
        ):
            assert (codes["w"].dtype, scales["w"].dtype) == (
                copy.codec.dtype,
                copy.codec.scale.dtype,
            )
            assert scales["w"].shape == (64, 256 // copy.group), (name, copy)
    with pytest.raises(ValueError, match="does not store nu"):
        Copy(NU, formats.AFFINE, 256, NEAREST).codec  # noqa: B018


@pytest.mark.parametrize(("name", "levels", "error"), [("mu", 124, 2.0**-5), ("nu", 252, 2.0**-5)])
def test_trial_formats(name, levels, error):
    codec = getattr(formats.FORMATS[formats.FINE], name)
    assert codec.levels == levels
    x = jnp.linspace(0.05, 1, 128)[None]
    y = codecs.decode_array(codec, *codecs.encode_array(codec, x, 128), 128)
    assert float(jnp.max(jnp.abs(y / x - 1))) <= error * 1.02
    values = codec.expand(jnp.arange(1.0, levels + 1))
    assert bool(jnp.all(jnp.diff(values) > 0)) and float(values[-1]) == 1


@pytest.mark.parametrize("slot", [MU, NU])
def test_trial_formats_round_without_bias(slot):
    """After expansion too, whose odds depend on the format's bits: in units of the spacing."""
    codec = getattr(formats.FORMATS[formats.FINE_X], slot)
    x = jnp.exp(2 * jax.random.normal(jax.random.key(0), (8, 128)))
    noise = (jnp.arange(512.0)[:, None, None] + 0.5) / 512  # every share of an interval

    @jax.jit
    def decoded(x, noise):
        return codecs.decode_array(codec, *codecs.encode_array(codec, x, 128, noise), 128)

    found = jnp.stack([decoded(x, jnp.full(x.shape, n)) for n in noise[:, 0, 0]])
    spacing = jnp.max(found, axis=0) - jnp.min(found, axis=0)
    off = jnp.abs(jnp.mean(found, axis=0) - x) / jnp.maximum(spacing, 1e-6 * x)
    assert float(jnp.max(jnp.where(spacing > 1e-5 * x, off, 0))) < 0.01


# ---- The closed loop -----------------------------------------------------------------------------


def test_copies_are_an_optimizers_state():
    """The codes of a copy after some steps are those of lowmem.coat_adamw, rounded to nearest."""
    storage = lowmem.Storage(
        mu=codecs.expanded_e4m3(),
        nu=codecs.expanded_e4m3(signed=False),
        group_size=128,
        rounding=NEAREST,
    )
    params = {"w": jnp.zeros((32, 256))}
    tx = lowmem.coat_adamw(1e-3, storage=storage)
    state = tx.init(params)
    copies = formats.OPTIMIZERS["COAT"]
    stored = training.start_copies(copies, (32, 256))
    step = jax.jit(lambda *args: training.step_copies(copies, *args[:2], DECAYS, args[2]))
    for number in range(5):
        grads = 1e-3 * jax.random.normal(jax.random.key(number), (32, 256))
        _, state = tx.update({"w": grads}, state, params)
        stored = step(stored, grads, (jnp.uint32(0), jnp.int32(number)))
    for copy, codes in zip(copies, (state.mu["w"], state.nu["w"]), strict=True):
        off = np.abs(np.int32(codes) - np.int32(stored[copy.key][0]))
        assert off.max() <= 1 and (off > 0).mean() < 1e-3


def test_copies_start_at_zero():
    copies = [*formats.copies(), *four_bits.copies()]
    stored = training.start_copies(copies, (2, 512))
    for copy in copies:
        assert stored[copy.key][1].shape == (2, 512 // copy.group)
    values = jax.jit(lambda stored: training.decode_copies(copies, stored, 512))(stored)
    assert all((np.asarray(x) == 0).all() for x in values.values())


def test_noise_is_of_the_seed_and_step_and_unbiased():
    pair = formats.OPTIMIZERS["coat_adamw"]
    start = training.start_copies(pair, (64, 256))
    grads = jax.random.normal(jax.random.key(0), (64, 256))

    @jax.jit
    def after(key):
        stored = training.step_copies(pair, start, grads, DECAYS, key)
        return training.decode_copies(pair, stored, 256)[pair[0].key]

    def mu(seed, step):
        return after((jnp.uint32(seed), jnp.int32(step)))

    first = mu(0, 0)
    assert bool(jnp.all(first == mu(0, 0)))
    assert bool(jnp.any(first != mu(0, 1))) and bool(jnp.any(first != mu(1, 0)))
    mean = jnp.mean(jnp.stack([mu(0, step) for step in range(64)]), axis=0)
    error = float(jnp.linalg.norm(mean - 0.1 * grads) / jnp.linalg.norm(0.1 * grads))
    once = float(jnp.linalg.norm(first - 0.1 * grads) / jnp.linalg.norm(0.1 * grads))
    assert error < once / 5  # an eighth


def test_sample_is_rows_of_neighbours():
    tree = {"a": jnp.arange(64 * 512.0).reshape(64, 512), "b": jnp.zeros(8192),
            "c": jnp.arange(16 * 256.0).reshape(16, 256)}  # fmt: skip
    sample = training.Sample.of(tree, 5, seed=1)
    assert (sample.paths, sample.length, sample.sizes) == (("a", "c"), 256, (64 * 512, 16 * 256))
    rows = np.asarray(sample.take(tree))
    assert rows.shape == (10, 256)
    assert (np.diff(rows, axis=-1) == 1).all() and (rows[:, 0] % 256 == 0).all()
    assert len(np.unique(rows[:5, 0])) == 5
    assert sample.leaf_of_chunk.tolist() == [0] * 5 + [1] * 5
    again = training.Sample.of(tree, 5, seed=1)
    assert all((a == b).all() for a, b in zip(sample.chunks, again.chunks, strict=True))


# ---- Errors --------------------------------------------------------------------------------------


def moments(chunks=6, length=256, seed=0):
    rng = np.random.default_rng(seed)
    mu = 1e-4 * rng.normal(size=(chunks, length)) * np.exp(rng.normal(size=(chunks, 1)))
    nu = np.square(1e-4 * np.exp(rng.normal(size=(chunks, length))))
    return {MU: np.float32(mu), NU: np.float32(nu)}


def test_errors_are_those_of_each_pair():
    true, leaves, sizes = moments(), np.array([0, 0, 0, 0, 1, 1]), (1000, 3000)
    copies = [*formats.papers(MU)[:2], *formats.papers(NU)[:3]]
    exact = {copy: true[slot] for slot, copy in EXACT.items()}
    values = fe.encoded_once(true, copies) | exact
    correction = fe.Correction.after(100, DECAYS)
    found = fe.errors(true, values, leaves, sizes, correction)
    assert (len(found.mus), len(found.nus)) == (3, 4)

    def step(mu, nu):
        hat = np.float64(nu) / (1 - 0.999**100)
        return np.float64(mu) / (1 - 0.9**100) / (np.sqrt(hat) + 1e-8)

    wanted = step(true[MU], true[NU])
    for mu in found.mus:
        for nu in found.nus:
            square = (step(values[mu], values[nu]) - wanted) ** 2
            each = [square[leaves == leaf].mean() for leaf in (0, 1)]
            signal = [np.square(wanted[leaves == leaf]).mean() for leaf in (0, 1)]
            mse, nmse = found.at(mu, nu)
            assert mse == pytest.approx((each[0] + 3 * each[1]) / 4, rel=1e-6, abs=1e-13)
            assert nmse == pytest.approx(np.median(np.divide(each, signal)), rel=1e-6, abs=1e-13)
    assert found.at(*EXACT.values()) == pytest.approx((0, 0), abs=1e-13)
    part = found.select(found.mus[1:], found.nus[:1])
    assert part.at(found.mus[2], found.nus[0]) == found.at(found.mus[2], found.nus[0])


def test_spans_leave_out_zeros():
    x = np.ones((2, 256), np.float32)
    x[0, 3], x[0, 4], x[1, 128:] = 1e-3, 0, 0
    x[1, 200] = 5  # alone in its group
    assert fe.spans(x).tolist() == pytest.approx([3, 0, 0], abs=1e-6)
    counts = fe.histograms(fe.spans(x))
    assert counts["span"].sum() == counts["k"].sum() == 3
    assert fe.DECADES[counts["span"].nonzero()[0]].tolist() == pytest.approx([0, 3])


def test_the_floor_bounds_the_step():
    """An element that had a thousandth of its neighbours' gradients, long ago."""
    nu = np.full((4, 128), 1e-8, np.float32)
    nu[0, 0] = 1e-14
    mu = np.sqrt(nu)
    found = fe.floor_effect([(mu, nu)] * 2, fe.Correction(1.0, 1.0))
    assert found.keys() == fe.FLOORS.keys()
    for name in ("sqrt, paper", "sqrt, no floor"):
        lost = found[name]
        assert lost["lost_share"] == pytest.approx(1 / 512, rel=1e-6)
        assert lost["groups_share"] == pytest.approx(1 / 16, rel=1e-6)
        assert lost["largest_step"] == pytest.approx(10, rel=1e-3)  # 1e-7 / 1e-8
        assert lost["nmse"] > 100 * lost["nmse_elsewhere"]
    for name in ("sqrt", "E4M3", "DE8", "E4M3 + expansion"):
        assert found[name]["lost_share"] == 0
        assert found[name]["largest_step"] < 1.1
    assert found["E4M3, no floor"]["lost_share"] == found["sqrt, no floor"]["lost_share"]
    assert found["DE8, no floor"]["lost_share"] == 0  # it has codes seven decades down
    assert found["sqrt"]["largest_step_f32"] == pytest.approx(1, rel=1e-3)


# ---- A run ---------------------------------------------------------------------------------------


ALL = formats.column
FEW = {formats.E4M3_X, formats.FLASH, formats.FLASH_PAPER, formats.AFFINE, formats.FINE_X}


def few(slot, budget, rounding):
    """Some of the formats, at COAT's size whatever is asked: compiling takes longest."""
    return [c for c in ALL(slot, formats.BUDGETS[0], rounding) if c.format in FEW]


def shrink(patch):
    """Make gpt-3m a tiny model of a made text."""
    preset = training.PRESETS["gpt-3m"]
    shape = dataclasses.replace(preset.shape, layers=1, heads=2, width=128)
    tiny = dataclasses.replace(preset, shape=shape, context=16, batch=4)
    tokens = jnp.asarray(np.arange(5000) * 7 % 256, jnp.uint16)
    text = Text(tokens, tokens[None, None, :17], 256, 0.5, 1.0)
    patch.setitem(bench_formats.PRESETS, "gpt-3m", tiny)
    patch.setattr(bench_formats, "load_text", lambda settings, cache: text)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The command on a tiny model: its states and records."""
    folder = tmp_path_factory.mktemp("formats")
    states, rows = folder / "states.npz", folder / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patch, jax.numpy_rank_promotion("allow"):
        shrink(patch)
        patch.setattr(formats, "column", few)
        patch.setattr(formats, "copies", lambda: sorted({*formats.stored()}))
        flags = f"--preset gpt-3m --steps 60 --chunks 4 --keep 2 --states {states} --record {rows}"
        bench_formats.main(flags.split())
    stored = [json.loads(line) for line in rows.read_text().splitlines()]
    return formats_states.load(states), stored


def test_stored_states(run):
    states, _ = run
    leaves = len(states.about["paths"])
    assert leaves == 5 and states.true[MU].shape == (2 * leaves, 128)
    assert states.leaf_of_chunk.tolist() == [leaf for leaf in range(leaves) for _ in range(2)]
    assert set(states.stored) >= {c for pair in formats.OPTIMIZERS.values() for c in pair}
    assert np.isfinite(states.true[MU]).all() and (states.true[NU] > 0).mean() > 0.9
    assert states.curves["step"].tolist() == list(range(6, 61, 6))
    for slot in (MU, NU):
        assert states.histograms[f"{slot}/span"].sum() == sum(states.about["sizes"]) // 128
    held = states.errors(states.values())
    for name, pair in formats.OPTIMIZERS.items():  # copies follow the f32 state, whoever clips
        assert 1e-7 < held.at(*pair)[1] < 0.05, name
    stochastic, nearest = (formats.OPTIMIZERS[name] for name in ("coat_adamw", "COAT"))
    assert held.at(*stochastic) != held.at(*nearest)
    best = states.about["best"]
    for search, pairs in best.items():
        budget = float(search.split()[-1])
        assert len(pairs) == bench_formats.TOP
        assert all(pair["bytes"] <= 2 * budget for pair in pairs)
        mu, nu = Copy.of(pairs[0]["mu"]), Copy.of(pairs[0]["nu"])
        if "mixed" not in search:
            assert (mu.group, mu.rounding) == (nu.group, nu.rounding)
        assert "trials" in search or not {mu.format, nu.format} & set(formats.TRIALS)


def test_records_make_the_tables(run, monkeypatch):
    _, rows = run
    assert {row["bench"] for row in rows} == {"formats"}
    assert len(records.newest(rows)) == len(rows)  # none replaces another
    monkeypatch.setattr(formats, "column", few)
    for name, table in formats_tables.TABLES.items():
        if name in ("four_bits", "torchao"):
            continue  # of other commands, below
        text = table(rows)
        assert "gpt-3m" in text and "60 steps" in text, name
        assert "nan" not in text and "inf" not in text
        assert table([]) == render.NOTHING
    slots = formats_tables.TABLES["formats_slots"](rows)
    assert slots.count("\n| 0.03125 |") == slots.count("\n| 0.06250 |") == len(FEW)
    found = formats_tables.measured(rows).matrix("once at 128", "mse")
    ratio = found[formats.E5M2, formats.E4M3] / found[formats.E4M3, formats.E4M3]
    assert f"| {ratio:.2f} (1.84)" in formats_tables.TABLES["formats_paper"](rows)


def test_four_bits_make_their_table(tmp_path, monkeypatch):
    """On a tiny model: 4 bits lose more than the 8 of flash_adamw, alone and in pairs."""
    shrink(monkeypatch)
    monkeypatch.setattr(four_bits, "GROUPS", (64,))
    file = tmp_path / "rows.jsonl"
    four_bits.main(f"--preset gpt-3m --steps 30 --chunks 2 --record {file}".split())
    rows = records.load(file)
    mse = {(row["mu"], row["nu"]): row["value"] for row in rows if row["metric"] == "mse"}
    eight = tuple(copy.key for copy in formats.OPTIMIZERS[four_bits.BASE])
    exact = {slot: copy.key for slot, copy in EXACT.items()}
    for (mu, nu), value in mse.items():
        if "4 bits" in mu:
            assert value > 5 * mse[eight[0], exact[NU]]
        if "4 bits" in nu:
            assert value > 5 * mse[exact[MU], eight[1]]
    text = formats_tables.TABLES["four_bits"](rows)
    assert text.count("| f32 |") == len(four_bits.copies())
    assert text.count("| 1.0625 |") == 1 + len(formats.FOUR_BITS) ** 2  # m in 8 bits, and pairs
    assert "nan" not in text and "inf" not in text


def test_gradients_are_those_of_the_closed_loop(monkeypatch):
    """Averages of what peers are given are the f32 moments that all errors are over."""
    shrink(monkeypatch)
    args = four_bits.command_line("").parse_args("--preset gpt-3m --steps 60 --chunks 2".split())
    made, seen = bench_formats.make_experiment(args, gradients=True, copies=[]), []
    made.train_copies(lambda snapshot, _: seen.append(snapshot), bench_formats.CALLS, print)
    grads = np.concatenate([snapshot.gradients for snapshot in seen])
    assert len(grads) == seen[-1].step == 60
    for slot, decay in made.decays.items():
        moment = np.zeros(grads.shape[1:])
        for g in np.float64(grads):
            moment = decay * moment + (1 - decay) * (g if slot == MU else g * g)
        off, most = np.abs(seen[-1].true[slot] - moment), np.abs(moment).max()
        assert most > 0 and off.max() <= len(grads) * F32_AVERAGE_STEP * most


def test_what_is_measured_beside_torchao():
    """Ours by name are the storages of those names."""
    for name, pair in four_bits.OURS.items():
        if not name.startswith("Storage"):
            continue
        storage = eval(name, {"Storage": lowmem.Storage, "codecs": codecs})
        assert tuple(c.codec for c in pair) == (storage.mu, storage.nu)
        both = {"nu": (NEAREST, STOCHASTIC)}.get(storage.rounding, (storage.rounding,) * 2)
        assert tuple(c.rounding for c in pair) == both
        assert {c.group for c in pair} == {storage.group_size}


def test_torchao_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(in_torchao.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="torch is not installed: pip install torch torchao"):
        four_bits.main(["--torchao"])


class Rounds:
    """A peer that keeps bfloat16 moments, with what `four_bits` asks of torchao's."""

    label, version = "rounds", "rounds 1"

    def __init__(self, name, shape, decays):
        self.decays, self.kept = decays, {slot: jnp.zeros(shape, jnp.bfloat16) for slot in decays}

    def follow(self, gradients):
        for g in map(jnp.asarray, gradients):
            for slot, decay in self.decays.items():
                new = decay * self.kept[slot].astype(jnp.float32)
                new += (1 - decay) * (g if slot == MU else g * g)
                self.kept[slot] = new.astype(jnp.bfloat16)

    def values(self):
        return {
            Copy(slot, "bf16", 1, NEAREST): np.asarray(x, np.float32)
            for slot, x in self.kept.items()
        }

    def bytes(self):
        return [2.0, 2.0]


def test_peers_are_in_a_table_by_bytes(tmp_path, monkeypatch):
    """On a tiny model, bf16 beside codes: more bytes, less error, first in the table."""
    shrink(monkeypatch)
    monkeypatch.setattr(in_torchao, "missing_reason", lambda: None)
    monkeypatch.setattr(in_torchao, "CLASSES", ("Rounds",))
    monkeypatch.setattr(in_torchao, "Peer", Rounds)
    file = tmp_path / "rows.jsonl"
    run = f"--preset gpt-3m --steps 30 --chunks 2 --torchao --record {file}"
    four_bits.main(run.split())
    rows = records.load(file)
    assert {row["impl"] for row in rows} == {"rounds", *four_bits.OURS}
    mse = {row["impl"]: row["value"] for row in rows if row["metric"] == "mse"}
    assert 0 < mse["rounds"] < min(mse[name] for name in four_bits.OURS)
    lines = formats_tables.TABLES["torchao"](rows).splitlines()
    assert lines[2].startswith("| rounds (rounds 1) | bf16, groups of 1, nearest |")
    sizes = [float(line.split(" | ")[3]) for line in lines[2 : 3 + len(four_bits.OURS)]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 4 and min(sizes) < 1.0625
    assert "four_bits --torchao --record" in formats_tables.TABLES["torchao"]([])


@pytest.mark.filterwarnings("ignore")  # torch warns of its own modules while it compiles
def test_torchaos_moments():
    """Its own classes: bytes of codes and f32 scales, and averages that 4 bits blur."""
    pytest.importorskip("torchao", reason="torchao and torch are not installed")
    gradients = np.random.default_rng(0).normal(size=(3, 16, 256)).astype(np.float32)
    for name, bits, block in (("AdamW4bit", 4, 128), ("AdamW8bit", 8, 256)):
        peer = in_torchao.Peer(name, gradients.shape[1:], DECAYS)
        peer.follow(gradients)
        assert peer.bytes() == [bits / 8 + 4 / block] * 2
        (mu, m), (nu, v) = peer.values().items()
        assert (mu.group, nu.group, mu.format) == (block, block, f"torchao's map of {2**bits}")
        true = 0.1 * (0.81 * gradients[0] + 0.9 * gradients[1] + gradients[2])
        off = np.abs(m - true).max() / np.abs(true).max()
        assert off <= LARGEST_ERROR_OF_TORCHAO[bits] and v.min() >= 0
    small = in_torchao.Peer("AdamW4bit", (2, 256), DECAYS)
    small.follow(gradients[:1, :2])
    with pytest.raises(SystemExit, match="sample more with --chunks"):
        small.values()


def test_the_run_wants_whole_calls():
    with pytest.raises(SystemExit, match="not a multiple"):
        bench_formats.make_experiment(bench_formats.parse_arguments(["--steps", "100"]))


# ---- The claims ----------------------------------------------------------------------------------


def made(matrix, **spans):
    """Records of a matrix of errors, and of what groups span."""
    about = {"bench": "formats", "device": "a GPU", "jax": "1", "commit": "c", "seed": 0}
    flags = {"parameters": 1, "steps": 1}
    rows = [
        about
        | {"case": "gpt-42m/once at 128", "impl": mu, "metric": "mse", "value": 0.0}
        | {"flags": flags, "over": {v: e for (m, v), e in matrix.items() if m == mu}}
        for mu in dict.fromkeys(m for m, _ in matrix)
    ]
    values = {"mu_over_1e4": 0.01, "nu_over_1e1": 0.01, "mu_p5": 2.0, "mu_p50": 3.0, "mu_p95": 4.0,
              "nu_p5": 0.4, "nu_p50": 0.6, "nu_p95": 1.0} | spans  # fmt: skip
    for key, value in values.items():
        slot, metric = key.split("_", 1)
        rows.append(about | {"case": "gpt-42m/spans", "impl": slot, "metric": metric,
                             "value": value, "flags": flags})  # fmt: skip
    return rows


@pytest.fixture
def matrix():
    """The paper's errors, and the two pairs that it does not print."""
    missing = {(mu, nu): 20.0 for mu in ("E4M3", "E5M2", "E5M2 + expansion")
               for nu in ("DE8", "DE8 + expansion")}  # fmt: skip
    return dict(paper.PAPER) | missing


def verdicts(rows):
    return {claim.where: claim.finding(rows).verdict for claim in paper.CLAIMS}


def test_the_papers_own_tables_are_the_same(matrix):
    found = verdicts(made(matrix))
    assert len(found) == len(paper.CLAIMS)
    left = {where for where, verdict in found.items() if verdict != SAME}
    assert left == {claim.where for claim in paper.CLAIMS if isinstance(claim.how, str | Trained)}
    assert set(verdicts([]).values()) == {claims.NOT_MEASURED, claims.NOT_TRIED}


@pytest.mark.parametrize(
    ("where", "change", "verdict"),
    [
        ("§4.2, expansion of E4M3 for both", {("E4M3", "E4M3"): 40.0}, BETTER),
        ("§4.2, expansion of E4M3 for both", {("E4M3", "E4M3"): 13.0}, NOT),
        ("Table 1, expansion of E4M3 for m", {("E4M3 + expansion", "E5M2"): 26.0}, NOT),
        ("Table 1, expansion of E5M2 for v", {("DE8", "E5M2 + expansion"): 20.1}, NOT),
        ("Table 9, DE8 for v", {("DE8", "DE8 + expansion"): 10.0}, NOT),
        ("Table 1, m", {("E5M2", "E4M3"): 19.0}, NOT),
        ("Table 1, v", {("DE8", "E5M2 + expansion"): 9.0}, NOT),
        ("Table 9, the lowest error", {("DE8", "DE8"): 1.0}, NOT),
        ("Tables 1 and 9", {("E4M3", "E4M3"): 1.0, ("E5M2", "E5M2"): 2.0}, NOT),
    ],
)
def test_other_errors_are_not(matrix, where, change, verdict):
    assert verdicts(made(matrix | change))[where] == verdict


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("Figure 2a, v", {"nu_over_1e1": 0.64}),
        ("Figure 2a, m", {"mu_over_1e4": 0.2}),
        ("Figure 2c, k of v", {"nu_p50": 1.3}),
        ("Figure 2c, k of m", {"mu_p50": 6.0}),
    ],
)
def test_other_spans_are_not(matrix, where, change):
    assert verdicts(made(matrix, **change))[where] == NOT


def test_the_run_that_was_stored_last_speaks(matrix):
    rows = made(matrix)
    other = [row | {"device": "cpu-2-cores"} for row in made(matrix | {("E4M3", "E4M3"): 99.0})]
    where = "§4.2, expansion of E4M3 for both"
    assert (verdicts(other + rows)[where], verdicts(rows + other)[where]) == (SAME, BETTER)
