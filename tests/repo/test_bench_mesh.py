"""The benchmark of FSDP: its command line, what it records, and the table made of that."""

import json
import os

import jax
import pytest

from benchmarks import records, render, tables
from benchmarks.suites.mesh import bench as bench_mesh
from benchmarks.suites.mesh import step as mesh_step
from benchmarks.suites.mesh import tables as mesh_tables
from tests.contract_cases import QUICK_COMPILE

OURS, OPTAX = mesh_tables.OURS, mesh_tables.OPTAX

# ---- the command line ----------------------------------------------------------------------------


def test_every_power_of_two_by_default():
    assert [bench_mesh.powers_of_two(n) for n in (1, 2, 6, 8)] == [
        [1], [1, 2], [1, 2, 4], [1, 2, 4, 8],
    ]  # fmt: skip
    args = bench_mesh.arguments([])
    assert (args.preset, args.devices) == ("1b", bench_mesh.powers_of_two(jax.device_count()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--devices 2 4", "compared with one device: add 1"),
        ("--devices 1 16", "--devices 16: there are 8"),
        ("--record", "name a FILE"),
        ("--preset 7b", "invalid choice"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        bench_mesh.arguments(words.split())
    assert message in capsys.readouterr().err


# ---- processes -----------------------------------------------------------------------------------


def test_a_process_sees_its_gpus_and_is_told():
    code = "import os, sys; print(os.environ['JAX_CUDA_VISIBLE_DEVICES'], sys.stdin.read())"
    assert bench_mesh.process(["-c", code], 4, "a job") == "0,1,2,3 a job\n"


def test_a_process_that_fails_says_why(capfd):
    with pytest.raises(bench_mesh.Failed, match="status 3: out of memory"):
        code = "import sys; print('out of memory', file=sys.stderr); sys.exit(3)"
        bench_mesh.process(["-c", code], 1)
    assert "out of memory" in capfd.readouterr().err


# ---- the step ------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Programs are compiled quickly."""
    compiled = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda own: compiled(own, QUICK_COMPILE))


def test_a_step_on_two_devices(quick):
    """Every step of a call is taken, and each device keeps its half."""
    words = "--preset tiny --data-parallel 1 --fsdp 2 --clip 0".split()
    script = mesh_step.train_llama
    runner = mesh_step.Runner(script.make_settings(script.parse_arguments(words)), steps=3)
    runner.start()  # a step, and a call
    lay = jax.tree.map(lambda x: x.sharding, runner.carry)
    assert int(runner.carry[1].count) == 1 + 3
    assert runner.time() > 0
    assert int(runner.carry[1].count) == 1 + 3 + 3
    params, state, grads = runner.carry
    assert jax.tree.map(lambda x: x.sharding, runner.carry) == lay
    for tree in (params, state.mu, grads):
        up = tree["layers"]["mlp"]["up_proj"]["kernel"]
        assert up.sharding.shard_shape(up.shape) == (4, 64 / 2, 192)
    weights, of_state = (sum(x.nbytes for x in jax.tree.leaves(t)) for t in (params, state))
    assert runner.found["device_bytes"] == pytest.approx((weights + of_state) / 2, rel=0.02)
    assert runner.found["live_bytes"] == pytest.approx(weights + of_state / 2, rel=0.02)


# ---- a run ---------------------------------------------------------------------------------------

LOSSES = {1: [4.0, 2.0], 2: [4.0, 2.02]}


@pytest.fixture
def made_up(monkeypatch):
    """Processes that answer at once; what they were told."""
    told = []

    def process(words, devices, job=""):
        told.append((devices, json.loads(job) if job else words))
        if job:
            bytes_ = {"device_bytes": 8 * 2**30 // devices, "live_bytes": 1}
            return f"hello\n{json.dumps({'times': [3.0, 1.0, 2.0], 'steps': 7, **bytes_})}\n"
        words = dict(zip(words[1::2], words[2::2], strict=True))
        with open(words["--log"], "w") as file:
            file.writelines(json.dumps({"loss": loss}) + "\n" for loss in LOSSES[devices])
        values = {"train_loss": 2.0, "tokens_per_s": 1000.0 * devices, "peak_bytes": 2**31}
        rows = [{"metric": metric, "value": value} for metric, value in values.items()]
        with open(words["--record"], "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return "training"

    monkeypatch.setattr(bench_mesh, "process", process)
    return told


def test_what_a_run_records(made_up, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    words = f"--preset tiny --devices 2 1 --steps 5 --train-steps 2 --batch 4 --record {path}"
    assert bench_mesh.main(words.split()) == 0
    rows = {(r["devices"], r["impl"], r["metric"]): r for r in records.load(path)}
    step, train = ("device_ms", "device_bytes"), ("train_loss", "tokens_per_s", "train_peak_bytes")
    assert (
        list(rows)
        == [  # the largest number of devices last, whatever is measured
            *((1, impl, metric) for impl in (OURS, OPTAX) for metric in step),
            *((1, OURS, metric) for metric in train),
            *((2, impl, metric) for impl in (OURS, OPTAX) for metric in step),
            *((2, OURS, metric) for metric in (train[0], "loss_difference", *train[1:])),
        ]
    )
    ms = rows[2, OPTAX, "device_ms"]
    assert (ms["value"], ms["spread"], ms["steps"]) == (2.0, [1.0, 3.0], 7)
    assert (ms["case"], ms["model"]) == ("llama-tiny fsdp=2/adamw", "llama-tiny")
    assert rows[2, OURS, "loss_difference"]["value"] == pytest.approx(0.01)
    assert rows[2, OURS, "train_loss"]["losses"] == LOSSES[2]
    assert rows[2, OURS, "train_loss"]["run"] == {"steps": 2, "batch": 4, "sequence": 64}
    assert "| 2 | 2.00 | **2.00** | 2.00 | 2.00 | 2,000 | 1.0e-02 |" in capsys.readouterr().out


def test_what_processes_are_told(made_up):
    """The example's command line; a call is as long on more devices, and takes no clipping."""
    words = "--preset tiny --devices 1 2 --steps 5 --train-steps 2 --batch 4"
    bench_mesh.main([*words.split(), "--train-impl", OURS, OPTAX])
    jobs = [(n, job) for n, job in made_up if isinstance(job, dict)]
    runs = [(n, words) for n, words in made_up if not isinstance(words, dict)]
    assert [(n, job["steps"]) for n, job in jobs] == [(1, 5), (1, 5), (2, 10), (2, 10)]
    parse, make = mesh_step.train_llama.parse_arguments, mesh_step.train_llama.make_settings
    settings = [(n, make(parse(job["words"]))) for n, job in jobs]
    settings += [(n, make(parse(words[1:]))) for n, words in runs]
    assert [(s.data, s.fsdp, s.batch) for _, s in settings] == [(1, n, 4) for n, _ in settings]
    assert [s.clip for _, s in settings] == [0.0] * 4 + [1.0] * 4
    assert [s.optimizer for _, s in settings] == ["flash_adamw", "optax.adamw"] * 4
    assert {s.steps for _, s in settings[4:]} == {2}


def test_coat_is_trained_in_fp8(made_up):
    """COAT's rows of FSDP: its states and its activations; its step alone is not timed."""
    words = "--preset tiny --devices 1 2 --train-steps 2 --batch 4 --train-impl coat_adamw+fp8"
    bench_mesh.main(words.split())
    of_steps = [job["words"] for _, job in made_up if isinstance(job, dict)]
    runs = [words for _, words in made_up if not isinstance(words, dict)]
    parse, make = mesh_step.train_llama.parse_arguments, mesh_step.train_llama.make_settings
    settings = [make(parse(words[1:])) for words in runs]
    found = [(s.optimizer, s.activations, s.fsdp) for s in settings]
    assert found == [("coat_adamw", "fp8", 1), ("coat_adamw", "fp8", 2)]
    assert len(of_steps) == 4 and not any("coat_adamw" in words for words in of_steps)


def test_what_fails_does_not_stop_the_others(made_up, monkeypatch, tmp_path, capsys):
    answer, path = bench_mesh.process, tmp_path / "run.jsonl"

    def process(words, devices, job=""):
        if devices == 1 and (not job or "optax.adamw" in job):
            raise bench_mesh.Failed("status 3: out of memory")
        return answer(words, devices, job)

    monkeypatch.setattr(bench_mesh, "process", process)
    words = f"--preset tiny --devices 1 2 --record {path}"
    assert bench_mesh.main(words.split()) == 1
    out = capsys.readouterr().out
    assert out.count("failed: status 3: out of memory") == 2
    found = {(r["devices"], r["impl"], r["metric"]) for r in records.load(path)}
    assert (2, OPTAX, "device_ms") in found and (2, OURS, "tokens_per_s") in found
    assert (2, OURS, "loss_difference") not in found, "with nothing to compare with"
    assert "| 2 | 2.00 | **2.00** | 2.00 |  | 2,000 |  |" in out


def test_a_part_of_it(made_up):
    bench_mesh.main("--preset tiny --devices 1 --part step".split())
    assert all(isinstance(job, dict) for _, job in made_up) and len(made_up) == 2


@pytest.mark.full
def test_a_real_run(tmp_path, monkeypatch):
    """Of two simulated devices, in processes."""
    flags = {"xla_force_host_platform_device_count": 8, **QUICK_COMPILE}
    monkeypatch.setenv("XLA_FLAGS", " ".join(f"--{name}={value}" for name, value in flags.items()))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path = tmp_path / "run.jsonl"
    words = "--preset tiny --devices 1 2 --repeats 1 --train-steps 6 --record"
    assert bench_mesh.main([*words.split(), os.fspath(path)]) == 0
    value = {(r["devices"], r["impl"], r["metric"]): r["value"] for r in records.load(path)}
    assert all(value[n, impl, "device_ms"] > 0 for n in (1, 2) for impl in (OURS, OPTAX))
    one, two = (value[n, OURS, "device_bytes"] for n in (1, 2))
    assert 0.5 < two / one < 0.51
    assert 0 < value[2, OURS, "loss_difference"] < 1e-3
    assert value[2, OURS, "train_loss"] < 5


# ---- the table -----------------------------------------------------------------------------------


def synthetic(devices, impl, metric, value, device="NVIDIA H200", **more):
    common = {"bench": "mesh", "model": "llama-1b", "jax": "0.11.2", "commit": "abc"}
    case = f"llama-1b fsdp={devices}/adamw"
    own = {"devices": devices, "impl": impl, "metric": metric, "value": value}
    return {**common, "case": case, "device": device, **own, **more}


RUN = {"run": {"steps": 20, "batch": 8, "sequence": 2048}}
ROWS = [
    synthetic(1, OURS, "device_ms", 99.0),  # measured again below
    synthetic(1, OURS, "device_ms", 4.0),
    synthetic(2, OURS, "device_ms", 2.2),
    synthetic(4, OURS, "device_ms", 1.2),
    synthetic(1, OPTAX, "device_ms", 8.0),
    synthetic(4, OPTAX, "device_ms", 2.1),
    synthetic(1, OURS, "train_loss", 9.1, **RUN),
    synthetic(4, OURS, "tokens_per_s", 123456.7, **RUN),
    synthetic(4, OURS, "loss_difference", 1.234e-4),
    synthetic(4, OPTAX, "loss_difference", 2.5e-4),
    synthetic(4, OURS, "device_bytes", 1.5 * 2**30),
    synthetic(4, OPTAX, "device_bytes", 3.5 * 2**30),
    synthetic(4, OURS, "train_peak_bytes", 7.85 * 2**30),
    synthetic(1, OURS, "device_ms", 1000.0, device="cpu-2-cores"),
]


def test_the_table():
    """Ratios to one GPU, those over the limit in bold; nothing of a CPU; gaps where gaps are."""
    lines = mesh_tables.fsdp(ROWS).splitlines()
    head = "| llama-1b, devices | `lowmem.step`, ms | n x time / time(1), asked: ≤ 1.15 |"
    assert lines[0].startswith(head)
    assert lines[2:5] == [
        "| 1 | 4.00 | 1.00 | 8.00 | 1.00 |  |  |  |  |  |  |",
        "| 2 | 2.20 | 1.10 |  |  |  |  |  |  |  |  |",
        "| 4 | 1.20 | **1.20** | 2.10 | 1.05 | 123,457 | 1.2e-04 | 2.5e-04 | 1.50 | 3.50 | 7.85 |",
    ]
    protocol = "Losses and tokens/s: 20 steps, each of 8 x 2048 tokens on all devices together."
    assert lines[6] == protocol
    assert lines[8:] == ["NVIDIA H200, jax 0.11.2, commit abc."]


def test_every_machine_has_its_table():
    other = [synthetic(1, OURS, "device_ms", 5.0, device="NVIDIA H100")]
    text = mesh_tables.fsdp([*ROWS, *other])
    assert text.count("| llama-1b, devices |") == 2
    assert "| 1 | 5.00 | 1.00 |" in text and "| 1 | 4.00 | 1.00 |" in text


def test_without_records():
    only_cpu = [row for row in ROWS if row["device"].startswith("cpu")]
    assert tables.TABLES["fsdp"]([]) == mesh_tables.fsdp(only_cpu) == render.NOTHING


def test_the_largest_difference_of_a_loss():
    assert mesh_tables.loss_difference([9.9, 5.0, 4.1], [10.0, 5.0, 4.0]) == pytest.approx(0.025)
    with pytest.raises(ValueError):
        mesh_tables.loss_difference([1.0], [1.0, 1.0])  # of runs of other lengths
