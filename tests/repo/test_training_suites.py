"""The training suites at their smallest, the claims that their records decide, and resuming."""

import dataclasses
import importlib
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax.nnx")

from benchmarks import claims, curves, records, render, run, tables  # noqa: E402
from benchmarks import training as shared  # noqa: E402
from benchmarks.claims import BETTER, NOT, SAME, UNDECIDED, equivalence, findings  # noqa: E402
from benchmarks.claims import flashoptim as flashoptim_claims  # noqa: E402
from benchmarks.suites import spikes  # noqa: E402
from benchmarks.suites.activations import bench as activations  # noqa: E402
from benchmarks.suites.flashoptim import bench as flashoptim  # noqa: E402
from benchmarks.suites.formats import bench as formats_bench  # noqa: E402
from benchmarks.suites.formats import errors as fe  # noqa: E402
from benchmarks.suites.formats import formats, four_bits  # noqa: E402
from benchmarks.suites.formats import tables as formats_tables  # noqa: E402
from benchmarks.suites.formats import training as formats_training  # noqa: E402
from benchmarks.suites.formats.formats import EXACT, MU, NU  # noqa: E402
from benchmarks.suites.gaussws import bench as gaussws_bench  # noqa: E402
from benchmarks.suites.gaussws import training as gaussws  # noqa: E402
from benchmarks.suites.pairs import budgets, muon, sizes, spread, states  # noqa: E402
from benchmarks.suites.pairs import training as pairs  # noqa: E402
from benchmarks.suites.switchback import bench as switchback_bench  # noqa: E402
from benchmarks.suites.switchback import training as switchback  # noqa: E402
from optax_lowmem import codecs  # noqa: E402
from tests.claims_cases import GPU, made  # noqa: E402
from tests.tolerances import SPIKE_CURVES, STANDARD_ERRORS  # noqa: E402
from tests.training_cases import as_users_do as as_users_do  # noqa: E402 (a fixture)
from tests.training_cases import text_for  # noqa: E402


# ---- every suite at its smallest -----------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Smoke:
    """A training suite: two variants, the baseline first, and a paper whose claims they decide."""

    suite: str
    words: str
    variants: tuple[str, ...]
    paper: str
    patches: tuple = ()  # (object, attribute, value)


SUITES = [
    Smoke("activation_training", "--preset smoke", ("standard", "fp8-coat_adamw"), ""),
    Smoke("gaussws", "--preset smoke --part run", (gaussws.BASE, gaussws.OD), "gaussws",
          ((gaussws_bench, "FORMATS", ()),)),
    Smoke("switchback", "--preset smoke --part run variance", ("standard", "switchback-int8"),
          "switchback"),
    Smoke("adam_mini", "--preset smoke --steps 10", ("adam_mini", "q_adam_mini"), "q_adam_mini"),
    Smoke("pairs", "--preset smoke-gpt2 --folder kept", ("adamw", "flash_adamw"), ""),
    Smoke("pairs", "--preset smoke-gpt --folder kept",
          ("adamw", "stable_adamw", "adam_mini", "q_adam_mini"), ""),
]  # fmt: skip


@pytest.mark.parametrize("smoke", SUITES, ids=lambda smoke: smoke.suite)
def test_a_suite_trains(smoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shared, "load_text", lambda run, cache: text_for(run.context))
    for thing, name, value in smoke.patches:
        monkeypatch.setattr(thing, name, value)
    words = [*smoke.words.split(), "--variants", *smoke.variants]
    run.suite(smoke.suite)([*words, "--curves", "curves.npz", "--record", "rows.jsonl"])
    rows = records.load(tmp_path / "rows.jsonl")
    assert len(records.newest(rows)) == len(rows)  # none replaces another
    found = curves.load(tmp_path / "curves.npz").runs
    ends = {row["impl"]: row["value"] for row in rows if row["metric"] == "val_loss"}
    assert ends.keys() == set(smoke.variants) and len(found) == len(ends)
    for label, of in found.items():
        name = label.rpartition("/")[2].partition(" seed ")[0]
        assert ends[name] == pytest.approx(float(of["val_loss"][-1]), rel=1e-5)
        assert of["val_loss"][-1] < of["val_loss"][0] - 0.05
    if smoke.paper:
        paper = importlib.import_module(f"benchmarks.claims.{smoke.paper}")
        body, used = claims.table([row | {"device": GPU} for row in rows], paper.CLAIMS)
        assert used and {verdict for *_, verdict in body} & {SAME, BETTER, NOT, UNDECIDED}


