"""The spiking run, its records, and the claims that rest on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import claims
from benchmarks.claims import NOT, SAME
from benchmarks.claims import stable_adamw as claims_stable_adamw
from benchmarks.suites.spikes import bench as bench_spikes
from benchmarks.suites.spikes import runs

STEPS, SEEDS = 1600, 3
TINY = runs.Run(batch=8, width=8, steps=5)


def test_a_source_comes_for_some_steps_and_only_once():
    first = np.asarray(runs.arrivals(3))
    assert (np.diff(first) > runs.LASTS).all()
    assert runs.FIRST <= first[0]
    assert first[-1] + runs.LASTS < runs.Run().steps
    for i, here in ((0, True), (runs.LASTS - 1, True), (runs.LASTS, False), (-1, False)):
        images, _ = runs.batch_of(3, jnp.asarray(first[1] + i), 64)
        texture = images[:, :, runs.CONTENT :].reshape(64, runs.PATCHES, runs.SOURCES, runs.TEXTURE)
        present = np.asarray((texture != 0).any((0, 1, 3)))
        assert present.tolist() == [here and source == 1 for source in range(runs.SOURCES)]


@pytest.mark.parametrize("optimizer", ["adamw, gradients clipped", "stable_adamw"])
def test_mapped_runs_are_single_runs(optimizer, monkeypatch):
    monkeypatch.setattr(runs, "LAYERS", 2)  # for the compiler's sake
    run = runs.Run(optimizer, TINY.batch, TINY.width, TINY.steps)
    rates, b2s = jnp.asarray([0.01, 0.1]), jnp.asarray([0.9, 0.999])
    mapped = runs.many(run, rates, b2s, jnp.arange(2))
    alone = jax.jit(lambda: runs.curves(run, 0.1, 0.999, 1))()
    plain = jax.jit(lambda: runs.curves(run, 0.1, 0.999, 1, watch=False))()
    for name in ("loss", "embedding", "middle"):
        assert mapped[name].shape == (2, 2, TINY.steps)
        np.testing.assert_allclose(mapped[name][1, 1], alone[name], rtol=2e-3)
    np.testing.assert_allclose(plain["loss"], alone["loss"], rtol=1e-4)
    assert np.ptp(np.asarray(mapped["loss"][:, 1, -1])) > 0  # the points differ


def test_steps_since_a_change_and_the_rise_after_it():
    first = np.asarray(runs.arrivals(1))
    steps = np.asarray([first[0], first[0] + 7, first[1] - 1, first[1] + 3, first[-1] + 9])
    since = runs.since_change(steps, 1)
    assert since.tolist() == [0, 7, first[1] - 1 - first[0], 3, 9]
    assert (runs.since_change(np.arange(int(first[0])), 1) < 0).all()
    assert runs.since_change(np.zeros(0, np.int64), 1).size == 0
    losses = np.full((2, runs.Run().steps), 2.0)
    for seed, one in enumerate(losses):
        for at in np.asarray(runs.arrivals(seed)):
            one[at] = 9  # the step of the change itself does not count
            one[at + 1 : at + 16] += 0.5
    assert runs.rise(losses) == pytest.approx(0.5)


def made(lead=2, steady=False):
    """Curves (loss, embedding, middle) x seeds x steps whose spikes follow RMS by `lead`."""
    noise = np.random.default_rng(0).normal(size=(SEEDS, STEPS))
    curves = np.stack([2 + 0.01 * noise, np.ones_like(noise), np.ones_like(noise)])
    for seed in range(SEEDS):
        for at in range(1100, 1500, 150):
            curves[1, seed, at] = 5
            curves[2, seed, at + 60] = 5
            curves[0, seed, at + lead : at + lead + 4] += 0 if steady else 1
    return curves


def values(name, curves):
    return {row["metric"]: row["value"] for row in bench_spikes.summary(name, curves)}


def test_records_over_seeds():
    found = values("adamw/x", made())
    assert found["loss_spikes"] == found["embedding_predicts"] == 3 * SEEDS
    assert found["embedding_chance"] == pytest.approx(3 * 8 / (STEPS - 1000))
    assert found["embedding_flagged"] == pytest.approx(3 / (STEPS - 1000))
    assert found["middle_predicts"] == 0
    assert found["last_loss"] == pytest.approx(2, abs=0.01)
    assert values("adamw/x", made(lead=12))["embedding_predicts"] == 0
    assert values("adamw/x", made()[:2]).keys() < found.keys()  # points without a middle layer


def records(adamw, stable):
    """Records of AdamW at 0.999, spiking as `adamw` does, and of the rest as `stable`."""
    rows = []
    for run, points in bench_spikes.grid(STEPS):
        for rate, b2 in points:
            spiking = b2 == 0.999 and run.optimizer != "stable_adamw"
            name = f"{run.optimizer}/{bench_spikes.point(b2, rate, run.batch, run.width)}"
            rows += bench_spikes.summary(name, adamw if spiking else stable)
    return rows


def verdicts(rows):
    body, _ = claims.table(rows, claims_stable_adamw.CLAIMS)
    return {where: verdict for where, *_, verdict in body}


def test_claims():
    none = verdicts([])
    assert set(none.values()) == {claims.NOT_MEASURED, claims.NOT_TRIED}
    found = verdicts(records(made(), made(steady=True)))
    assert found["§3.4, Figures 4, 15 and 16"] == SAME
    assert found["Figure 20, a middle layer"] == SAME
    assert found["§3.3, Figure 3, b2"] == SAME
    assert found["§3.5, Figure 5, update clipping"] == SAME
    assert found["Figure 12, batch"] == NOT  # as many at every batch
    assert found["Figure 5, gradient clipping at norm 1"] == NOT  # it spikes
    late = verdicts(records(made(lead=12), made(steady=True)))
    assert late["§3.4, Figures 4, 15 and 16"] == NOT
    calm = verdicts(records(made(steady=True), made(steady=True)))
    assert calm["§3.5, Figure 5, update clipping"] == NOT  # nothing to mitigate
    assert calm["§3.3, Figure 3, b2"] == NOT
