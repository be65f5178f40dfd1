"""Tests of the search for the largest batch that fits on a device, and of its table."""

import dataclasses

import jax
import pytest

pytest.importorskip("flax")
pytest.importorskip("rich")

from benchmarks import records, tables  # noqa: E402
from benchmarks.suites.fit import bench as bench_fit  # noqa: E402
from benchmarks.suites.fit import tables as fit_tables  # noqa: E402
from tests.contract_cases import QUICK_COMPILE  # noqa: E402

GIB = 2**30


@pytest.fixture(autouse=True)
def as_users_do():
    """Models broadcast; only the library is held to explicit ranks. (Threads see no context.)"""
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.mark.parametrize("most", [1000, 20])
@pytest.mark.parametrize("bend", [0.0, 0.3])
@pytest.mark.parametrize(
    "fixed,each,wanted", [(10, 7, 12), (90, 7, 1), (99, 7, 0), (0, 0.5, 199), (0, 99, 1)]
)
def test_search(fixed, each, wanted, bend, most):
    """The largest of a line, and of what bends; few plans are looked at."""
    looked = []

    def plan(batch):
        looked.append(batch)
        return int(1e6 * (fixed + each * batch * (1 + bend * (batch % 2))))

    limit = 99.9e6
    batch, found = bench_fit.largest(plan, limit, most)
    assert found.keys() == set(looked) and len(looked) == len(found) <= (20 if bend else 5)
    wanted = min(wanted, most)
    if not bend:
        assert batch == wanted
    assert batch == 0 or found[batch] <= limit
    assert batch == most or found[batch + 1] > limit


def made(case, impl, device="some GPU", **values):
    return [
        {"bench": "fit", "case": case, "impl": impl, "metric": metric, "value": value, "unit": "",
         "device": device, "jax": "1", "commit": "c"}
        for metric, value in values.items()
    ]  # fmt: skip


CASE = "llama-3b-s2048"


def stored():
    sizes = dict(own_bytes=20 * GIB, sequence_bytes=GIB, planned_bytes=70 * GIB)
    rows = made(CASE, "all", common_batch=2)
    for name, most, rate in (("optax.adamw", 2, 100.0), ("coat_adamw+fp8", 8, 150.0)):
        rows += made(CASE, name, max_batch=most, **sizes)
        if most > 2:
            rows += made(f"{CASE}-b{most}", name, tokens_per_s=rate + most, planned_bytes=70 * GIB)
        rows += made(f"{CASE}-b2", name, tokens_per_s=rate, planned_bytes=40 * GIB)
    rows += made("llama-8b-s2048", "optax.adamw", max_batch=0, **sizes)
    return rows


def test_table():
    head, body, used = fit_tables.table(records.newest(stored()))
    plain, coat, none = (dict(zip(head, row, strict=True)) for row in body)
    assert plain["largest batch"] == "2" and coat["largest batch"] == "8"
    assert none["largest batch"] == "out of memory" and not none["tokens/s at the largest"]
    assert (coat["tokens/s at the same batch"], coat["tokens/s at the largest"]) == ("150", "158")
    assert coat["relative to the baseline"] == "1.58 x"
    assert plain["peak, GiB"] == "40.0 (batch 2)"
    on_a_cpu = [row | {"device": "cpu-2-cores"} for row in stored()]
    assert fit_tables.table(on_a_cpu)[1] == []
    assert "run fit" in tables.TABLES["activation_fit"](on_a_cpu)


def test_configurations():
    args = bench_fit.parse_arguments("--preset tiny --sequence 32".split())
    for name in args.only:
        settings = bench_fit.settings_of(args, name, 3)
        assert (settings.batch, settings.sequence, settings.remat) == (3, 32, "none")
        assert settings.optimizer == name.partition("+")[0].removesuffix("-f32")
        assert settings.f32_weights == ("-f32" in name)
        assert (settings.activations == "fp8") == ("fp8" in name)
    assert "3b" in bench_fit.PRESETS


