"""The Llama example: as a user runs it, resumed, on a mesh, in FP8, with noise, and its errors."""

import dataclasses
import functools
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lowmem as lowmem
from benchmarks import account
from benchmarks.example_records import case_of_llama
from optax_lowmem import gaussws
from tests.compilation import SAME_BITS
from tests.contract_cases import assert_same
from tests.repo.test_examples import run_script
from tests.wrappers.test_eager_programs import programs

ONE, MESH = "--data-parallel 1", "--data-parallel 1 --fsdp 4 --tensor 2"


@functools.lru_cache(maxsize=8)  # a program takes up to 2,500 of a process's memory maps
def program_of(make, settings):
    program = make(settings)
    if settings.offload:  # each start has arrays that steps delete
        return program
    start = functools.cache(lambda: program.start.lower().compile(SAME_BITS))
    return dataclasses.replace(program, start=lambda: start()())


@pytest.fixture
def llama(example, monkeypatch):
    """The example's modules; programs are compiled once for neighbouring tests."""
    parts = SimpleNamespace(script=example("train_llama"))
    for name in ("config", "model", "mesh", "optimizer", "choose", "train", "report"):
        setattr(parts, name, example(f"_llama.{name}"))
    make = functools.partial(program_of, parts.train.make_program)
    monkeypatch.setattr(parts.train, "make_program", make)
    return parts


KINDS = ("--release", "--offload")


def trained(llama, flags):
    return llama.script.main(f"--text random --steps 6 {flags}".split())


def settings_of(llama, flags):
    return llama.script.make_settings(llama.script.parse_arguments(flags.split()))


def assert_same_bits(found, wanted):
    assert_same((found.params, found.state), (wanted.params, wanted.state))


def test_as_a_user_runs_it(tmp_path):
    log, records = tmp_path / "log.jsonl", tmp_path / "records.jsonl"
    done = run_script("train_llama.py", "--log", str(log), "--record", str(records))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert 5.0 < rows[0]["loss"] < 7.0  # log(256) = 5.5 and what the untrained logits add
    assert rows[-1]["loss"] < 3.0  # letter frequencies alone give about 3.3
    assert "0.2M parameters, flash_adamw" in done.stdout and "MiB per device" in done.stdout
    found = [json.loads(line) for line in records.read_text().splitlines()]
    assert {r["case"] for r in found} == {"llama-tiny/flash_adamw"}
    value = {r["metric"]: r["value"] for r in found}
    # Weights 2, correction 1, mu 1 + 2/32, nu 1 + 4/32; the moments of the projections of keys and
    # values, 64 x 32 in each layer, are too small for codes, 8; the norms stay f32.
    number, small = 229_952, 2 * 4 * 64 * 32
    wanted = 5.1875 + small / number * (11 - 5.1875)
    assert value["bytes_per_param"] == pytest.approx(wanted, abs=0.03)
    assert value["device_bytes"] == pytest.approx(value["bytes_per_param"] * number, abs=1)
    assert value["peak_bytes"] > value["device_bytes"]
    assert value["train_loss"] == pytest.approx(np.mean([row["loss"] for row in rows[-6:]]))


