"""Every suite of benchmarks/ at its smallest, the tables of those records, and what is timed."""

import ast
import contextlib
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("rich")

from benchmarks import ROOT, absent_gpu, records, render, run, small_gpu, tables
from benchmarks.peers import cases, device_loop, in_jax, in_torch, processes
from benchmarks.suites import kernels, memory, nf4, offload, plan, release
from benchmarks.suites.end_to_end import bench as end_to_end
from benchmarks.suites.fit import bench as fit
from benchmarks.suites.linear import bench as linear
from benchmarks.suites.linear import peers as linear_peers
from benchmarks.suites.mesh import bench as mesh
from benchmarks.suites.mesh import reshard, scaling
from benchmarks.suites.noise import bench as noise
from benchmarks.suites.pairs import sizes
from benchmarks.suites.step import bench as step
from benchmarks.suites.step import many_leaves, tune
from optax_lowmem import gaussws, layers
from optax_lowmem._src.layers.noise.kernels import block_shape
from optax_lowmem._src.optim.step import tuning
from tests.contract_cases import QUICK_COMPILE, assert_alike

GPU = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def as_users_do(monkeypatch):
    """Models broadcast; only the library is held to explicit ranks. Programs compile quickly."""
    compiled = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda own, options=None:
                        compiled(own, QUICK_COMPILE))  # fmt: skip
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")


# ---- every suite, and its tables -----------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Smoke:
    """A run of a suite, and the tables that show it."""

    suite: str
    words: str
    tables: tuple[str, ...]
    patches: tuple = ()  # (object, attribute, value), for the time of the run
    as_on_a_gpu: Callable[[dict], list[dict]] = lambda row: [row | {"device": GPU}]
    needs: str = "jax"  # a package


def of_case(old: str, new: str) -> Callable[[dict], list[dict]]:
    return lambda row: [
        row | {"device": GPU, "case": row["case"].replace(old, new), "model": "llama-1b"}
    ]


def outcome(job):
    """Measure in this process what one of the step suite would."""
    torch = job["implementation"] in in_torch.IMPLEMENTATIONS
    return in_torch.outcome(job) if torch else processes.measure(job)


def printed(words, devices, told="", flags=""):
    """Return what a process of the mesh suite prints, from this one."""
    from benchmarks.suites.mesh import step as mesh_step

    if told:
        return json.dumps(mesh_step.measure(json.loads(told)))
    mesh_step.train_llama.main(words[1:])
    return ""


def resharded(words, devices, told):
    return json.dumps(reshard.measure(**json.loads(told)))


