"""The Llama example: as a user runs it, on a mesh, stopped and resumed, and without memory."""

import dataclasses
import functools
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lowmem as lowmem
from benchmarks import model_shapes
from tests.compilation import QUICK_COMPILE, SAME_BITS
from tests.contract_cases import assert_same
from tests.repo.test_examples import ROOT, example, run_script  # noqa: F401 (a fixture)

COMMAND = [sys.executable, "examples/train_llama.py"]
XLA_FLAGS = " ".join(f"--{name}={value}" for name, value in QUICK_COMPILE.items())
ONE, ANOTHER = "--data-parallel 1", "--data-parallel 1 --fsdp 4 --tensor 2"


@functools.lru_cache(maxsize=8)  # a program takes up to 2,500 of a process's memory maps
def program_of(make, settings):
    program = make(settings)
    start = functools.cache(lambda: program.start.lower().compile())
    return dataclasses.replace(program, start=lambda: start()())


@pytest.fixture
def llama(example, monkeypatch):  # noqa: F811
    """The example's modules; programs are compiled quickly, and once for neighbouring tests.

    Some compare bits of two programs, which XLA of jax 0.10 contracts differently in quicker ones.
    """
    names = ("config", "model", "mesh", "optimizer", "choose", "train", "report")
    parts = SimpleNamespace(script=example("train_llama"))
    for name in names:
        setattr(parts, name, example(f"_llama.{name}"))
    make, compiled = parts.train.make_program, jax.stages.Lowered.compile
    monkeypatch.setattr(parts.train, "make_program", functools.partial(program_of, make))
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda own: compiled(own, SAME_BITS))
    with jax.numpy_rank_promotion("allow"):  # tests forbid what the model, like most, makes use of
        yield parts


def trained(llama, flags):
    return llama.script.main(f"--text random --steps 6 {flags}".split())


@pytest.mark.parametrize(
    ("flags", "weights", "moments", "size"),
    [("--optimizer split_adamw", "bfloat16", "float32", 11.0),
     ("--optimizer coat_adamw --f32-weights", "float32", "int8", 6.13)],
)  # fmt: skip
def test_moments_and_weights_are_stored_apart(llama, flags, weights, moments, size):
    """Fair baselines: f32 moments on split weights, and 8-bit moments of f32 weights."""
    settings = settings_of(llama, f"{ONE} {flags}")
    program = llama.train.make_program(settings)
    params, state = program.like
    up = params["layers"]["mlp"]["up_proj"]["kernel"]
    of_up = optax.tree.get(state, "mu")["layers"]["mlp"]["up_proj"]["kernel"]
    codes = jax.tree.leaves(of_up)[0]
    assert (up.dtype, codes.dtype) == (weights, moments)
    assert program.report.bytes_per_param == pytest.approx(size, abs=0.02)
    more = " f32_weights=True" if settings.f32_weights else ""
    assert llama.report.case(settings) == f"llama-tiny{more}/{settings.optimizer}"


def test_f32_weights_take_no_noise(llama):
    with pytest.raises(SystemExit, match="--f32-weights and --noise"):
        settings_of(llama, f"{ONE} --f32-weights --noise all")


def assert_same_bits(found, wanted):
    assert_same((found.params, found.state), (wanted.params, wanted.state))


def settings_of(llama, flags):
    return llama.script.make_settings(llama.script.parse_arguments(flags.split()))


def abstract(llama, preset, dtype=jnp.bfloat16):
    model = llama.model.Llama(llama.config.PRESETS[preset].shape)
    return jax.eval_shape(lambda: model.weights(jax.random.key(0), lambda path: dtype))


def test_as_a_user_runs_it(tmp_path, monkeypatch):
    """On one device, on text: the loss falls, and it says what it took."""
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)
    log, records = tmp_path / "log.jsonl", tmp_path / "records.jsonl"
    done = run_script("train_llama.py", "--log", str(log), "--record", str(records))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert 5.0 < rows[0]["loss"] < 7.0  # log(256) = 5.5 and what the untrained logits add
    assert rows[-1]["loss"] < 3.0  # letter frequencies alone give about 3.3
    for words in ("0.2M parameters, flash_adamw", "60/60", "mu_scale", "tokens/s", "GiB a device"):
        assert words in done.stdout
    found = [json.loads(line) for line in records.read_text().splitlines()]
    assert {r["case"] for r in found} == {"llama-tiny/flash_adamw"}
    value = {r["metric"]: r["value"] for r in found}
    # Weights 2, correction 1, mu 1 + 2/32, nu 1 + 4/32; the norms stay f32.
    assert value["bytes_per_param"] == pytest.approx(5.1875, abs=0.03)
    assert value["device_bytes"] == pytest.approx(value["bytes_per_param"] * 229_952, abs=1)
    assert value["peak_bytes"] > value["device_bytes"]
    assert value["train_loss"] == pytest.approx(np.mean([row["loss"] for row in rows[-6:]]))
    assert value["fits"] == 1