def test_stopped_and_resumed(llama, tmp_path):
    """The resumed run has the bits of the whole one; on a mesh its losses, and its part of bytes.

    (On a mesh gradients are added in another order.)
    """
    whole = trained(llama, ONE)
    where = f"--checkpoint {tmp_path} --save-every 2"
    first = trained(llama, f"{ONE} {where} --until 3").run
    assert first.losses == whole.run.losses[:3]
    assert lowmem.checkpoint.latest_step(tmp_path) == 3
    with pytest.raises(SystemExit, match="has a run at step 3: add --resume"):
        trained(llama, f"{ONE} {where}")
    with pytest.raises(SystemExit, match="a run with seed=0, not 1"):
        trained(llama, f"{ONE} {where} --resume --seed 1")
    mesh = trained(llama, f"{MESH} {where} --resume --until 4")
    assert mesh.run.losses == pytest.approx(whole.run.losses[3:4], abs=1e-4)
    weight = mesh.run.params["layers"]["mlp"]["up_proj"]["kernel"]
    assert weight.sharding.shard_shape(weight.shape) == (4, 64 / 4, 192 / 2)
    shares = mesh.numbers["device_bytes"] / whole.numbers["device_bytes"]
    assert 1 / 8 < shares < 0.15  # norms are everywhere, and some scales
    assert_same(mesh.program.start(), whole.program.start())
    (tmp_path / "4").rename(tmp_path.parent / "4")
    rest = trained(llama, f"{ONE} {where} --resume").run
    assert rest.losses == whole.run.losses[3:]
    assert_same_bits(rest, whole.run)


@pytest.mark.parametrize(
    ("flags", "gap"),
    [
        ("--remat dots --unroll 3", 1e-4),
        ("--unroll 4", 1e-3),  # layers with weights of their own
        ("--accumulate 2", 3e-3),  # gradients rounded to bf16
        ("--linear switchback_m-fp8", 0.05),
    ],
)
def test_losses_of_the_ordinary_run(llama, flags, gap):
    whole, run = trained(llama, ONE), trained(llama, f"{ONE} {flags}")
    assert run.run.losses == pytest.approx(whole.run.losses, abs=gap)
    assert run.run.losses != whole.run.losses or gap == 1e-4
    assert run.program.settings.stacked == ("--unroll 4" not in flags)


def test_gradient_release(llama):
    """The ordinary run, but for last bits; what it holds beside forward and backward is less."""
    ordinary = trained(llama, f"{ONE} --clip 0 --remat")
    released = trained(llama, f"{ONE} --release")
    assert released.run.losses == pytest.approx(ordinary.run.losses, abs=2e-3)
    assert released.run.losses[-1] < released.run.losses[0] - 0.1
    one, other = (account.planned(found.program) for found in (released, ordinary))
    assert one["argument_bytes"] == other["argument_bytes"] >= released.numbers["device_bytes"]
    assert 0 < account.optimizer_share(ordinary.run, ordinary.program) < 10
    assert one["beside_backward"] < other["beside_backward"]


def test_state_on_the_host(llama, tmp_path):
    """The run with gradient release, clipped too; it goes on from its checkpoint, also without."""
    released, whole = (trained(llama, f"{ONE} {flag} --clip 1").run for flag in KINDS)
    assert whole.losses == pytest.approx(released.losses, abs=2e-3)
    where = f"{ONE} --clip 1 --checkpoint {tmp_path}"
    trained(llama, f"{where} --offload --until 3")
    (tmp_path / "3").rename(tmp_path.parent / "3")
    for flag in KINDS:
        shutil.copytree(tmp_path.parent / "3", tmp_path / "3")
        rest = trained(llama, f"{where} {flag} --resume").run
        assert rest.losses == pytest.approx(whole.losses[3:], abs=2e-3)
        shutil.rmtree(tmp_path / "3")
        shutil.rmtree(tmp_path / "6")
    assert trained(llama, f"{ONE} --offload --accumulate 4").run.losses[-1] < whole.losses[0] - 0.1