TINY = cases.LEAF_SETS["tiny"]
TINY_DECODER = plan.Case(
    {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
     "num_attention_heads": 1, "head_dim": 136, "intermediate_size": 64}, 2, 16
)  # fmt: skip
ADAMW_OF_8B = dict([next(iter(memory.PUBLISHED.items()))])
ON_A_CPU = {"as_on_a_gpu": lambda row: [row]}
SMALL_STEP = ((cases.LEAF_SETS, "gpt2-124m", TINY), (step, "COPY_ON_CPU", (2**16, 2)))
SUITES = [
    Smoke("step", "--leaf-set gpt2-124m --impl lowmem.update optax-f32 --repeats 2 --steps 2",
          ("cpu_step",), SMALL_STEP, **ON_A_CPU),
    Smoke("step", "--leaf-set gpt2-124m --impl optax-bf16 torch-fused optax-f32 --repeats 2",
          ("gpu_step",),
          (*SMALL_STEP, (step, "on_cpu", lambda: False), (step, "COPY_ON_GPU", (2**16, 2)),
           (device_loop, "MAX_STEPS", 4), (processes, "outcome", outcome))),
    Smoke("call", "--case equal-2", ("call",), ((many_leaves, "CALLS", 6),)),
    Smoke("compile", "--case equal-1", ("cpu_compile",), **ON_A_CPU),
    Smoke("tpu", "--chip v5e --case 2048x8192 --impl optax.adamw", ("tpu",), **ON_A_CPU,
          needs="libtpu"),
    Smoke("plan", "--case tiny", ("plan",),
          ((plan.CASES, "tiny", TINY_DECODER), (absent_gpu, "mesh", lambda: None),
           (absent_gpu, "compiled", lambda on, function, *args, donated:
            jax.jit(function, donate_argnums=donated).lower(*args).compile()))),
    Smoke("memory", "", ("budget",), ((sizes, "measure", lambda *of: []),
          (memory, "PUBLISHED", ADAMW_OF_8B)), **ON_A_CPU),
    Smoke("nf4", "", ("nf4",), ((nf4, "SHAPE", (64, 256)),)),
    Smoke("nf4", "--times", (), ((nf4, "TOKENS", 8), (nf4, "MATRIX", (64, 128)))),
    Smoke("qlora", "--here --only tiny", ("qlora",)),
    Smoke("checkpoint", "--parameters 65536", (), **ON_A_CPU),
    Smoke("kernels", "--tiny --backends interpret --repeats 1 --case codes-rows",
          ("gpu_kernels",),
          as_on_a_gpu=lambda row: [row | {"device": GPU, "impl": name}
                                   for name in kernels.BACKENDS]),
    Smoke("linear", "--shapes 16384x4096x16384 16384x16384x4096 --alone --repeats 1 "
          "--impl bf16 switchback-int8 switchback-fp8",
          ("linear",),
          ((linear, "sizes", lambda shape: (64, 32, 64)),)),
    Smoke("noise", "--shapes 64x96 --repeats 1 --impl gaussws jax-normal --preset tiny --batch 1 "
          "--optimizers flash_adam_mini",
          ("noise_steps",),
          ((noise, "STEPS", 1), (noise, "NOISES", {"gaussws[all]": ()}))),
    Smoke("end_to_end", "--preset tiny --steps 2 --loss 64x8x16 --only default",
          ("end_to_end", "end_to_end_loss"),
          ((end_to_end.choose, "peak_flops", lambda kind: 1e12),), of_case("-tiny", "-1b")),
    Smoke("end_to_end", "--preset tiny --steps 2 --loss 0 --only default --text standard-library",
          ("end_to_end_others",),
          ((end_to_end.choose, "peak_flops", lambda kind: 1e12),),
          of_case("-tiny, standard-library", "-1b, installed")),
    Smoke("fit", "--preset tiny --sequence 16 --memory 0.02 --most 1 --steps 2 --only optax.adamw",
          ("activation_fit",)),
    Smoke("mesh", "--preset tiny --devices 1 2 --repeats 1 --steps 1 --train-steps 2 --batch 4",
          ("fsdp",), ((mesh, "process", printed),), of_case("-tiny", "-1b")),
    Smoke("scaling", "--preset tiny --devices 1 2 --layout fsdp --impl flash_adamw --steps 2",
          ("scaling",), ((scaling, "process", printed),), of_case("-tiny", "-1b")),
    Smoke("scaling_memory", "--preset tiny --devices 2 --impl flash_adamw",
          ("scaling_memory",),
          ((absent_gpu, "mesh", lambda devices: None),
           (absent_gpu, "present", lambda on: contextlib.nullcontext()),
           (absent_gpu, "build", lambda step, *args: jax.jit(abs).lower(1.0).compile()))),
    Smoke("reshard", "--preset tiny --devices 2 1", ("reshard",),
          ((reshard, "process", resharded),)),
]  # fmt: skip


@pytest.mark.parametrize(
    "smoke", SUITES, ids=lambda smoke: "-".join([smoke.suite, *smoke.tables[:1]])
)
def test_a_suite_makes_its_tables(smoke, tmp_path):
    pytest.importorskip(smoke.needs)
    file = tmp_path / "records.jsonl"
    with contextlib.ExitStack() as patches:
        for thing, name, value in smoke.patches:
            patch = mock.patch.dict if isinstance(thing, dict) else mock.patch.object
            own = (thing, {name: value}) if isinstance(thing, dict) else (thing, name, value)
            patches.enter_context(patch(*own))
        assert not run.suite(smoke.suite)([*smoke.words.split(), "--record", str(file)])
    rows = records.load(file)
    assert all(np.isfinite(row["value"]) for row in rows)
    assert len(records.newest(rows)) == len(rows)  # none replaces another
    rows = [one for row in rows for one in smoke.as_on_a_gpu(row)]
    for name in smoke.tables:
        text = tables.TABLES[name](rows)
        assert "Not measured yet" not in text and text != render.NOTHING, name
        assert text.count("\n|") >= 2 and " nan" not in text, name


def test_tables_without_records():
    for name in {name for smoke in SUITES for name in smoke.tables}:
        text = tables.TABLES[name]([])
        assert "nan" not in text and (text.startswith("|") or "record" in text), name


@pytest.mark.full
def test_an_8b_llama_in_small(tmp_path, monkeypatch):
    file = tmp_path / "records.jsonl"
    release.main(["--preset", "tiny", "--steps", "2", "--record", str(file)])
    rows = [row | {"case": row["case"].replace("tiny", "8b")} for row in records.load(file)]
    _, body, _ = release.table(rows)
    assert len(body) == 3 and all("" not in line for line in body)
    assert release.draw(rows).get_suptitle()