ALL = formats.column
FEW = {formats.E4M3_X, formats.FLASH, formats.FLASH_PAPER, formats.AFFINE, formats.FINE_X}


def few(slot, rounding):
    """Some of the formats: compiling takes longest."""
    return [c for c in ALL(slot, rounding) if c.format in FEW]


@pytest.fixture
def gpt_3m(monkeypatch):
    """Make gpt-3m a tiny model of a made text."""
    preset = formats_training.PRESETS["gpt-3m"]
    shape = dataclasses.replace(preset.shape, layers=1, heads=2, width=128)
    tiny = dataclasses.replace(preset, shape=shape, context=16, batch=4)
    monkeypatch.setitem(formats_bench.PRESETS, "gpt-3m", tiny)
    monkeypatch.setattr(formats_bench, "load_text", lambda settings, cache: text_for(16))


def test_formats_make_their_tables(gpt_3m, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "column", few)
    kept = {copy for pair in formats.OPTIMIZERS.values() for copy in pair}
    for slot, how in itertools.product((MU, NU), (formats.NEAREST, formats.STOCHASTIC)):
        kept |= {*few(slot, how)}
    monkeypatch.setattr(formats, "copies", lambda: sorted(kept))
    file = tmp_path / "rows.jsonl"
    formats_bench.main(f"--preset gpt-3m --steps 60 --chunks 4 --record {file}".split())
    rows = records.load(file)
    assert len(records.newest(rows)) == len(rows)
    for name, table in formats_tables.TABLES.items():
        if name != "four_bits":
            text = table(rows)
            assert "gpt-3m" in text and "nan" not in text and "inf" not in text, name
            assert table([]) == render.NOTHING


def test_four_bits_make_their_table(gpt_3m, tmp_path):
    """4 bits lose more than the 8 of flash_adamw."""
    file = tmp_path / "rows.jsonl"
    four_bits.main(f"--preset gpt-3m --steps 30 --chunks 2 --record {file}".split())
    rows = records.load(file)
    mse = {(row["mu"], row["nu"]): row["value"] for row in rows if row["metric"] == "mse"}
    eight = tuple(copy.key for copy in formats.OPTIMIZERS[four_bits.BASE])
    exact = {slot: copy.key for slot, copy in EXACT.items()}
    for (mu, nu), value in mse.items():
        assert "4 bits" not in mu or value > 5 * mse[eight[0], exact[NU]]
        assert "4 bits" not in nu or value > 5 * mse[exact[MU], eight[1]]
    text = formats_tables.TABLES["four_bits"](rows)
    assert text.count("\n|") == 5 and "nan" not in text


def test_errors_of_states_are_those_of_each_pair():
    rng, decays = np.random.default_rng(0), {MU: 0.9, NU: 0.999}
    true = {MU: np.float32(1e-4 * rng.normal(size=(6, 256))),
            NU: np.float32(np.square(1e-4 * np.exp(rng.normal(size=(6, 256)))))}  # fmt: skip
    leaves, sizes = np.array([0, 0, 0, 0, 1, 1]), (1000, 3000)
    copies = (*formats.papers(MU)[:2], *formats.papers(NU)[:3])
    values = fe.encoded_once(true, copies)
    found = fe.errors(true, values, leaves, sizes, fe.corrections(100, decays))
    values |= {copy: true[slot] for slot, copy in EXACT.items()}

    def step(mu, nu):
        hat = np.float64(nu) / (1 - 0.999**100)
        return np.float64(mu) / (1 - 0.9**100) / (np.sqrt(hat) + 1e-8)

    wanted = step(true[MU], true[NU])
    assert len(found) == (2 + 1) * (3 + 1)
    for (mu, nu), (mse, _) in found.items():
        square = (step(values[mu], values[nu]) - wanted) ** 2
        each = [square[leaves == leaf].mean() for leaf in (0, 1)]
        assert mse == pytest.approx((each[0] + 3 * each[1]) / 4, rel=1e-6, abs=1e-13)