def test_weights_on_the_host(llama, tmp_path):
    """The run with the state alone there; it goes on from its checkpoint, also without."""
    flags = f"{ONE} --accumulate 4 --offload"
    whole = trained(llama, flags).run
    first = trained(llama, f"{flags} weights --checkpoint {tmp_path} --until 3").run
    for weights in ("weights", ""):
        folder = tmp_path / f"of{weights}"
        shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("of*"))
        rest = trained(llama, f"{flags} {weights} --checkpoint {folder} --resume").run
        assert [*first.losses, *rest.losses] == pytest.approx(whole.losses, abs=2e-3)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_offloaded_steps_are_compiled_before_weights_are_allocated(llama, accumulate):
    of = "weights" if accumulate > 1 else ""
    flags = f"{ONE} --offload {of} --text random --clip 1 --accumulate {accumulate}"
    program = llama.train.make_program(settings_of(llama, flags))
    _, batches = llama.train.make_batches(program.settings, None)
    arrays = len(jax.live_arrays())
    program.compiled  # noqa: B018
    assert len(jax.live_arrays()) <= arrays
    run = llama.train.Run(*program.start(), 0, [], [])
    assert programs(lambda: list(llama.train.advance(run, program, batches, 2)))[1] == 0


def test_a_run_goes_on_in_fp8(llama, tmp_path, capsys):
    whole = trained(llama, ONE).run
    where = f"{ONE} --checkpoint {tmp_path}"
    trained(llama, f"{where} --until 3")
    fp8 = "--activations fp8 --head fp8 --accumulate 2"
    rest = trained(llama, f"{where} --resume {fp8}").run
    assert rest.step == 6
    assert rest.losses == pytest.approx(whole.losses[3:], abs=0.08) and rest.losses != whole.losses
    shown = capsys.readouterr().out
    assert ", fp8 head" in shown and "2 micro-batches, weights quantized once a step" in shown


def test_a_run_with_noise_is_resumed(llama, tmp_path):
    """With its bits, noise and bitwidths included, on the initial weights of a run without."""
    noisy = f"{ONE} --noise od"
    whole, plain = (trained(llama, flags) for flags in (noisy, ONE))
    (weights, _), (params, state) = plain.program.start(), whole.program.start()
    assert_same(gaussws.clean_params(params, state), weights)
    wanted = {"layers/self_attn/o_proj/kernel", "layers/mlp/down_proj/kernel"}
    assert gaussws.bitwidths(state).keys() == wanted
    where = f"--checkpoint {tmp_path}"
    trained(llama, f"{noisy} {where} --until 3")
    with pytest.raises(SystemExit, match="noise='od', not None"):
        trained(llama, f"{ONE} {where} --resume")
    assert_same_bits(trained(llama, f"{noisy} {where} --resume").run, whole.run)
    headline = llama.report.headline(whole.program.settings, whole.program.report, "a text")
    assert "GaussWS noise [od]" in headline


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


def test_an_interrupted_run_says_how_to_continue(llama, tmp_path, monkeypatch, capsys):
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