@pytest.mark.full
def test_state_on_the_host_in_small(tmp_path):
    file = tmp_path / "records.jsonl"
    only = ["48", "no-copies", "resident"]
    offload.main(["--preset", "tiny", "--steps", "2", "--only", *only, "--record", str(file)])
    rows = [
        row | {"case": row["case"].replace("tiny", "8b").replace("8b ", "8b batch=8 ")}
        for row in records.load(file)
    ]
    _, body, _ = offload.table(rows)
    kinds = ["state on the host", "offload", "resident"]
    assert [line[1].split(",")[0] for line in body] == kinds
    assert float(body[0][-2]) == 0.0 and all(float(line[5].replace(",", "")) > 0 for line in body)


class Driver:
    """libcuda of a GPU with 140.0 GiB free, of which contexts take 0.5."""

    def __init__(self, error=0):
        self.free, self.error = 140 << 30, error

    def __getattr__(self, name):
        return lambda *args: 0

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802
        self.free -= 1 << 29
        return 0

    def cuMemGetInfo_v2(self, free, total):  # noqa: N802
        free._obj.value, total._obj.value = self.free, 141 << 30
        return 0

    def cuMemAlloc_v2(self, address, size):  # noqa: N802
        self.free -= size.value
        return self.error


def test_a_large_gpu_with_the_memory_of_a_smaller_one(monkeypatch):
    drivers = iter([Driver(), Driver(), Driver(error=2)])
    monkeypatch.setattr("ctypes.CDLL", lambda name: next(drivers))
    assert small_gpu.fill(23.0) == 23.0
    with pytest.raises(RuntimeError, match="139.5 GiB are free, asked to leave 139.8"):
        small_gpu.fill(139.8)
    with pytest.raises(RuntimeError, match="cuMemAlloc_v2 returned CUDA error 2"):
        small_gpu.fill(23.0)