def test_stopped_and_resumed(llama, tmp_path):
    """The rest of the run has the bits of one that was not stopped; on another mesh, its losses.

    (There gradients are added in another order.)
    """
    whole = trained(llama, ONE).run
    where = f"--checkpoint {tmp_path} --save-every 2"
    first = trained(llama, f"{ONE} {where} --until 3").run
    assert first.losses == whole.losses[:3]
    assert lowmem.checkpoint.latest_step(tmp_path) == 3
    elsewhere = trained(llama, f"{ANOTHER} {where} --resume --until 4")
    assert elsewhere.run.losses == pytest.approx(whole.losses[3:4], abs=1e-4)
    (tmp_path / "4").rename(tmp_path.parent / "4")
    rest = trained(llama, f"{ONE} {where} --resume").run
    assert rest.losses == whole.losses[3:]
    assert rest.step == 6
    assert_same_bits(rest, whole)


def test_on_a_mesh(llama):
    """Eight devices have the start of one, its losses to 5e-4, and an eighth of its bytes each."""
    one, mesh = (trained(llama, flags) for flags in (ONE, ANOTHER))
    assert mesh.run.losses == pytest.approx(one.run.losses, abs=5e-4)
    assert mesh.run.losses != one.run.losses
    starts = [SimpleNamespace(**dict(zip(("params", "state"), found.program.start(), strict=True)))
              for found in (one, mesh)]  # fmt: skip
    assert_same_bits(*starts)
    weight = mesh.run.params["layers"]["mlp"]["up_proj"]["kernel"]
    assert weight.sharding.shard_shape(weight.shape) == (4, 64 / 4, 192 / 2)
    shares = mesh.numbers["device_bytes"] / one.numbers["device_bytes"]
    assert 1 / 8 < shares < 0.15  # norms are everywhere, and some scales


@pytest.mark.full
@pytest.mark.parametrize(
    "flags", ["--data-parallel 2 --zero", "--data-parallel 2 --fsdp 2 --tensor 2 --remat"]
)
def test_resumed_on_other_meshes(llama, tmp_path, flags):
    """A run resumes on another mesh, with the same bits if each device's batch part is the same."""
    whole = trained(llama, "--data-parallel 2").run
    where = f"--checkpoint {tmp_path}"
    trained(llama, f"--data-parallel 2 {where} --until 3")
    rest = trained(llama, f"{flags} {where} --resume").run
    assert rest.losses == pytest.approx(whole.losses[3:], abs=5e-4)
    if "--zero" in flags:
        assert_same_bits(rest, whole)


@pytest.mark.full
def test_bf16_products_on_a_mesh(llama):
    losses = [trained(llama, f"{flags} --compute bfloat16").run.losses for flags in (ONE, ANOTHER)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-2)  # 8 bits of each activation
    assert losses[0] != pytest.approx(trained(llama, ONE).run.losses, abs=1e-6)


@pytest.mark.parametrize(
    "flags", ["--remat dots --unroll 3", *(pytest.param(f, marks=pytest.mark.full)
              for f in ("--remat", "--remat dots"))],
)  # fmt: skip
def test_remat_changes_nothing(llama, flags):
    assert trained(llama, f"{ONE} {flags}").run.losses == pytest.approx(
        trained(llama, ONE).run.losses, abs=1e-4
    )