def test_out_of_memory(llama, tmp_path, monkeypatch, capsys):
    def exhausted(message):
        raise jax.errors.JaxRuntimeError(message)

    records = tmp_path / "records.jsonl"
    flags = f"--preset 8b --optimizer optax.adamw --data-parallel 1 --record {records}"
    program = llama.train.make_program(settings_of(llama, flags))
    fail = functools.partial(exhausted, "RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
    monkeypatch.setitem(program.__dict__, "compiled", None)  # minutes of compiling
    monkeypatch.setitem(program.__dict__, "start", fail)
    with pytest.raises(SystemExit) as stopped:
        llama.script.main(flags.split())
    assert stopped.value.code == 3
    told = "optax.adamw: out of memory: needs 59.8 GiB of state beside 29.9 GiB of weights (12.00 "
    said = capsys.readouterr().err
    assert said.startswith(told) and said.endswith(
        "\nRESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\n"
    )
    value = {r["metric"]: r["value"] for r in map(json.loads, records.read_text().splitlines())}
    assert (value["device_bytes"], value["fits"]) == (12 * 8_030_261_248 + 8, 0)
    monkeypatch.setitem(program.__dict__, "start", functools.partial(exhausted, "INTERNAL: a bug"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        llama.script.main(flags.split())


def test_out_of_memory_with_the_state_in_host_memory(llama, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    settings = settings_of(llama, "--preset 8b --data-parallel 1 --offload")
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes.\nmore")
    message = llama.script.out_of_memory_message(error, settings.offload)
    said = llama.report.out_of_memory(settings, SimpleNamespace(params_bytes=2**34), 0, message)
    assert said.startswith("flash_adamw: out of memory: 16.0 GiB are weights; the state of a few ")
    assert "\nRESOURCE_EXHAUSTED: 7 bytes.\nFree memory may be divided into pieces " in said
    assert llama.script.out_of_memory_message(error, None) == "RESOURCE_EXHAUSTED: 7 bytes."


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
        ("--offload", "--offload copies the state to one device"),
        ("--release --optimizer optax.adamw", "--release takes an optimizer of optax_lowmem"),
        ("--release --noise od", "--release and --noise"),
        ("--f32-weights --noise all", "--f32-weights and --noise"),
    ],
)
def test_says_what_is_wrong(llama, flags, message):
    with pytest.raises(SystemExit, match=message):
        trained(llama, flags)


@pytest.mark.parametrize(
    ("flags", "case"),
    [
        ("--preset 1b --fsdp 4 --optimizer flash_lion", "llama-1b fsdp=4/flash_lion"),
        ("--release --batch 4", "llama-tiny clip=0.0 release=True batch=4/flash_adamw"),
        ("--head fp8 --noise od", "llama-tiny head=fp8 noise=od/flash_adamw"),
    ],
)
def test_records_say_what_was_changed(llama, flags, case):
    settings = settings_of(llama, f"{ONE} {flags}")
    assert case_of_llama(settings) == case
    assert case_of_llama(settings, "x") == case.replace("/", " allocator=x/")


@pytest.mark.parametrize(
    ("flags", "attention", "activations", "kept", "remat"),
    [  # `kept`: GiB of the layers of 1b with its batch
        ("", "cudnn", "lean", {"none": 12.5}, "none"),
        ("--activations standard", "cudnn", "standard", {"none": 42, "dots": 12.5}, "dots"),
        ("--activations fp8 --accumulate 2", "cudnn", "fp8", {"none": 10.7}, "none"),
        ("--release --attention xla", "xla", "lean", {}, "full"),
        ("--fsdp 2", "cudnn", "lean", {"none": 12.5}, "none"),
    ],
)
def test_what_suits_a_gpu(llama, monkeypatch, flags, attention, activations, kept, remat):
    """One of 80 GB: little is kept where that takes little longer, or where memory is short."""
    device = SimpleNamespace(
        compute_capability="9.0",
        device_kind="NVIDIA H100 80GB HBM3",
        memory_stats=lambda: {"bytes_limit": 80e9},
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    settings = settings_of(llama, f"--preset 1b {ONE} --compute bfloat16 {flags}")
    size = {policy: int(gib * 2**30) for policy, gib in (kept | {"full": 1}).items()}.__getitem__
    found = llama.choose.resolved(settings, 10 * 2**30, size, 2 * 2**30)
    assert (found.attention, found.activations, found.remat) == (attention, activations, remat)
    assert found.unroll == (1 if "--release" in flags else 16)
    assert found.quantize_once == ("--accumulate" in flags)
    assert llama.choose.resolved(settings, 62 * 2**30, size).remat == "full"


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_gradient_of_an_embedding_is_summed_in_f32(llama, compute):
    """Of a bf16 table: rounded once, after the places of a token are added."""
    lookup = llama.model.lookup
    table, tokens = jnp.zeros((4, 8), jnp.bfloat16), jnp.arange(1000) % 3
    g = jax.random.normal(jax.random.key(0), (1000, 8)).astype(compute)
    _, pull = jax.vjp(lambda table: lookup(table, tokens, g.dtype), table)
    wanted = jnp.zeros((4, 8)).at[tokens].add(g.astype(jnp.float32))
    np.testing.assert_array_equal(*(np.float32(x.astype(jnp.bfloat16)) for x in (*pull(g), wanted)))