def test_a_smaller_gpu_while_a_run_lasts(monkeypatch):
    script = "import sys; print('full', flush=True); sys.stdin.read()"
    monkeypatch.setattr(small_gpu, "_COMMAND", [sys.executable, "-c", script])
    with small_gpu.leaving(23.0) as process:
        assert process.poll() is None
    assert process.returncode == 0
    monkeypatch.setattr(small_gpu, "_COMMAND", [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(RuntimeError, match="23.0 failed"), small_gpu.leaving(23.0):
        pass


def test_runs_with_the_memory_of_a_24_gb_card(monkeypatch):
    seen = []

    @contextlib.contextmanager
    def leaving(free_gib):
        seen.append(f"{free_gib:.1f} GiB")
        yield
        seen.append("all")

    def train(command, env, **how):
        seen.append(env.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default"))
        return mock.Mock(returncode=0)

    monkeypatch.setattr(offload, "device_gib", lambda: 140.0)
    monkeypatch.setattr(small_gpu, "leaving", leaving)
    monkeypatch.setattr(offload.subprocess, "run", train)
    offload.main("--only 24 48 resident".split())
    assert seen == ["23.3 GiB", "cuda_async", "all", "default", "default"]


# ---- commands ------------------------------------------------------------------------------------
COMMAND = re.compile(r"python -m (benchmarks[\w.]*)(?: (\w+))?")
FOLDERS = {"benchmarks": "*.py", "docs": "*.md", "notebooks": "*.ipynb", "tests": "*.py"}
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES += [p for folder, ending in FOLDERS.items() for p in (ROOT / folder).rglob(ending)]


def file_of(module):
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def unknown(text):
    """Commands that a text prints and nobody could run."""
    for module, name in COMMAND.findall(text):
        known = file_of(module).exists() and "__main__" in file_of(module).read_text("utf-8")
        if not known or (module == "benchmarks.run" and name not in {*run.SUITES, "SUITE"}):
            yield f"{module} {name}"


def test_documents_print_commands_that_exist():
    found = {path.name: list(unknown(path.read_text("utf-8"))) for path in PAGES}
    assert not {name: bad for name, bad in found.items() if bad}
    for words in ("benchmarks.bench_step --record", "benchmarks.run steps"):  # none of these
        assert list(unknown("`python -m " + words + "`"))


def test_suites_have_a_main():
    for name in run.SUITES.values():
        module, _, function = name.partition(":")
        body = ast.parse(file_of(f"benchmarks.suites.{module}").read_text("utf-8")).body
        assert (function or "main") in {node.name for node in body if hasattr(node, "name")}


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (step.main, "--leaf-set tiny --record", "not recorded"),
        (step.main, "--impl lowmem.step --record", "add it to --impl"),
        (mesh.main, "--devices 2 4", "compared with one device: add 1"),
        (mesh.main, "--record", "name a FILE"),
    ],
)
def test_records_that_would_mislead_are_refused(main, words, message, capsys):
    with pytest.raises(SystemExit):
        main(words.split())
    assert message in capsys.readouterr().err


def test_what_fails_does_not_stop_the_others(monkeypatch, capsys):
    def broken(name, *case):
        if name == "optax-bf16":
            raise RuntimeError("no such kernel\nand more")
        if name == "flashoptim-jax":
            raise in_jax.Unavailable("flashoptim_jax is not installed")
        return working(name, *case)

    working = in_jax.make
    monkeypatch.setattr(in_jax, "make", broken)
    monkeypatch.setattr(step, "COPY_ON_CPU", (2**10, 2))
    words = "--leaf-set tiny --impl optax-bf16 flashoptim-jax optax-f32 --repeats 1 --steps 1"
    assert step.main(words.split()) == 1
    printed = capsys.readouterr().out
    assert "failed: RuntimeError: no such kernel\n" in printed
    assert "skipped: flashoptim_jax is not installed" in printed
    assert re.search("tiny/adamw +optax-f32 ", printed)


# ---- what is timed is what it says ---------------------------------------------------------------
def carry_of(name):
    made = in_jax.make(name, "tiny", "adamw")
    return made, device_loop.Setup(made, TINY())()


@pytest.mark.parametrize(
    ("name", "optimizer", "expected"),
    [
        ("lowmem.step", "adamw", 2 + 2 * (2 + 1 + 1 + 1 + 2 / 32 + 4 / 32)),
        ("optax-f32", "sgd", 4 + 2 * (4 + 4)),
        ("optax-bf16", "adamw", 2 + 2 * (2 + 4)),
    ],
)
def test_bytes_that_must_move(name, optimizer, expected):
    made = in_jax.make(name, "ten-million", optimizer)
    moved = device_loop.moved_bytes(
        made, device_loop.Setup(made, cases.LEAF_SETS["ten-million"]()).shapes
    )
    assert moved / cases.parameters("ten-million") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("optimizer", cases.OPTIMIZERS)
def test_every_optimizer_is_a_case(optimizer):
    for name in ("lowmem.step", "lowmem.step-4bit", "optax-f32"):
        made = in_jax.make(name, "tiny", optimizer)
        params = jax.tree.map(lambda x, t=made.dtype: jax.ShapeDtypeStruct(x.shape, t), TINY())
        state = jax.eval_shape(made.init, params)
        new = jax.eval_shape(made.step, params, state, params)
        assert jax.tree.structure(new) == jax.tree.structure((params, state))


@pytest.mark.parametrize("name", ["lowmem.step", "lowmem.update"])
def test_the_loop_takes_every_step(name):
    made, (params, state, grads) = carry_of(name)
    own = jax.jit(made.step)
    looped = device_loop.looped(made.step, 3)(jax.tree.map(jnp.copy, (params, state, grads)))
    for _ in range(3):
        params, state = own(grads, state, params)
    assert_alike((params, state), looped[:2], steps=3)


def test_nothing_of_the_gradient_leaves_the_loop(monkeypatch):
    """XLA would compute (1 - b1) g and (1 - b2) g^2 once, and read both of them in every step."""
    monkeypatch.undo()
    made, carry = carry_of("optax-f32")

    def body(_, carry):
        params, state, grads = carry
        return *made.step(grads, state, params), grads

    plain = jax.jit(lambda carry: jax.lax.fori_loop(0, 3, body, carry), donate_argnums=0)
    leaves = device_loop.live_bytes(carry[2])

    def stored(loop):
        return loop.lower(carry).compile().memory_analysis().temp_size_in_bytes

    assert stored(plain) >= leaves, "the control: without a barrier they are stored"
    assert stored(device_loop.looped(made.step, 3)) < leaves / 4


def test_a_step_of_the_kernels_is_in_place():
    own = kernels.stepped("flash_adamw/linear4", 16, 64, "xla")
    before = int(own.carry[1].count)
    own.time()
    assert int(own.carry[1].count) == before + own.steps


@pytest.mark.parametrize("name", kernels.cases(16, 64))
def test_every_kernel_has_results(name):
    kernel, given = kernels.cases(16, 64)[name]()
    own = functools.partial(kernel, backend="interpret")
    assert device_loop.live_bytes(jax.eval_shape(own, *given)) > 0


@pytest.mark.parametrize("name", ["bf16", "switchback_m-int8", *linear_peers.NAMES])
def test_what_linear_times_is_the_layer(name):
    if why := linear_peers.missing_reason(name) if name in linear_peers.NAMES else None:
        pytest.skip(why)
    x, w, g = linear.operands("32x64x16")
    y, dx, dw, *_ = linear.step_of(name)(x, w, g)
    for found, wanted in ((y, x @ w), (dx, g @ w.T), (dw, x.T @ g)):
        found, wanted = np.float32(found), np.float32(wanted)
        # of gradients in E5M2 an eighth at most is lost, by chance much less
        assert np.linalg.norm(found - wanted) <= 0.1 * np.linalg.norm(wanted)


def test_what_noise_times_is_equation_1():
    size, key = (64, 96), jnp.uint32(3)
    w, factor = jax.random.normal(jax.random.key(0), size), jnp.full(block_shape(size), 2.0**-5)
    for name in ("gaussws", noise.XLA):
        wanted = gaussws.sample(w, 6.0, key)
        np.testing.assert_array_equal(noise.forward(name)(w, factor, key), wanted)
    drawn = gaussws.draw(key, size, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(noise.alone("gaussws", size)(key), drawn)
    # each pass of the timed loop has another key, so XLA cannot move the noise out of it
    looped = jax.jit(lambda n: noise.Keyed._loop(lambda key: key, (jnp.uint32(5),), n))
    assert [int(looped(n)) for n in (1, 2, 7)] == [0, 1, 6]


def test_losses_of_end_to_end_are_one_function():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, head = (jax.random.normal(k, (n, 8)) for k, n in zip(keys, (64, 16), strict=False))
    labels = jax.random.randint(keys[2], (64,), 0, 16)
    chunked = layers.linear_cross_entropy(hidden, head, labels, vocab_axis=0, chunk_tokens=16)
    np.testing.assert_allclose(end_to_end.full_loss(hidden, head, labels), chunked, rtol=1e-5)


@pytest.mark.parametrize("bend", [0.0, 0.3])
@pytest.mark.parametrize(
    ("fixed", "each", "wanted"), [(10, 7, 12), (90, 7, 1), (99, 7, 0), (0, 0.5, 199)]
)
def test_the_largest_batch_that_fits(fixed, each, wanted, bend):
    def plan(batch):
        return int(1e6 * (fixed + each * batch * (1 + bend * (batch % 2))))

    batch, found = fit.largest(plan, 99.9e6, 1000)
    assert len(found) <= (20 if bend else 5) and (bend or batch == wanted)
    assert batch == 0 or found[batch] <= 99.9e6 < found[batch + 1]


# ---- processes -----------------------------------------------------------------------------------
def ask(name, optimizer="adamw"):
    return processes.job(name, ("tiny", optimizer), repeats=1, steps=2, tbps=1.0)


def test_each_is_measured_in_a_process_of_its_own():
    """JAX's gives numbers; torch's has none without torch or a GPU, and says so."""
    jobs = [ask("lowmem.step"), ask("torch-fused", "lion"), ask("torch-fused")]
    ours, no_lion, torch = map(processes.outcome, jobs)
    assert len(ours["times"]) == 1 and ours["steps"] == 2 and ours["compile_s"] > 0
    assert no_lion == {"skipped": "torch has no such lion"}
    assert torch.get("skipped") or "times" in torch


def test_a_tuner_tries_every_cut(monkeypatch):
    told = []

    def outcome(job):
        told.append(tuning.parse(job["tuned"]))
        return {"times": [float(len(told))]}

    monkeypatch.setattr(processes, "outcome", outcome)
    for kernel in ("pallas", "triton"):
        tried = tune.cuts(kernel)
        assert len(set(tried)) == len(tried) and tuning.heuristic(kernel, 32) in tried
        assert list(tune.trials(tried, ("tiny", "lion"), kernel, 1)) == told[-len(tried) :]


def test_device_time_of_torch():
    """Kernels, copies and fills of a trace count; annotations that span them do not."""
    events = [
        {"cat": "kernel", "name": "adam", "dur": 900.0},
        {"cat": "gpu_memcpy", "name": "Memcpy", "dur": 100.0},
        {"cat": "gpu_user_annotation", "name": "Optimizer.step", "dur": 5000.0},
        {"ph": "M", "name": "process_name"},
    ]
    assert in_torch.device_ms({"traceEvents": events}) == pytest.approx(1.0)