def test_micro_batches(llama):
    """The losses of the whole batch, but for gradients rounded to bf16; on a mesh as on a device.

    A resumed run may divide its batches otherwise.
    """
    whole = trained(llama, ONE)
    one, mesh = (trained(llama, f"{flags} --accumulate 2 --account") for flags in (ONE, ANOTHER))
    assert one.run.losses == pytest.approx(whole.run.losses, abs=3e-3)
    assert one.run.losses[1:] != whole.run.losses[1:]
    assert mesh.run.losses == pytest.approx(one.run.losses, abs=3e-3)
    assert one.program.planned["backward_bytes"] < 0.6 * whole.program.planned["backward_bytes"]


def test_layers_apart(llama, tmp_path):
    """Each with weights of its own: the same start and losses; resumed, the run stays as it is."""
    stacked = trained(llama, ONE)
    where, apart = f"--checkpoint {tmp_path}", f"{ONE} --unroll 4"
    whole = trained(llama, apart)
    assert len(whole.run.params["layers"]) == whole.program.settings.shape.layers == 4
    assert not whole.program.settings.stacked and stacked.program.settings.stacked
    assert whole.run.losses == pytest.approx(stacked.run.losses, abs=1e-3)
    starts = [found.program.start()[0]["layers"] for found in (stacked, whole)]
    assert_same(jax.tree.map(lambda *w: np.stack(w), *starts[1]), starts[0])

    trained(llama, f"{apart} {where} --until 3")
    rest = trained(llama, f"{ANOTHER} {where} --resume --until 4").run
    assert rest.losses == pytest.approx(whole.run.losses[3:4], abs=1e-4)
    with pytest.raises(SystemExit, match="--release goes along stacked layers, and"):
        trained(llama, f"{ONE} {where} --resume --release")


def test_a_run_of_an_earlier_version_is_resumed(llama, tmp_path):
    """Its layers are stacked, which it does not say."""
    where = f"{ONE} --checkpoint {tmp_path}"
    trained(llama, f"{where} --until 3")
    file = tmp_path / "run.json"
    earlier = json.loads(file.read_text())
    assert earlier.pop("stacked") is True
    file.write_text(json.dumps(earlier))
    rest = trained(llama, f"{where} --resume --unroll 4")
    assert rest.program.settings.stacked
    assert rest.run.losses == pytest.approx(trained(llama, ONE).run.losses[3:], abs=1e-4)


def test_what_remat_keeps(llama):
    """U is what goes into a layer; its products have 1 + 1 + 1 (q, k with v, o) and 2 x 3.

    That of o is an input of the second norm; the last one's result nobody needs.
    """
    tiny, u = llama.config.PRESETS["tiny"].shape, 8 * 64 * 64 * 4
    kept = {
        remat: llama.model.Llama(tiny, "float32", remat=remat).kept_bytes(8, 64) / (4 * u)
        for remat in ("none", "dots", "full")
    }
    assert kept["full"] == 1
    assert kept["dots"] == 1 + 3 + 6
    assert kept["none"] > 20