def test_spikes_are_trained_and_recorded(tmp_path, monkeypatch):
    """With the weights, batches and losses of the stored curves, in their first steps."""
    monkeypatch.setattr(spikes, "IGNORE", 10)
    steps, file = 20, tmp_path / "rows.jsonl"
    monkeypatch.setattr(spikes, "grid", lambda steps: [(spikes.Run(steps=steps), [(0.005, 0.999)])])
    words = f"--seeds 1 --steps {steps} --curves {tmp_path / 'curves.npz'} --record {file}"
    spikes.main(words.split())
    rows, label = records.load(file), f"adamw/{spikes.point()}"
    assert {row["metric"] for row in rows} >= {"loss_spikes", "embedding_predicts", "last_loss"}
    with np.load(tmp_path / "curves.npz") as found:
        ours, stored = np.float64(found[label]), spikes.stored()[label][:, :1, :steps]
    assert ours.shape == stored.shape
    np.testing.assert_allclose(ours, stored, rtol=SPIKE_CURVES)


def test_spikes_decide_their_claims():
    """Spikes of AdamW at b2 = 0.999 that follow those of the embedding by two steps."""
    noise = np.random.default_rng(0).normal(size=(3, 1600))
    calm = np.stack([2 + 0.01 * noise, np.ones_like(noise), np.ones_like(noise)])
    spiking = calm.copy()
    for at in range(1100, 1500, 150):
        spiking[1, :, at] = spiking[2, :, at + 60] = 5
        spiking[0, :, at + 2 : at + 6] += 1
    rows = []
    for name in spikes.stored():
        spikes_here = "b2=0.999" in name and not name.startswith("stable_adamw")
        rows += spikes.summary(name, spiking if spikes_here else calm)
    paper = importlib.import_module("benchmarks.claims.stable_adamw")
    body, _ = claims.table(rows, paper.CLAIMS)
    found = {line[0]: line[-1] for line in body}
    assert found["§3.4, Figures 4, 15 and 16"] == found["Figure 20, a middle layer"] == SAME
    assert found["§3.5, Figure 5, update clipping"] == SAME
    assert found["Figure 5, gradient clipping at norm 1"] == NOT  # it spikes


def test_flashoptims_figure_3(tmp_path):
    flashoptim.main(["--samples", str(2**10), "--record", str(tmp_path / "rows.jsonl")])
    rows = records.load(tmp_path / "rows.jsonl")
    found = [c for c in flashoptim_claims.CLAIMS if c.where.startswith("Figure 3")]
    assert [claim.finding(rows).verdict for claim in found] == [SAME] * 2
    for impl, target in {(row["impl"], row["case"]) for row in rows if "ulp" in row["impl"]}:
        wrong = [r | {"value": 1e-3} if (r["impl"], r["case"]) == (impl, target) else r
                 for r in rows]  # fmt: skip
        verdicts = [claim.finding(wrong).verdict for claim in found]
        assert (NOT in verdicts) == (impl in ("ulp-32", "ulp-24")), (impl, target)


def test_flashoptims_figure_4():
    """The NMSE of each leaf of whole groups, as NumPy finds it; NaN where a moment is 0."""
    m = {"a": jnp.arange(1.0, 65).reshape(2, 32), "b": jnp.zeros((1, 32)), "c": jnp.ones(3)}
    state = optax.ScaleByAdamState(jnp.int32(1), m, optax.tree.zeros_like(m))
    found = states.errors(state)
    assert found.keys() == {f"nmse {slot} {codec}, paper" for slot in "mv"
                            for codec in ("linear", "companded")}  # fmt: skip
    codec, x = codecs.softsign_paper(), np.float64(m["a"])
    wrong = np.float64(codec.decode(*codec.encode(m["a"]))) - x
    wanted = (wrong**2).sum() / (x**2).sum()
    np.testing.assert_allclose(found["nmse m companded, paper"], [wanted, np.nan], rtol=1e-5)
    assert np.isnan(found["nmse v linear, paper"]).all()


@pytest.mark.parametrize("kind,codes", [("cudnn", 10 + 3 / 192), ("xla", 9.5)])
def test_units_of_activations(kind, codes):
    """COAT's shape, in its units: codes, and 0.46 of scales; cuDNN keeps two arrays more."""
    row = activations.kept(activations.PAPER, "fp8-flow", kind)[1]
    assert row["value"] == pytest.approx(codes + 11 / 3 / 8, abs=1e-4)
    assert sum(row["columns"].values()) == pytest.approx(row["value"])


