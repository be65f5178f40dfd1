"""The planner beside the compiler: the memory of a training step, planned and compiled.

JAX_PLATFORMS=cpu python -m benchmarks.run plan --record    # jax[cuda12], flax, and no GPU

Each case is a step of `examples/finetune.py`, compiled for an H100 that is not there, as
`benchmarks.absent_gpu` says. On a GPU, `--measure` runs each case in a process of its own, and
takes the peak of the allocator. It needs the preallocation that is JAX's default: in regions that
grow, the allocator gives out chunks larger than asked for, some 0.2 GB together.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lowmem as lowmem
from benchmarks import ROOT, absent_gpu, records
from benchmarks.records import Rows
from benchmarks.render import GIB, Rendered, Table, markdown
from optax_lowmem import plan

CARDS = (8, 12, 16, 24, 40, 48, 80)
LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8}
QWEN = {"model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 11_008,
        "tie_word_embeddings": True}  # fmt: skip
LARGE = QWEN | {"vocab_size": 152_064, "hidden_size": 5120, "num_attention_heads": 40,
                "num_key_value_heads": 8, "tie_word_embeddings": False}  # fmt: skip
# Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B, Qwen2.5-14B and Qwen2.5-32B
MODELS: dict[str, dict[str, Any]] = {
    "1B": LLAMA | {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192,
                   "num_attention_heads": 32, "tie_word_embeddings": True},
    "3B": LLAMA | {"num_hidden_layers": 28, "hidden_size": 3072, "intermediate_size": 8192,
                   "num_attention_heads": 24, "head_dim": 128, "tie_word_embeddings": True},
    "8B": LLAMA | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336,
                   "num_attention_heads": 32, "tie_word_embeddings": False},
    "14B": LARGE | {"num_hidden_layers": 48, "intermediate_size": 13_824},
    "32B": LARGE | {"num_hidden_layers": 64, "intermediate_size": 27_648},
}  # fmt: skip
GEMMA = {"model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 1152,
         "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
         "head_dim": 256, "intermediate_size": 6912, "query_pre_attn_scalar": 256,
         "sliding_window": 512, "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
MISTRAL = {"model_type": "mistral", "vocab_size": 32_768, "hidden_size": 4096,
           "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14_336, "sliding_window": None}  # fmt: skip
LORA = ("q_proj", "v_proj"), 16
SEQUENCE = 2048
FROZEN = "944a0fe271"


# ---- the planner beside the compiler -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of fine-tuning; `late`: chosen after commit `FROZEN` of the planner."""

    model: dict[str, Any]
    batch: int
    sequence: int = SEQUENCE
    mode: str = "resident"
    optimizer: str = "flash_adamw"
    micro_batches: int = 1
    remat: str = "full"
    activations: str = "standard"
    late: bool = False

    @property
    def rows(self) -> int:
        """Rows whose activations exist at once."""
        return self.batch // self.micro_batches


CASES = {
    "Llama-3.1-8B": Case(MODELS["8B"], 8, mode="release"),
    "Llama-3.1-8B, LoRA": Case(MODELS["8B"], 8, mode="lora"),
    "Llama-3.1-8B, QLoRA": Case(MODELS["8B"], 1, mode="qlora", late=True),
    "Llama-3.2-1B, 2 micro-batches": Case(MODELS["1B"], 32, micro_batches=2),
    "Llama-3.2-1B, FP8 activations": Case(MODELS["1B"], 4, remat="none", activations="fp8"),
    "Qwen2.5-3B": Case(QWEN, 6, 3072, optimizer="flash_lion", late=True),
    "Gemma-3-1B": Case(GEMMA, 8, 1024, late=True),
    "Llama-3.2-3B, products kept": Case(MODELS["3B"], 2, 4096, remat="dots", late=True),
    "Llama-3.2-1B, f32": Case(MODELS["1B"], 8, optimizer="optax.adamw", late=True),
    "Qwen2.5-3B, f32": Case(QWEN, 4, optimizer="optax.adamw", late=True),
    "Mistral-7B": Case(MISTRAL, 2, 4096, "release", "flash_adam_mini", late=True),
}