@pytest.fixture
def hopper(llama, monkeypatch):
    """A GPU of 80 GB, as far as `auto` asks."""
    device = SimpleNamespace(
        compute_capability="9.0",
        device_kind="NVIDIA H100 80GB HBM3",
        memory_stats=lambda: {"bytes_limit": 80e9},
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    return device


KEPT = {  # GiB of the layers of 1b with its batch
    "standard": {"none": 42, "dots": 12.5, "full": 1},
    "lean": {"none": 12.5, "full": 1},
    "fp8": {"none": 10.7, "full": 1},
}


@pytest.mark.parametrize(
    ("flags", "attention", "activations", "remat"),
    [
        ("--compute bfloat16", "cudnn", "lean", "none"),
        ("--compute float32", "xla", "lean", "none"),
        ("--compute bfloat16 --activations standard", "cudnn", "standard", "dots"),
        ("--compute bfloat16 --activations fp8 --attention xla", "xla", "fp8", "none"),
        ("--compute bfloat16 --remat dots", "cudnn", "lean", "dots"),
        ("--compute bfloat16 --release", "cudnn", "lean", "full"),
    ],
)
def test_what_suits_a_gpu(llama, hopper, flags, attention, activations, remat):
    choose, settings = llama.choose, settings_of(llama, f"--preset 1b --data-parallel 1 {flags}")
    kept = {policy: int(gib * 2**30) for policy, gib in KEPT[activations].items()}
    found = choose.resolved(settings, int(10e9), kept.__getitem__)
    assert (found.attention, found.activations, found.remat) == (attention, activations, remat)
    if "release" not in flags and "--remat" not in flags:
        short = choose.resolved(settings, int(65e9), kept.__getitem__)
        assert short.remat == "full"  # where memory is short
    hopper.compute_capability = "gfx942"  # another vendor's
    if "--attention" not in flags:
        assert choose.attention(settings) == "xla"


def test_the_leanest_of_the_fast(llama, hopper):
    """The least kept within 3 % of the fastest, by estimates near the times measured on an H200."""
    choose = llama.choose
    settings = settings_of(llama, "--preset 1b --data-parallel 1 --activations standard --unroll 1")
    hopper.device_kind = "NVIDIA H200"
    kept = {policy: int(gib * 2**30) for policy, gib in KEPT["standard"].items()}
    rates = {"none": 58_443, "dots": 64_939, "full": 56_985}  # tokens/s of the records
    for policy, rate in rates.items():
        estimates = (choose.step_seconds(settings, p, kept[p]) for p in (policy, "dots"))
        found = next(estimates) - next(estimates)
        assert found == pytest.approx(8 * 2048 / rate - 8 * 2048 / rates["dots"], abs=5e-3)
    for gib, chosen in ((12.4, "none"), (13, "dots"), (42, "dots")):
        near = kept | {"none": int(gib * 2**30)}
        assert choose.resolved(settings, 0, near.__getitem__).remat == chosen


@pytest.mark.parametrize(
    ("flags", "layers"),
    [("", 32), ("--unroll 4", 4), ("--unroll 99", 32), ("--release", 1)],
)
def test_layers_are_unrolled_on_a_gpu(llama, hopper, flags, layers):
    """All of them, where that soon compiles, on one device; there is no stack then."""
    settings = settings_of(llama, f"--preset 8b --data-parallel 1 --compute bfloat16 {flags}")
    found = llama.choose.resolved(settings, 0, lambda policy: 0)
    assert found.unroll == layers
    assert found.stacked == (layers < 32)
    spread = dataclasses.replace(settings, data=2)
    assert llama.choose.unroll(spread) == (1 if settings.unroll == "auto" else layers)
    seconds = functools.partial(llama.choose.step_seconds, policy="none", kept_bytes=2**34)
    scanned, whole = (dataclasses.replace(settings, unroll=n) for n in (1, 32))
    assert seconds(scanned) > seconds(whole)


def test_the_device_is_a_step_ahead(llama):
    """Each step is known once, in order; arrays are those of a step where the run pauses."""
    calls, seen = [], []

    def step(params, state, tokens):
        calls.append(int(tokens[0]))
        return params + 1, state, 10.0 * tokens[0]

    one = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    program = SimpleNamespace(compiled=step, tokens=SimpleNamespace(sharding=one))
    run = llama.train.Run(2, None, 2, [], [])
    batches = lambda step: np.full(1, step, np.int32)  # noqa: E731
    for _ in llama.train.advance(run, program, batches, 7, lambda step: step == 5):
        seen.append((run.step, run.losses[-1], len(calls), run.params))
    assert calls == [2, 3, 4, 5, 6]
    ahead = {step: step not in (5, 7) for step in range(3, 8)}
    assert seen == [(n, 10.0 * (n - 1), n - 2 + a, n + a) for n, a in ahead.items()]
    assert len(run.seconds) == 5


def test_what_suits_a_cpu(llama):
    settings = settings_of(llama, "--preset 8b --compute bfloat16 --data-parallel 1")
    found = llama.train.make_program(settings).settings
    assert (found.attention, found.remat) == ("xla", "none")


def test_flops_of_a_token(llama):
    """6 for each weight of a matrix, the embedding's look-up none, and causal attention."""
    params = abstract(llama, "8b")
    weights = sum(math.prod(p.shape) for p in jax.tree.leaves(params) if p.shape[-1] > 1)
    norms = (2 * 32 + 1) * 4096
    matrices = weights - norms - 128_256 * 4096
    found = llama.config.PRESETS["8b"].shape.flops_per_token(2048)
    assert found == 6 * (matrices + 32 * 4096 * 2048)
    peaks = map(llama.choose.peak_flops, ("NVIDIA H200", "NVIDIA H100 PCIe", "an abacus"))
    assert list(peaks) == [989e12, 756e12, None]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [n for n in (*lowmem.OPTIMIZERS, "optax.adamw") if n != "flash_adamw"]
)
def test_any_optimizer(llama, name):
    flags = f"--data-parallel 2 --optimizer {name} --clip {0 if name == 'flash_lion' else 1}"
    run = trained(llama, flags).run
    assert run.losses[-1] < run.losses[0] - 0.5
    weights = {p.dtype for p in jax.tree.leaves(run.params) if p.shape[-1] > 64}
    assert weights == {jnp.dtype(jnp.float32 if name == "optax.adamw" else jnp.bfloat16)}


