"""Paired training runs: the model, the batches, and a run that is killed and goes on."""

import dataclasses
import hashlib
import json
import lzma
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax.nnx")

from benchmarks import ROOT, curves, model_shapes  # noqa: E402
from benchmarks.suites.flashoptim.measure import StateErrors  # noqa: E402
from benchmarks.suites.pairs import bench, kept, states, training, trials  # noqa: E402
from benchmarks.suites.pairs.differences import differences  # noqa: E402
from benchmarks.suites.pairs.gpt2 import GPT2  # noqa: E402
from benchmarks.suites.pairs.presets import ADAM, GPT2_124M, LION, PRESETS, VARIANTS  # noqa: E402
from optax_lowmem import codecs  # noqa: E402
from tests.training_cases import as_users_do as as_users_do  # noqa: E402 (a fixture)
from tests.training_cases import text_for  # noqa: E402

SMOKE = PRESETS["smoke-gpt2"]


def experiment(run=SMOKE):
    return training.Experiment(run, text_for(run.context))


def small():
    return GPT2(SMOKE.shape, SMOKE.vocab, SMOKE.context, "float32")


def test_gpt2_is_the_papers():
    """Table 7 and appendix B.2: the hyperparameters; 124,439,808 weights under a vocabulary."""
    run = GPT2_124M
    assert run.rates == {ADAM: 6e-4, LION: 2e-4}
    assert run.betas == {ADAM: (0.9, 0.95), LION: (0.9, 0.95)} and set(run.decays.values()) == {0.1}
    assert run.steps * run.tokens >= 200e6 and run.context == 1024 and run.vocab == 50_257
    model = GPT2(run.shape, run.vocab, run.context)
    own = jax.eval_shape(model.weights, jax.random.key(0))
    theirs = model_shapes.gpt2_124m(jnp.float32)
    assert jax.tree.structure(own) == jax.tree.structure(theirs)
    assert sum(x.size for x in jax.tree.leaves(own)) == 124_439_808


def test_gpt2_at_its_start():
    """The loss is that of equal chances, and no place sees a later one."""
    model = small()
    params = model.weights(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, SMOKE.context + 1), 0, SMOKE.vocab)
    assert abs(model(params, tokens) - np.log(SMOKE.vocab)) < 0.1
    # the gradient of the positions: of a short window it is that of the same windows cut later
    cut = tokens[:, :9]
    positions = jax.grad(model)(params, cut)["wpe"]["embedding"]
    assert jnp.abs(positions[7]).max() > 0 and not jnp.abs(positions[8:]).any()


@pytest.mark.parametrize("steps", [40, 1600])
def test_schedule(steps):
    """Up to the peak in a share of the steps, then a cosine to the floor."""
    rates = np.array([GPT2_124M.schedule(ADAM, steps)(i) for i in range(steps + 1)], float)
    warm = max(1, round(700 / 20_000 * steps))
    assert np.argmax(rates) in (warm - 1, warm) and rates.max() == pytest.approx(6e-4)
    assert (np.diff(rates[warm:]) <= 0).all() and rates[-1] == pytest.approx(0, abs=1e-10)
    traced = jax.jit(lambda n, i: GPT2_124M.schedule(ADAM, n)(i))(np.float32(steps), 3)
    assert float(traced) == pytest.approx(float(rates[3]), rel=1e-6)


def test_micro_batches_add_up():
    """The mean gradient of micro-batches is that of the whole batch, in the weight's dtype."""
    made, model = experiment(), small()
    params = model.weights(jax.random.key(0))
    windows = jax.random.randint(jax.random.key(1), (SMOKE.batch, SMOKE.context + 1), 0, 256)
    whole = experiment(dataclasses.replace(SMOKE, micro=SMOKE.batch)).gradient(model)
    (a, one), (b, other) = whole(params, windows), made.gradient(model)(params, windows)
    assert float(a) == pytest.approx(float(b), rel=1e-6)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert jnp.abs(x - y).max() <= 1e-5 * jnp.abs(x).max()
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    assert {g.dtype for g in jax.tree.leaves(made.gradient(model)(half, windows)[1])} == {
        jnp.dtype("bfloat16")
    }