@pytest.mark.parametrize("product", switchback_bench.PRODUCTS)
def test_equation_12_of_switchback(product):
    """The variance of an error is what its quantizers' variances make of it, and grows."""
    short, long = (switchback_bench.spread(product, n) for n in (256, 2048))
    for found in (short, long):
        assert found["error"] == pytest.approx(found["predicted"], rel=0.05)
    assert 8 < long["error"] / short["error"] < 16  # the length, and its maxima


def muon_runs(rule, impl, ends, rate, steps, ms):
    """Final losses by seed of runs of 2,000 tokens a step."""
    name, value = f"gpt-42m-muon lr={rate:g}/{rule}", 2e6 / ms
    name = name if steps == 3000 else name.replace(" ", f" steps={steps} ")
    flags = {"preset": "gpt-42m-muon", "steps": steps, "rates": {rule: rate}, "tokens": 2000}
    for seed, end in enumerate(ends):
        for metric, found in (("val_loss", end), ("tokens_per_s", value)):
            yield made("pairs", name, impl, metric, found, seed=seed, flags=flags)


MUON_RUNS = [
    *muon_runs("adam", "adamw", [3.0, 4.0], 4e-3, 3000, 4.0),
    *muon_runs("adam", "adamw", [2.9], 2e-3, 3000, 7.0),
    *muon_runs("muon", "flash_muon", [2.5, 3.5], 8e-3, 3000, 5.0),
    *muon_runs("muon", "flash_muon", [2.4], 4e-3, 3000, 7.0),
    *muon_runs("muon", "flash_muon", [3.5, 4.5], 8e-3, 1000, 7.0),
    *muon_runs("muon", "flash_muon-turbo", [3.0, 4.0], 8e-3, 3000, 4.5),
]


def test_steps_of_muon_to_a_loss():
    """Halfway between the losses of 1,000 and 3,000 steps: 3,000 / sqrt(3) steps."""
    found = muon.race(MUON_RUNS, muon.PRESET)
    assert found.rates == (4e-3, 8e-3) and found.plain == {0: 3.0, 1: 4.0}
    assert found.steps == pytest.approx([3**-0.5] * 2)
    assert found.seconds == pytest.approx([1.25 * 3**-0.5] * 2)
    ((says, *rest),) = muon.to_a_loss(MUON_RUNS)[1]
    assert says == "GPT, 42M weights" and rest[-2:] == ["58 % (58 to 58)", "72 % (72 to 72)"]
    # one more length of one seed changes that seed's alone
    more = muon_runs("muon", "flash_muon", [3.0], 8e-3, 2000, 5.0)
    assert muon.race([*MUON_RUNS, *more], muon.PRESET).steps == pytest.approx([2 / 3, 3**-0.5])
    high = [row | {"value": 9.0} for row in MUON_RUNS if row["impl"] == "adamw"]
    assert muon.to_a_loss([*MUON_RUNS, *high])[1] == []  # no length of Muon's has such a loss


def test_rates_and_forms_of_muon():
    assert [line[2] for line in muon.by_rate(MUON_RUNS)[1]] == [
        "0.002: 2.900, 0.004: 3.000", "0.004: 2.400, 0.008: 2.500"]  # fmt: skip
    ((says, seeds, means, over, ms),) = muon.forms(MUON_RUNS)[1]
    assert (says, seeds, ms) == ("four iterations (`turbo`)", "2", "4.50")
    assert means == "3.0000 → 3.5000" and over.startswith("+16.67 %")
    assert muon.forms([])[1] == muon.by_rate([])[1] == muon.to_a_loss([])[1] == []