@pytest.mark.parametrize("mesh", [ONE, pytest.param(ANOTHER, marks=pytest.mark.full)])
def test_gradient_release(llama, mesh):
    """The ordinary run, but for last bits; what it holds beside forward and backward is less."""
    ordinary = trained(llama, f"{mesh} --clip 0 --remat --account")
    released = trained(llama, f"{mesh} --release --account")
    assert released.run.losses == pytest.approx(ordinary.run.losses, abs=2e-3)
    assert released.run.losses[-1] < released.run.losses[0] - 0.1
    one, other = (found.numbers for found in (released, ordinary))
    assert one["argument_bytes"] == other["argument_bytes"] >= one["device_bytes"]
    assert one["beside_backward"] < other["beside_backward"]
    parameters = sum(x.addressable_data(0).size for x in jax.tree.leaves(released.run.params))
    beside = one["argument_bytes"] + one["temporary_bytes"] - one["backward_bytes"]
    assert one["beside_backward"] == pytest.approx(beside / parameters)


@pytest.mark.full
@pytest.mark.parametrize("name", ["stable_adamw", "flash_adam_mini", "coat_adamw"])
def test_gradient_release_of_other_optimizers(llama, name):
    losses = trained(llama, f"{ONE} --optimizer {name} --release").run.losses
    wanted = trained(llama, f"{ONE} --optimizer {name} --clip 0").run.losses
    assert losses == pytest.approx(wanted, abs=5e-3)


@pytest.mark.parametrize("name", ["switchback-int8", "switchback_m-fp8"])
def test_products_in_8_bits(llama, name):
    """Nearly the losses of the ordinary run, and not the same; the head keeps its product."""
    plain = trained(llama, ONE).run
    run = trained(llama, f"{ONE} --linear {name}").run
    assert run.losses == pytest.approx(plain.losses, abs=0.05)
    assert run.losses != plain.losses
    assert jax.tree.map(jnp.shape, run.params) == jax.tree.map(jnp.shape, plain.params)


@pytest.mark.full
@pytest.mark.parametrize("flags", ["--remat", "--release", "--data-parallel 2 --fsdp 2 --tensor 2"])
def test_products_in_8_bits_however_trained(llama, flags):
    where = f"{flags} --linear switchback-int8" + (
        " --data-parallel 1" if "--data" not in flags else ""
    )
    wanted = trained(llama, f"{ONE} --linear switchback-int8 --clip 0").run.losses
    found = trained(llama, f"{where} --clip 0").run.losses
    assert found == pytest.approx(wanted, abs=5e-3)


def test_which_products_are_in_8_bits(llama):
    """Seven of a layer; nothing of the ends."""
    model = llama.model.Llama(
        llama.config.PRESETS["tiny"].shape, dot_general=llama.config.LINEARS["switchback-int8"]
    )
    ends, block = map(repr, model._graphs)
    assert block.count("_DotGeneral(") == 7
    assert "_DotGeneral(" not in ends


def test_memory_profile(llama, tmp_path):
    """A gzipped profile for pprof."""
    trained(llama, f"{ONE} --until 1 --memory-profile {tmp_path / 'end.pprof'}")
    assert gzip.decompress((tmp_path / "end.pprof").read_bytes())