def test_variants_start_alike():
    """All variants of a rule have the same f32 weights, bf16 ones with corrections or not."""
    made = experiment()
    plain = made.start("adamw", np.uint32(3))[0]
    for name, chosen in VARIANTS.items():
        if chosen.rule != ADAM or chosen.activations != "standard" or chosen.plain:
            continue
        params, state = made.start(name, np.uint32(3))
        kinds = {x.dtype for x in jax.tree.leaves(params) if x.ndim > 1}
        assert kinds == {jnp.dtype("bfloat16" if chosen.split else "float32")}
        joined = training.lowmem.master_params(params, state)
        bits = 8 if "bf16-rounded" in name else 15  # that weights keep, with their corrections
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(joined), strict=True):
            assert jnp.abs(a - b).max() <= 2.0**-bits * jnp.abs(a).max()


def test_the_control_starts_beside_it():
    """Weights without their last 8 bits: near, and not the same."""
    made = experiment()
    (plain, _), (rounded, _) = (made.start(n, np.uint32(0)) for n in ("adamw", "adamw-rounded"))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(rounded), strict=True):
        if a.ndim > 1:
            assert 0 < jnp.abs(a - b).max() <= 2.0**-16 * jnp.abs(a).max()


def test_state_errors_are_those_of_numpy():
    """Leaf by leaf what the CPU's measurement in float64 has."""
    made = experiment()
    params, state = made.start("adamw", np.uint32(0))
    tx = made.optimizer("adamw", 40)
    grads = jax.tree.map(lambda p: 1e-3 * jax.random.normal(jax.random.key(1), p.shape), params)
    _, state = tx.update(grads, state, params)
    expected = StateErrors(every=1)
    expected(0, state)
    found = states.errors(state)
    for slot, of in expected.values.items():
        for name, values in of.items():
            own = found[f"nmse {slot} {name}"]
            np.testing.assert_allclose(own[np.isfinite(own)], values, rtol=2e-3)


def test_bf16_is_kept_bit_for_bit(tmp_path):
    path = tmp_path / "kept.npz"
    tree = {"a": jnp.arange(7, dtype=jnp.bfloat16) / 3, "b": jnp.uint32(5), "c": jnp.ones((2, 0))}
    kept.write(path, {"done": 1}, kept.flattened("x", tree))
    about, arrays = kept.read(path)
    found = kept.restored("x", arrays, tree)
    assert about == {"done": 1}
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), tree, found
    )
    with pytest.raises(SystemExit, match="choose another --folder"):
        kept.restored("x", arrays, tree | {"b": jnp.float32(5)})
    assert kept.read(tmp_path / "none.npz") is None


def test_rules_are_not_mixed():
    with pytest.raises(SystemExit, match="of 2 rules"):
        bench.rule_of(["adamw", "flash_lion"])
    with pytest.raises(SystemExit, match="only a Llama"):
        experiment().lower("adamw+fp8")


def command(folder, *more):
    own = f"--preset smoke-gpt2 --folder {folder} --curves {folder}.npz --record {folder}.jsonl"
    return [sys.executable, "-m", "benchmarks.run", "pairs", *own.split(), *more]


def losses_of(folder):
    found = curves.load(folder.with_suffix(".npz")).runs
    return {
        name: (of["train_loss"], of["val_loss"], of["val_groups"]) for name, of in found.items()
    }


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """Killed between two states that it keeps, then stopped by its limit, then ended."""
    monkeypatch.setattr(bench, "load_text", lambda run, cache: text_for(run.context))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = command(whole)[4:]
    assert bench.main(arguments) == 0

    def until(calls):
        """Go on from what is kept, to be cut off after some calls, a state kept before the last."""
        left = iter(range(calls))

        def call(self, name, one, _call=training.Seed._call):
            if next(left, None) is None:
                raise KeyboardInterrupt
            _call(self, name, one)

        with monkeypatch.context() as patch:
            patch.setattr(training, "SAVE_SECONDS", -1)
            patch.setattr(training.Seed, "_call", call)
            with pytest.raises(KeyboardInterrupt):
                bench.main(command(cut)[4:])

    until(3)  # in the middle of the second call of both
    assert kept.read(cut / "seed-0.npz")[0]["done"] == 1
    until(4)
    assert bench.main([*command(cut)[4:], "--limit", "0"]) == 0
    assert not (cut / "ended-0").exists()
    assert bench.main(command(cut)[4:]) == 0
    assert (cut / "ended-0").exists() and not (cut / "seed-0.npz").exists()
    one, other = losses_of(whole), losses_of(cut)
    assert one.keys() == other.keys() == {"adamw seed 0", "flash_adamw seed 0"}
    for name in one:
        for a, b in zip(one[name], other[name], strict=True):
            np.testing.assert_array_equal(a, b)
        assert one[name][1][-1] < one[name][1][0] - 1
    rows = [json.loads(line) for line in (tmp_path / "cut.jsonl").read_text().splitlines()]
    assert [row["impl"] for row in rows if row["metric"] == "val_loss"] == ["adamw", "flash_adamw"]
    assert {row["case"] for row in rows} == {"smoke-gpt2/adam"}
    assert np.mean(rows[0]["held_out_groups"]) == pytest.approx(rows[0]["value"], abs=1e-4)