def test_on_a_small_model(tmp_path, monkeypatch):
    """Plans, timings and records; what is too large for the device is said."""
    bytes_of = {}
    own = bench_fit.plan

    def plan(args, name, batch):
        bytes_of[batch] = own(args, name, batch)
        return bytes_of[batch]

    compiled = jax.stages.Lowered.compile
    quick = lambda own, options=None: compiled(own, QUICK_COMPILE)  # noqa: E731
    monkeypatch.setattr(jax.stages.Lowered, "compile", quick)
    monkeypatch.setattr(bench_fit, "plan", plan)
    file = tmp_path / "records.jsonl"
    flags = f"--preset tiny --sequence 16 --memory 0.02 --most 1 --steps 3 --record {file}"
    bench_fit.main([*flags.split(), "--only", "optax.adamw"])
    rows = records.load(file)
    value = {(row["case"], row["metric"]): row["value"] for row in rows}
    assert value["llama-tiny-s16", "max_batch"] == 1 == value["llama-tiny-s16", "common_batch"]
    assert value["llama-tiny-s16", "planned_bytes"] == bytes_of[1]
    assert value["llama-tiny-s16-b1", "tokens_per_s"] > 0
    monkeypatch.setattr(bench_fit, "plan", lambda *_: bytes_of[1])
    bench_fit.main(f"--preset tiny --memory 0.001 --only optax.adamw --record {file}".split())
    assert records.load(file)[len(rows)]["value"] == 0  # max_batch: out of memory
    if not (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"):
        with pytest.raises(SystemExit, match="pass --memory"):
            bench_fit.main("--preset tiny".split())


def test_timing_what_is_recorded(tmp_path, monkeypatch):
    """The batches of an earlier run are timed without a search; without one, an error says so."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    flags = "--preset tiny --sequence 16 --memory 1 --recorded --only optax.adamw".split()
    with pytest.raises(SystemExit, match=r"no plans of optax.adamw for llama-tiny-s16"):
        bench_fit.main(flags)
    found = bench_fit.Fit.of_plans(3, {1: 10, 3: 30}, 5)
    rows = made("llama-tiny-s16", "optax.adamw", records.device(), **dataclasses.asdict(found))
    records.append(rows, tmp_path / "some.jsonl")
    bench = bench_fit.Bench(bench_fit.parse_arguments(flags))
    assert bench.recorded() == {"optax.adamw": found}


def test_a_batch_that_was_planned_too_large(tmp_path, monkeypatch):
    """One less is tried, and recorded as the largest; at the batch of all, nothing is."""
    tried = []

    def attempt(settings, program):
        tried.append((settings.optimizer, settings.batch))
        return None if settings.batch in (1, 3) else {"tokens_per_s": 1.0}

    file, fit = tmp_path / "records.jsonl", bench_fit.Fit.of_plans(3, {1: 10, 3: 30}, 5)
    monkeypatch.setattr(bench_fit, "timed", attempt)
    monkeypatch.setattr(bench_fit.train, "make_program", lambda settings: type("P", (), {
        "compiled": None})())  # fmt: skip
    flags = f"--preset tiny --memory 1 --only coat_adamw optax.adamw --record {file}"
    bench = bench_fit.Bench(bench_fit.parse_arguments(flags.split()))
    bench.timings({"optax.adamw": bench_fit.Fit.of_plans(1, {1: 10}, 5), "coat_adamw": fit})
    assert sorted(tried) == [("coat_adamw", 1), ("coat_adamw", 2), ("coat_adamw", 3),
                             ("optax.adamw", 1)]  # fmt: skip
    found = [(row["case"], row["metric"], row["value"]) for row in records.load(file)]
    assert found == [
        ("llama-tiny-s2048", "common_batch", 1),
        ("llama-tiny-s2048", "max_batch", 2),
        ("llama-tiny-s2048-b2", "tokens_per_s", 1.0),
    ]
    tried.clear()
    bench.args.limit = 0.0
    bench.timings({"coat_adamw": fit})
    assert tried == []