# ---- the runner ----------------------------------------------------------------------------------
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """Cut off between two states that it keeps, then stopped by its limit, then ended."""
    monkeypatch.setattr(shared, "load_text", lambda run, cache: text_for(run.context))

    def words(name):
        at = tmp_path / name
        return f"--preset smoke-gpt2 --folder {at} --curves {at}.npz --record {at}.jsonl".split()

    def until(count):
        left = iter(range(count))

        def some(*args, _calls=shared.calls):
            for one in _calls(*args):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                yield one

        with monkeypatch.context() as patch:
            patch.setattr(shared, "SAVE_SECONDS", -1)
            patch.setattr(shared, "calls", some)
            with pytest.raises(KeyboardInterrupt):
                pairs.main(words("cut"))

    cut = tmp_path / "cut/pairs-smoke-gpt2-adam"

    def kept():
        return {path.name for path in cut.iterdir()}

    pairs.main(words("whole"))
    until(3)  # before the fourth call is kept
    assert kept() == {"adamw seed 0.npz"}
    assert len(curves.read(cut / "adamw seed 0.npz")[1]["step"]) == 3
    until(7)  # the other's second
    assert kept() == {"adamw seed 0.ended", "flash_adamw seed 0.npz"}
    pairs.main([*words("cut"), "--limit", "0"])
    assert len(curves.read(cut / "flash_adamw seed 0.npz")[1]["step"]) == 3
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="choose another --folder"):
        other = dataclasses.replace(pairs.PRESETS["smoke-gpt2"], floor=0.1)
        patch.setitem(pairs.PRESETS, "smoke-gpt2", other)
        pairs.main(words("cut"))
    pairs.main(words("cut"))
    assert kept() == {"adamw seed 0.ended", "flash_adamw seed 0.ended"}
    one, other = (curves.load(tmp_path / f"{name}.npz").runs for name in ("whole", "cut"))
    assert one.keys() == other.keys() == {"adamw seed 0", "flash_adamw seed 0"}
    for name, of in one.items():
        for metric in ("train_loss", "val_loss", "val_groups"):
            np.testing.assert_array_equal(of[metric], other[name][metric])


def test_bf16_is_kept_bit_for_bit(tmp_path):
    kept = shared.Kept(tmp_path / "kept.npz", {"steps": 1}, 0.0)
    tree = {"a": jnp.arange(7, dtype=jnp.bfloat16) / 3, "b": jnp.uint32(5), "c": jnp.ones((2, 0))}
    kept.write({"step": [1, 2]}, tree)
    found, restored = kept.read(tree)
    assert found == {"step": [1, 2]}
    jax.tree.map(np.testing.assert_array_equal, restored, tree)
    with pytest.raises(SystemExit, match="choose another --folder"):
        kept.read(tree | {"b": jnp.float32(5)})


def test_curves_are_kept_by_settings(tmp_path):
    file, one = tmp_path / "curves.npz", {"step": np.arange(3), "loss": np.array([1.5, np.nan, 2])}
    about = {"steps": 3, "betas": (0.9, 0.95)}  # a tuple is read back as a list
    here = {"device": "this GPU", "commit": "abc"}
    curves.Curves(about, {"a": one}).save(file)
    curves.Curves(about | here, {"b seed 0": one}).save(file)
    found = curves.load(file)
    assert found.runs.keys() == {"a", "b seed 0"}
    assert found.about["merged"] == [here | {"variants": ["b"]}]
    np.testing.assert_array_equal(found.runs["a"]["loss"], np.float32(one["loss"]))
    curves.store(file, None, {"steps": 4}, {"b": one})  # of other settings
    assert curves.load(file).runs.keys() == {"b"}
    parts = tmp_path / "parts.npz"
    for part, name in (("run", "a"), ("large", "a"), ("run", "b")):
        curves.store(parts, part, {"steps": len(part)}, {name: one})
    assert curves.load(parts).runs.keys() == {"run/a", "run/b", "large/a"}


def test_a_diverged_run_ends():
    preset = switchback.PRESETS["smoke"]["run"]
    experiment = switchback.Experiment(preset, text_for(preset.context), seed=0)
    sizes_of_features = jnp.ones(preset.shape.layers + 1)

    def diverges(params, state, tokens, starts):
        return params, state, {"train_loss": jnp.nan}

    evaluate = lambda *_: (jnp.nan, sizes_of_features)  # noqa: E731
    of = experiment.follow(lambda: (None, None), diverges, evaluate, print)[0]
    assert of["step"].tolist() == [5] and np.isnan(of["val_loss"][-1])


def test_no_run_starts_too_late(monkeypatch, capsys):
    monkeypatch.setattr(shared, "load_text", lambda run, cache: text_for(run.context))
    traced = shared.Program(None, None, None, 1)
    monkeypatch.setattr(switchback.Experiment, "lower", lambda experiment, name: traced)
    monkeypatch.setattr(shared.Program, "compile", lambda program: ())
    run.suite("switchback")("--preset smoke --variants standard llm_int8 --limit 0".split())
    assert "llm_int8 is left out after" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="not a multiple"):
        run.suite("switchback")("--preset smoke --steps 7".split())