def make(case: Case) -> tuple[Any, Any, Any]:
    """Return (step, start, model) of a case: start() makes (trained, frozen, state, batch).

    Its argument are weights; by default it draws them.
    """
    from _llama.config import CUDNN, XLA, Settings
    from _llama.huggingface import shape_of
    from _llama.model import Llama, Lora, Packed, in_4_bits
    from _llama.optimizer import make_optimizer, weights_dtype
    from finetune import make_step

    shape = shape_of(case.model)
    names, rank = LORA
    lora = Lora(names, rank, 2.0 * rank) if case.mode in ("lora", "qlora") else None
    released = case.mode == "release"
    settings = Settings(
        preset="", optimizer=case.optimizer, shape=shape, sequence=case.sequence, batch=case.batch,
        steps=1, learning_rate=1e-5, text="", remat=case.remat, compute="bfloat16", seed=0,
        clip=0.0 if released else 1.0, release=released, accumulate=case.micro_batches,
    )  # fmt: skip
    tx = make_optimizer(settings, optax.constant_schedule(1e-5), 0.0)
    fused = shape.score_cap is None and shape.head_width <= 128
    model = Llama(
        shape, "bfloat16", CUDNN if fused else XLA, case.remat, lora=lora,
        activations=case.activations, stacked=case.remat == "full",
    )  # fmt: skip
    model = in_4_bits(model) if case.mode == "qlora" else model
    dtype = functools.partial(weights_dtype, settings)

    def start(weights: Any = None) -> tuple[Any, ...]:
        key, length = jax.random.key(0), case.sequence
        if weights is None:
            weights = dataclasses.replace(model, lora=None).weights(key, dtype)
        tokens = jax.random.randint(key, (case.batch, length + 1), 0, shape.vocab)
        ones = jnp.ones((case.batch, length))
        batch = Packed(tokens, jnp.zeros_like(tokens), ones)
        if lora is None:
            return weights, {}, tx.init(weights), batch
        adapters, state = lowmem.init(tx, model.adapters(key), lambda path, leaf: dtype(path))
        return adapters, weights, state, batch

    return make_step(model, tx, settings), start, model


def planned(case: Case, kept: int | None) -> int:
    """Bytes by the planner; `kept`: of `kept_bytes`."""
    sizes, accumulate = plan.decoder(case.model), case.micro_batches > 1
    found = plan.plan_decoder(sizes, case.optimizer, 0, case.sequence, LORA, accumulate)
    (mode,) = (mode for mode in found.modes if mode.name == case.mode)
    if kept is not None:
        of_batch = functools.partial(sizes.activations, sequence=case.sequence, kept=kept)
        mode = dataclasses.replace(mode, activations=of_batch)
    return mode.total_bytes(case.rows)


def kept_bytes(case: Case, model: Any) -> int | None:
    """Bytes that a layer keeps per token, by `activation_report`; None: its input."""
    if case.remat == "full":
        return None
    with absent_gpu.cudnn():
        whole = model.kept_bytes(case.rows, case.sequence)
    return whole // (case.rows * case.sequence * model.shape.layers)


def bytes_of(compiled: Any) -> int:
    """The peak of a program by the compiler's plan."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


def compiled_bytes(case: Case) -> tuple[int, Any]:
    """The compiler's plan, and the model."""
    step, start, model = make(case)
    with absent_gpu.cudnn():
        like = jax.eval_shape(start)
        return bytes_of(absent_gpu.compiled(absent_gpu.mesh(), step, *like, donated=(0, 2))), model


def measured_bytes(case: Case) -> tuple[int, Any]:
    """The allocator's peak of two steps, and the model."""
    step, start, model = make(case)
    trained, frozen, state, batch = jax.jit(start)()
    take_step = jax.jit(step, donate_argnums=(0, 2))
    for _ in range(2):
        trained, state, loss, _ = take_step(trained, frozen, state, batch)
    assert jnp.isfinite(loss)
    return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"], model