def test_curves_of_all_seeds_are_kept(tmp_path):
    """Settings that were stored are those of the next seed, and of the next command."""
    about = {"betas": PRESETS["smoke-gpt2"].betas, "steps": 4}
    for seed in range(2):
        curve = {"val_step": np.arange(3), "val_loss": np.float32([6.0, 5.0, 4.0 + seed])}
        runs = {f"adamw seed {seed}": curve, f"flash_adamw seed {seed}": curve}
        curves.store(tmp_path / "a.npz", None, about, runs)
    assert len(curves.load(tmp_path / "a.npz").runs) == 4
    curves.store(tmp_path / "a.npz", None, about | {"steps": 5}, runs)
    assert len(curves.load(tmp_path / "a.npz").runs) == 2


def test_differences_along_curves():
    """Of the seeds that both ended, as shares of the baseline's mean; one seed has no interval."""
    runs = {}
    for seed, (plain, own) in enumerate([(4.0, 4.1), (5.0, 4.9), (6.0, None)]):
        steps = np.arange(3)
        runs[f"adamw seed {seed}"] = {"val_step": steps, "val_loss": np.array([6.0, 5.0, plain])}
        ends = 3 if own else 2  # the last one was cut off
        losses = np.array([6.0, 5.5, own])[:ends].astype(float)
        runs[f"flash_adamw seed {seed}"] = {"val_step": steps[:ends], "val_loss": losses}
    found = differences(curves.Curves({}, runs), "adamw", "flash_adamw")
    np.testing.assert_array_equal(found.steps, [1, 2])
    np.testing.assert_allclose(found.each, [[10, 0.1 / 4.5 * 100], [10, -0.1 / 4.5 * 100]])
    np.testing.assert_allclose(found.mean, [10, 0], atol=1e-9)
    low, high = found.interval
    assert low[0] == high[0] == 10 and low[1] == -high[1] < -2
    alone = {name: run for name, run in runs.items() if name.endswith("0")}
    assert differences(curves.Curves({}, alone), "adamw", "flash_adamw").interval is None