def test_losses_by_bytes_make_their_table():
    report = sizes.report(budgets.PRESET, "flash_adamw")
    expected = 2 + 1 + (1 + 2 / 32) + (1 + 4 / 32)  # weights, corrections, codes with scales
    assert expected <= report.bytes_per_param < expected + 9 * 0.002  # vectors are in f32
    sized = {"adamw": 12.0, "flash_adamw": 5.19, "flash_adamw-four-bit": 4.06}
    off = {"adamw": (0, 0, 0), "flash_adamw": (1e-3, 0, 2e-3),
           "flash_adamw-four-bit": (0, 0.03, 0)}  # fmt: skip
    rows = [made("memory", budgets.CASE, own[0], "total", own[1], says=own[0])
            for own in sized.items()]  # fmt: skip
    for name in sized:
        rows += list(paired(budgets.CASE, [], [3.0 + 0.1 * i + x for i, x in enumerate(off[name])],
                            ours=name))  # fmt: skip
    text = budgets.TABLES["budget_losses"](rows)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:5]]
    assert [line[0] for line in lines] == list(sized)
    assert [line[-1] for line in lines[1:]] == [SAME, UNDECIDED]
    assert "nan" not in spread.TABLES["pair_losses"](rows)


# ---- what decides a claim ------------------------------------------------------------------------
def verdict_of(where, rows):
    (found,) = [c.finding(rows) for c in flashoptim_claims.CLAIMS if c.where == where]
    return found


def paired(case, plain, ours_losses, bench="pairs", base="adamw", ours="flash_adamw"):
    flags = {"parameters": 124_000_000, "steps": 1600, "batch": 128, "context": 1024}
    for name, values in ((base, plain), (ours, ours_losses)):
        for seed, value in enumerate(values):
            yield made(bench, case, name, "val_loss", value, seed=seed, flags=flags)


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.01, -0.02, 0.0, 0.03], SAME),
        ([0.3, 0.31, 0.29, 0.3], NOT),
        ([-0.3, -0.31, -0.29, -0.3], BETTER),
        ([0.3, -0.2, 0.1, 0.0], UNDECIDED),  # the mean is within the margin, the interval is not
        ([0.08, 0.09, 0.11, 0.12], UNDECIDED),  # on the margin
        ([0.0], UNDECIDED),
        ([math.nan, 0.0], NOT),
        ([math.inf, 0.0], NOT),
    ],
)
def test_equivalence(differences, verdict):
    """Each answer there is; around a claimed difference they are the same ones."""
    margin, interval = equivalence.Margin(0.1), equivalence.Interval.of(differences)
    assert interval.verdict(margin) == verdict
    turned = {NOT: BETTER, BETTER: NOT}.get(verdict, verdict)
    if math.isfinite(sum(differences)):
        assert interval.verdict(margin, lower_is_better=False) == turned
    moved = equivalence.Interval.of([x + 0.4 for x in differences])
    assert moved.verdict(equivalence.Margin(0.1, claimed=0.4)) == verdict


def test_an_interval_is_students():
    """Of 2,000 samples of 4, nine in ten have the mean in it."""
    samples = np.random.default_rng(0).normal(0.05, 0.1, (2000, 4))
    found = [equivalence.Interval.of(list(one)) for one in samples]
    assert abs(np.mean([one.low <= 0.05 <= one.high for one in found]) - 0.9) < 0.02


@pytest.mark.parametrize("wanted", [0.8, 0.9])
def test_power_is_the_share_of_samples_that_are_found_the_same(wanted):
    margin, rng = equivalence.Margin(0.15), np.random.default_rng(0)
    count = equivalence.pairs_needed(0.2, margin, wanted)
    power = equivalence.power(count, 0.2, margin)
    assert equivalence.power(count - 1, 0.2, margin) < wanted <= power
    samples = rng.normal(0, 0.2, (4000, count))
    found = [equivalence.Interval.of(list(one)).verdict(margin) == SAME for one in samples]
    assert abs(np.mean(found) - power) <= STANDARD_ERRORS * (power * (1 - power) / 4000) ** 0.5


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [([3.0, 3.1, 3.2], SAME), ([3.002, 3.102, 3.202], SAME), ([3.01, 3.11, 3.21], NOT),
     ([2.99, 3.09, 3.19], BETTER), ([3.06, 3.06, 3.24], UNDECIDED), ([3.0, 3.1, math.nan], NOT),
     ([3.0], UNDECIDED)],
)  # fmt: skip
def test_training(ours, verdict):
    found = verdict_of("Table 3, GPT-2 124M, AdamW",
                       list(paired("gpt2-124m/adam", [3.0, 3.1, 3.2], ours)))  # fmt: skip
    assert found.verdict == verdict and len(found.rows) == 2 * len(ours)
    assert (claims.ONE_SEED in found.scale) == (len(ours) == 1)
    apart = [r | {"device": r["impl"]} for r in paired("gpt2-124m/adam", [3.0] * 2, [3.0] * 2)]
    assert not list(findings.paired(apart, "gpt2-124m/adam", "val_loss", "adamw", "flash_adamw"))