def planner_commit() -> str:
    """The last commit that changed the planner."""
    words = [
        "git",
        "log",
        "-1",
        "--abbrev=10",
        "--format=%h",
        "--",
        "optax_lowmem/_src/training/memory",
    ]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


@records.suite(
    case={"nargs": "+", "choices": CASES, "default": tuple(CASES), "metavar": "NAME"},
    measure={"action": "store_true", "help": "run on a GPU"},
)
def main(args: argparse.Namespace) -> Iterator[Rows]:
    for name in args.case:
        if args.measure and len(args.case) > 1:
            more = ["--record", str(args.record)] if isinstance(args.record, str) else []
            words = ["-m", "benchmarks.run", "plan", "--measure", "--case", name, *more]
            subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
            continue
        size, model = (measured_bytes if args.measure else compiled_bytes)(CASES[name])
        kept = kept_bytes(CASES[name], model)
        values = {"peak_bytes" if args.measure else "compiled_bytes": (size, "B")}
        if not args.measure:
            values["planned_bytes"] = (planned(CASES[name], kept), "B")
        case, where = CASES[name], {} if args.measure else {"device": records.H100_NEVER_RUN}
        yield records.records_of(
            "plan", name, case.optimizer, values, planner=planner_commit(), kept=kept,
            mode=case.mode, shape=f"{case.batch} x {case.sequence}", late=case.late, **where
        )  # fmt: skip


def comparison(rows: Rows) -> Table:
    """The planner, the compiler and measured peaks."""
    found = records.grouped(records.select(rows, bench="plan"), "case", "metric")
    body, used = [], []
    for name, of in found.items():
        if "planned_bytes" not in of:
            continue
        row = of["planned_bytes"]
        size = row["value"]
        others = [of.get(metric) for metric in ("compiled_bytes", "peak_bytes")]
        cells = [
            f"{one['value'] / GIB:.2f} ({100 * (size / one['value'] - 1):+.2f} %)" if one else ""
            for one in others
        ]
        chosen = "after" if row["late"] else "before"
        body.append([name, row["mode"], f"`{row['impl']}`", row["shape"], f"{size / GIB:.2f}",
                     *cells, chosen])  # fmt: skip
        used += of.values()
    head = ["", "mode", "optimizer", "batch", "planned, GiB", "compiled, GiB", "measured, GiB",
            f"chosen before or after {FROZEN}"]  # fmt: skip
    return head, body, used


# ---- what fits -----------------------------------------------------------------------------------


def fits(rows: Rows) -> str:
    del rows
    head = ["GPU: all weights / LoRA / QLoRA", *MODELS]
    body = []
    for card in CARDS:
        cells = []
        for config in MODELS.values():
            budget = int(plan.USABLE * card * GIB)
            found = plan.plan_decoder(plan.decoder(config), "flash_adamw", budget, SEQUENCE, LORA)
            *whole, lora, qlora, lora_stream, qlora_stream = found.modes
            batches = []
            for modes in (whole, (lora, lora_stream), (qlora, qlora_stream)):
                best = next((mode for mode in modes if mode.batch), None)
                name = f"{best.name}, " if best in whole else ""
                host = f" ({best.host / GIB:.0f})" if best and best.host else ""
                batches.append(f"{name}{best.batch}{host}" if best else "no")
            cells.append(" / ".join(batches))
        body.append([f"{card} GB", *cells])
    return markdown(head, body)


def printed(card: str) -> Any:
    """Return a table of what the planner prints for an 8B Llama on a card."""

    def text(rows: Rows) -> str:
        del rows
        folder, out = "Llama-3.1-8B", io.StringIO()
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(out):
            (Path(place) / folder).mkdir()
            (Path(place) / folder / "config.json").write_text(json.dumps(MODELS["8B"]))
            with contextlib.chdir(place):
                plan.main(["--params", folder, "--gpu", card])
        command = f"$ python -m optax_lowmem.plan --params {folder} --gpu {shlex.quote(card)}"
        return f"```\n{command}\n{out.getvalue()}```\n"

    return text


TABLES = {
    "fits": fits,
    "plan": Rendered(comparison, "plan"),
    "plan_8b_24": printed("RTX 4090"),
}