def test_a_process_that_is_killed(tmp_path):
    """SIGKILL leaves a state that is whole, and nothing is trained twice once a seed has ended."""
    folder = tmp_path / "run"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    own = command(folder, "--steps", "800")
    process = subprocess.Popen(own, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:  # until it trains
        if line.startswith("seed 0"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not list(folder.glob("ended*"))
    done = subprocess.run([*own, "--limit", "0"], cwd=ROOT, env=environment, check=True,
                          capture_output=True, text=True)  # fmt: skip
    assert "1 of 1 seeds left" in done.stdout
    assert kept.read(folder / "seed-0.npz")[0]["steps"] == 800


def test_the_text_is_made_once(tmp_path, monkeypatch, capsys):
    """Its tokens, and a list of its files whose hash is told."""
    monkeypatch.setattr(bench, "load_text", lambda run, cache: text_for(run.context))
    files = {"a.py": b"import os\n", "b/c.md": b"# title\n"}
    monkeypatch.setattr(bench.data, "read_texts", lambda *_: ("text", list(files.items())))
    own = ["--text", str(tmp_path / "text.npz")]
    bench.main([*own, "--files", str(tmp_path / "files.xz")])
    lines = lzma.decompress((tmp_path / "files.xz").read_bytes())
    assert hashlib.sha256(lines).hexdigest() in capsys.readouterr().out
    for line, (name, content) in zip(lines.decode().splitlines(), files.items(), strict=True):
        assert line.split() == [hashlib.sha256(content).hexdigest()[:32], str(len(content)), name]
    monkeypatch.setattr(bench, "load_text", None)
    found = bench.text_of(SMOKE, bench.parse_arguments(own))
    expected = text_for(SMOKE.context)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.held_out, expected.held_out)
    assert (found.vocab, found.bytes_per_token) == (expected.vocab, 1.0)


def test_all_sources(tmp_path, monkeypatch):
    """Tests and documentation too, each content once, no tables and nothing large."""
    whole = {"a.py": "1", "tests/b.pyi": "2", "c/d.rst": "3", "c/copy.py": "1"}
    left_out = {"encodings/e.py": "4", "f.so": "5", "large.py": "6" * 200_001}
    for name, content in (whole | left_out).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(bench.data, "_roots", lambda: [tmp_path])
    found = {name: path.read_text() for name, path in bench.data.all_sources()}
    assert sorted(found.values()) == ["1", "2", "3"] and found.items() <= whole.items()


def test_steps_that_a_device_can_take():
    """Fewer than the preset's where a call is slow; the same programs train them."""
    made = experiment()
    programs = bench.compile_all(made, ["adamw"])
    assert training.affordable(made, programs, 1e9) == SMOKE.steps
    assert training.affordable(made, programs, 0.0) == SMOKE.every


def test_controls_have_other_rates():
    """A step from zero moments is as many times AdamW's, and they are optax's own."""
    schedule = optax.constant_schedule(1e-2)
    params, grads = {"w": jnp.ones(4)}, {"w": jnp.arange(1.0, 5.0)}

    def step(name):
        tx = VARIANTS[name].make(schedule, b1=0.9, b2=0.99, weight_decay=0.1)
        return tx.update(grads, tx.init(params), params)[0]["w"]

    for name, by in (("adamw-nudged", 1.001), ("adamw-lower", 0.9), ("adamw-higher", 1.1)):
        assert VARIANTS[name].plain
        # the product with the rate is rounded twice, u = 2^-24 each
        np.testing.assert_allclose(step(name), by * step("adamw"), rtol=2.0**-22)
    assert not VARIANTS["adamw-factored"].plain and not VARIANTS["split"].plain


@pytest.mark.parametrize("shrink", [0.0, 1.0])
def test_ratios_are_drawn_to_one(shrink):
    """Of one step, half of a gradient's square is replaced by the product of its means."""
    square = jnp.array([[1.0, 4.0], [9.0, 4.0]])
    tx = trials.scale_by_factored_adam(0.9, 0.5, codec=codecs.softsign(), shrink=shrink)
    params = {"w": jnp.zeros((2, 2))}
    _, state = tx.update({"w": jnp.sqrt(square)}, tx.init(params))
    # means of rows 2.5 and 6.5, of columns 5 and 4, of all 4.5; halved by b2
    product = jnp.array([[12.5, 10.0], [32.5, 26.0]]) / 9
    wanted = 0.5 * (square + shrink * product) / (1 + shrink)
    ratios = wanted / product
    # softsign's last code is 1 - 126 / (254 - 126) = 1 / 64 of a group's largest ratio
    most = ratios.max(1, keepdims=True) * product / 64
    assert (jnp.abs(state.nu["w"].value - wanted) <= 1.01 * most).all()


@pytest.mark.parametrize("ratio", [None, codecs.sqrt4()])
def test_a_factored_second_moment_of_rank_one_is_adams(ratio):
    """Row and column means have all of it; the ratio to their product is 1, or a code of it."""
    # a few roundings of f32 in another order; or 14 of 15 of a root's codes, and a scale in bf16
    most = 1e-5 if ratio is None else 1 / 14 + 2**-8
    rng = np.random.default_rng(0)
    rows, columns = (np.exp(rng.standard_normal(shape)) for shape in ((3, 8, 1), (3, 1, 8)))
    params = {"w": jnp.zeros((3, 8, 8)), "b": jnp.zeros(8)}
    ours = trials.scale_by_factored_adam(0.9, 0.99, codec=ratio)
    plain = optax.scale_by_adam(0.9, 0.99)
    state, reference = ours.init(params), plain.init(params)
    for step in range(4):
        signs = rng.choice([-1.0, 1.0], (3, 8, 8))
        grads = {"w": jnp.float32((1 + step) * rows * columns * signs),
                 "b": jnp.float32(rng.standard_normal(8))}  # fmt: skip
        found, state = ours.update(grads, state)
        wanted, reference = plain.update(grads, reference)
        for name, tolerance in (("w", most), ("b", 1e-5)):
            np.testing.assert_allclose(found[name], wanted[name], rtol=tolerance)
    assert state.nu["w"].rows.shape == (3, 8, 1) and state.nu["w"].columns.shape == (3, 1, 8)
    assert (state.nu["w"].ratio is None) == (ratio is None)