@pytest.mark.parametrize(
    ("ours", "needs"),
    # ((1.64 + 1.28) 0.22 % / 0.1 %)^2 = 42, and three more by Student's t
    [([3.0, 3.1, 3.2], ""), ([3.012, 3.1, 3.2], "45 seeds")],
)
def test_an_undecided_row_says_how_many_seeds_it_needs(ours, needs):
    rows = paired("gpt2-124m/adam", [3.0, 3.1, 3.2], ours)
    text = verdict_of("Table 3, GPT-2 124M, AdamW", list(rows)).measured
    assert text.partition("; needs ")[2] == needs


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [(0.0, 0.0, SAME), (0.0, -0.3, SAME), (-0.3, -0.3, BETTER), (0.3, -0.3, NOT)],
)
def test_the_worst_of_several_results_decides(first, second, verdict):
    plain = [3.0, 3.1, 3.2]
    rows = [*paired("gpt/adam", plain, [x + first for x in plain], ours="one"),
            *paired("gpt/adam", [], [x + second for x in plain], ours="other")]  # fmt: skip
    named = {name: findings.Trained("gpt/adam", "adamw", name, bench="pairs")
             for name in ("one", "other")}  # fmt: skip
    assert findings.Several(named)(rows).verdict == verdict


def test_a_table_of_claims_repeats_no_cell_and_lists_what_was_not_measured():
    claimed = [("1", "a claim", "x 2", "one run", "", SAME), ("2", "a claim", "x 2", "", "", NOT),
               ("3", "too large", "needs a cluster", "", "", claims.NOT_TRIED)]  # fmt: skip
    assert claims.shown("Paper", claimed).splitlines() == [
        "| Paper | the paper says | we measured | our run | verdict |",
        "|---|---|---|---|---|",
        "| 1 | a claim | x 2 | one run | same |",
        "| 2 | ″ | x 2 |  | not the same |",
        "",
        "Not measured:",
        "",
        "- 3: needs a cluster.",
    ]


def test_the_source_names_a_device_once():
    rows = [made("b", "c", "i", "m", 1.0, commit=commit) for commit in ("f", "e", "f")]
    other = made("b", "c", "i", "m", 1.0, device="cpu")
    assert render.source([*rows, other]) == f"\ncpu, jax 1, commit c; {GPU}, jax 1, commits e, f.\n"


@pytest.mark.parametrize("paper", tables.PAPERS)
def test_claims_of_a_paper(paper, tmp_path, monkeypatch):
    """Without records none is decided; stored verdicts of one seed say that they are of one."""
    found = importlib.import_module(f"benchmarks.claims.{paper}")
    rows = records.newest(records.all_records())
    for claim in found.CLAIMS:
        one = claim.finding(rows)
        trained = [r for r in one.rows if "parameters" in r.get("flags", {})]
        seeds = {r.get("seed") for r in trained if r["unit"] not in claims.ALIKE} - {None}
        if one.verdict in (SAME, BETTER, NOT) and len(seeds) == 1:
            assert claims.ONE_SEED in one.scale, claim.where
    if hasattr(found, "RESULTS"):
        monkeypatch.setattr(found, "RESULTS", tmp_path)  # without stored curves
    body, used = claims.table([], found.CLAIMS)
    assert not used
    for where, says, measured, _, _, verdict in body:
        if paper == "q_adam_mini" and where.startswith(("Table 3", "Table 4")):
            continue  # computed of shapes
        assert says and verdict in (claims.NOT_MEASURED, claims.NOT_TRIED)
        assert bool(measured) == (verdict == claims.NOT_TRIED)  # then the reason