@pytest.mark.full
def test_killed(tmp_path, monkeypatch):
    """A process that is killed leaves whole checkpoints, and a new one goes on from the newest."""
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS)
    flags = f"--text random --checkpoint {tmp_path / 'run'} --save-every 3 --resume --steps 300"
    with subprocess.Popen(
        [*COMMAND, *flags.split()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 200
        while not (tmp_path / "run" / "6").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    found = lowmem.checkpoint.latest_step(tmp_path / "run")
    assert 6 <= found < 300
    done = run_script("train_llama.py", *flags.split(), "--until", str(found + 2))
    assert done.returncode == 0, done.stderr
    assert f"resumed at step {found}" in done.stdout


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
def test_really_out_of_memory():
    """Of a process that may have less than the f32 state of 1.2e9 parameters."""
    flags = "--preset 1b --optimizer optax.adamw --batch 1 --sequence 16 --steps 1"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -v 12000000; exec {' '.join(COMMAND)} {flags}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 3, done.stderr
    assert "optax.adamw: out of memory: needs 9.2 GiB of state beside 4.6 GiB" in done.stderr
    assert "Traceback" not in done.stderr


def exhausted(message, *args, **kwargs):
    raise jax.errors.JaxRuntimeError(message)


def test_out_of_memory(llama, tmp_path, monkeypatch, capsys):
    """A line and an exit code, and a record."""
    records = tmp_path / "records.jsonl"
    flags = f"--preset 8b --optimizer optax.adamw --data-parallel 1 --record {records}"
    settings = settings_of(llama, flags)
    program = llama.train.make_program(settings)
    fail = functools.partial(exhausted, "RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
    monkeypatch.setitem(program.__dict__, "compiled", None)  # minutes of compiling
    monkeypatch.setitem(program.__dict__, "start", fail)
    with pytest.raises(SystemExit) as stopped:
        llama.script.main(flags.split())
    assert stopped.value.code == 3
    told = "optax.adamw: out of memory: needs 59.8 GiB of state beside 29.9 GiB of weights (12.00 "
    assert capsys.readouterr().err.startswith(told)
    value = {r["metric"]: r["value"] for r in map(json.loads, records.read_text().splitlines())}
    assert value == {
        "bytes_per_param": pytest.approx(12),
        "device_bytes": 12 * 8_030_261_248 + 8,
        "fits": 0,
    }
    monkeypatch.setitem(program.__dict__, "start", functools.partial(exhausted, "INTERNAL: a bug"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        llama.script.main(flags.split())


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("60m", 58e6), ("134m", 134e6), ("350m", 368e6), ("1b", 1.2358144e9), ("8b", 8.030261248e9)],
)
def test_parameter_counts(llama, preset, parameters):
    found = jax.tree.leaves(abstract(llama, preset))
    assert sum(math.prod(p.shape) for p in found) == pytest.approx(parameters, rel=3e-3)


def test_the_8b_is_the_one_of_the_tables(llama):
    """But for its layers being stacked."""
    shapes = abstract(llama, "8b")
    wanted = model_shapes.llama_3_1_8b()
    layers = shapes.pop("layers")
    sizes = sorted(math.prod(p.shape) for p in jax.tree.leaves(shapes))
    sizes += sorted(math.prod(p.shape[1:]) for p in jax.tree.leaves(layers)) * 32
    assert sorted(sizes) == sorted(math.prod(p.shape) for p in jax.tree.leaves(wanted))


def test_nothing_depends_on_later_tokens(llama):
    """Of a changed last token, and of the first."""
    model = llama.model.Llama(llama.config.PRESETS["tiny"].shape, "float32")
    params = jax.device_put(jax.device_get(trained(llama, ONE).run.params))
    tokens = jnp.arange(17)[None]

    @jax.jit
    def hidden(tokens):
        x = model.first(params, tokens)
        for i in range(2):
            own = jax.tree.map(lambda w, i=i: w[i], params["layers"])
            x = model.layer(own, params, x, tokens)
        return x[0]

    plain, late, early = (np.asarray(hidden(tokens.at[0, i].set(99))) for i in (16, 15, 0))
    np.testing.assert_array_equal(plain[:15], late[:15])
    assert (plain[15] != late[15]).any()
    assert (plain != early).any(axis=1).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fsdp 16", "takes 16 devices; there are 8"),
        ("--fsdp 3 --data-parallel 1", "--batch 8 cannot be shared by 3 devices"),
        ("--data-parallel 1 --tensor 3", "3 parts, which do not divide dimension 0"),
        ("--save-every 2", "--save-every needs --checkpoint"),
        ("--resume", "--resume needs --checkpoint"),
        ("--accumulate 3 --data-parallel 1", "--batch 8 cannot be divided into 3 micro-batches"),
        ("--release --accumulate 2", "the gradients that --release never holds"),
        ("--release --clip 1", "a global norm needs the gradients of all layers"),
        ("--release --optimizer optax.adamw", "--release takes an optimizer of optax_lowmem"),
    ],
)
def test_says_what_is_wrong(llama, flags, message):
    with pytest.raises(SystemExit, match=message):
        trained(llama, flags)


def test_trains_on_text_of_ones_own(llama, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("the cat sat on the mat. " * 2000)
    words = ["--data", str(text), *ONE.split()]
    settings = llama.script.make_settings(llama.script.parse_arguments(words))
    source, batches = llama.train.make_batches(settings, tmp_path)
    assert source == str(text) == settings.text
    assert "the mat" in bytes(batches(0)[0].astype(np.uint8)).decode()
    text.write_text("too short")
    with pytest.raises(SystemExit, match="too little text for --sequence 64"):
        llama.train.make_batches(settings, tmp_path)


def test_a_number_of_devices_as_data_is_deprecated(llama, capsys):
    assert settings_of(llama, "--data 2") == settings_of(llama, "--data-parallel 2")
    assert "deprecated: --data-parallel 2" in capsys.readouterr().err


def test_data_and_text_exclude_each_other(llama, capsys):
    with pytest.raises(SystemExit):
        settings_of(llama, "--data notes --text random")
    assert "leave out one of them" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_continue(llama, tmp_path, monkeypatch, capsys):
    """Ctrl-C ends it with the command that goes on, not with a traceback."""
    save = llama.script.checkpoints.save

    def interrupted(*args):
        save(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(llama.script.checkpoints, "save", interrupted)
    with pytest.raises(SystemExit) as raised:
        trained(llama, f"{ONE} --checkpoint {tmp_path / 'run'} --save-every 2")
    assert raised.value.code == llama.script.INTERRUPTED
    said = capsys.readouterr().err
    assert f"continue from step 2 with --checkpoint {tmp_path / 'run'} --resume" in said
    stopped = llama.script.checkpoints.stopped
    assert "nothing was saved" in stopped(None)
    assert "before the first checkpoint" in stopped(tmp_path / "empty")


def test_another_run_in_the_folder(llama, tmp_path):
    where = f"{ONE} --checkpoint {tmp_path}"
    trained(llama, f"{where} --until 1")
    with pytest.raises(SystemExit, match="has a run at step 1: add --resume"):
        trained(llama, where)
    with pytest.raises(SystemExit, match="a run with seed=0, not 1"):
        trained(llama, f"{where} --resume --seed 1")


@pytest.mark.parametrize(
    ("flags", "case"),
    [
        ("--preset 1b --data-parallel 1 --fsdp 4", "llama-1b fsdp=4 batch=4/flash_adamw"),
        (
            "--optimizer flash_lion --data-parallel 2 --zero",
            "llama-tiny zero=True data=2 batch=4/flash_lion",
        ),
        (
            "--clip 0 --remat --data-parallel 1",
            "llama-tiny clip=0.0 batch=4 remat=full/flash_adamw",
        ),
        (
            "--no-remat --data-parallel 1 --unroll 2",
            "llama-tiny batch=4 remat=none unroll=2/flash_adamw",
        ),
        ("--release --data-parallel 1", "llama-tiny clip=0.0 release=True batch=4/flash_adamw"),
        (
            "--linear switchback-fp8 --data-parallel 1",
            "llama-tiny linear=switchback-fp8 batch=4/flash_adamw",
        ),
    ],
)
def test_records_say_what_was_changed(llama, flags, case):
    assert llama.report.case(settings_of(llama, f"{flags} --batch 4")) == case


def test_norms_are_f32_and_do_not_decay(llama):
    """Stacked norms are matrices: their path tells what they are, not their rank."""
    params, _ = llama.train.make_program(settings_of(llama, "--preset 1b --data-parallel 1")).like
    decayed = llama.optimizer.decayed(params)
    rows = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(decayed), strict=True)
    found = {llama.model.leaf_path(keys): (p.dtype, decays) for (keys, p), decays in rows}
    norms = {name for name, kind in found.items() if kind == (jnp.float32, False)}
    assert norms == {
        "norm/scale",
        "layers/input_norm/scale",
        "layers/post_attention_norm/scale",
    }
    rest = {kind for name, kind in found.items() if name not in norms}
    assert rest == {(jnp.dtype(jnp.bfloat16), True)}
