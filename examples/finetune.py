"""Fine-tunes a Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3 of a Hugging Face folder.

    python examples/finetune.py --model FOLDER --data chat.jsonl --budget 24GiB
    python examples/finetune.py --model FOLDER --data text.jsonl --lora q_proj,v_proj --rank 16
    python examples/finetune.py --model FOLDER --data chat.jsonl --freeze 'layers/[0-7]/'
    python examples/finetune.py --model FOLDER --data chat.jsonl --resume

A line of the data is {"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}. Of
a chat, the loss is that of the assistant's answers. --out is a folder with the log (JSON lines), a
plot of the losses, checkpoints, and at the end the model, which transformers loads.

SIGTERM and Ctrl-C save a checkpoint and stop; SIGUSR1 saves one and goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

try:
    import matplotlib
    from _gpt.arguments import (
        INTERRUPTED,
        OUT_OF_MEMORY,
        allow_pinned_memory,
        compute_dtype,
        is_out_of_memory,
        out_of_memory_message,
        positive,
    )
    from _gpt.train import check_implementation
    from _llama import huggingface
    from _llama.config import FULL, NONE, PLAIN, Settings
    from _llama.finetuning import Program, make_program
    from _llama.model import Lora, joined
    from _llama.optimizer import NAMES, RATE_FACTORS
    from _llama.texts import Rows, Texts, batch_rows, packed
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
except ModuleNotFoundError as error:
    raise SystemExit(
        f"finetune.py needs {error.name}: pip install '.[examples,checkpoint]' in the clone"
    ) from None

import optax_lowmem as lowmem
from optax_lowmem import checkpoint, memory, plan

SCHEDULES = ("cosine", "linear", "constant")
# what a resumed run may change
_FREE = ("offload", "resume", "until", "save_every", "micro_batch", "budget", "prompt", "tokens",
         "temperature", "implementation", "dtype", "out")  # fmt: skip


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="of Hugging Face")
    add("--data", type=Path, required=True, metavar="FILE", help="JSON lines")
    add("--validation", type=Path, metavar="FILE", help="JSON lines; default: a part of --data")
    add("--held-out", type=float, default=0.05, help="that part (0.05)")
    add("--out", type=Path, default=Path("finetuned"), metavar="DIR", help="(finetuned)")
    add("--optimizer", choices=NAMES, default="flash_adamw", metavar="NAME",
        help=f"{', '.join(NAMES)} (flash_adamw)")  # fmt: skip
    add("--lr", type=float, help="peak learning rate (AdamW: 1e-5, of adapters 2e-4)")
    add("--schedule", choices=SCHEDULES, default="cosine", help="after the warm-up (cosine)")
    add("--warmup", type=float, default=0.03, help="part of the steps (0.03)")
    add("--weight-decay", type=float, default=0.0, help="(0)")
    add("--clip", type=float,
        help="global norm of gradients (1; with --release, where it takes a second backward pass: "
        "none)")  # fmt: skip
    add("--epochs", type=float, default=1.0, help="passes over the data (1)")
    add("--steps", type=positive, help="instead of --epochs")
    add("--sequence", type=positive, default=1024, help="tokens in a row (1024)")
    add("--batch", type=positive, default=8, help="rows in a step (8)")
    add("--micro-batch", type=positive, metavar="N",
        help="rows whose activations exist at once; default: what --budget allows")  # fmt: skip
    add("--budget", metavar="SIZE",
        help="memory of the device, such as 24GiB; default: what JAX may use")  # fmt: skip
    add("--release", action="store_true",
        help="update each layer inside the backward pass, for less memory")  # fmt: skip
    add("--offload", action="store_true",
        help="--release with the optimizer's state in host memory, copied layer by layer, and "
        "micro-batches of one row")  # fmt: skip
    add("--lora", metavar="NAMES", help="train adapters of these matrices: q_proj,v_proj")
    add("--rank", type=positive, default=16, help="of adapters (16)")
    add("--alpha", type=float, help="of adapters (twice the rank)")
    add("--freeze", metavar="PATTERN",
        help="regular expression on paths such as layers/0/mlp/up_proj/kernel")  # fmt: skip
    add("--evaluate-every", type=positive, default=50, metavar="N", help="steps (50)")
    add("--save-every", type=positive, metavar="N", help="steps between checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--until", type=positive, metavar="STEP", help="stop here, to resume later")
    add("--prompt", action="append", default=[], help="generate from it before and after training")
    add("--tokens", type=positive, default=64, help="to generate (64)")
    add("--temperature", type=float, default=0.0, help="of generation; 0: the likeliest (0)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the model written")
    add("--compute", choices=("auto", "float32", "bfloat16"), default="auto", help="(auto)")
    add("--implementation", default="auto", metavar="NAME", help="of lowmem.step (auto)")
    add("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    args.release |= args.offload
    args.alpha = 2.0 * args.rank if args.alpha is None else args.alpha
    if args.lr is None:
        args.lr = (2e-4 if args.lora else 1e-5) * RATE_FACTORS.get(args.optimizer, 1.0)
    if args.clip is None:
        args.clip = 0.0 if args.release else 1.0
    for other in ("lora", "freeze"):
        if args.release and getattr(args, other):
            parser.error(f"--release and --{other}: leave out one of them")
    if args.release and args.optimizer == PLAIN:
        parser.error(f"--release takes an optimizer of optax_lowmem, not {PLAIN}")
    if args.offload and args.dtype == "float32":
        parser.error("--offload and --dtype float32: leave out one of them")
    if args.lora and args.freeze:
        parser.error("--lora and --freeze: adapters freeze all weights; leave out one of them")
    return args


# ---- memory --------------------------------------------------------------------------------------


def planned(args: argparse.Namespace, budget: int, accumulate: bool = False) -> memory.Plan:
    """The plan of the run's model."""
    sizes = plan.decoder(huggingface.read_config(args.model))
    lora = (tuple((args.lora or "q_proj,v_proj").split(",")), args.rank)
    return plan.plan_decoder(sizes, args.optimizer, budget, args.sequence, lora, accumulate)


def micro_batch(args: argparse.Namespace) -> int:
    """The largest part of a batch that fits the budget; ends the program where none does."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    limit = limit and int(0.95 * limit)  # for the error of the plan
    if args.budget:
        limit = int(plan.USABLE * plan.bytes_of(args.budget))
    if args.offload:
        return args.micro_batch or 1
    if args.micro_batch or limit is None or args.optimizer not in lowmem.OPTIMIZERS:
        return args.micro_batch or args.batch
    name = "lora" if args.lora else "release" if args.release else "resident"
    for accumulate in (False, True):
        for mode in planned(args, limit, accumulate).modes:
            if mode.name == name and mode.batch >= (1 if accumulate else args.batch):
                rows = range(min(mode.batch, args.batch), 0, -1)
                return next(n for n in rows if args.batch % n == 0)
    raise SystemExit(f"--batch {args.batch} does not fit.\n{advice(args, limit)}")


def advice(args: argparse.Namespace, limit: int) -> str:
    """The plan, and the nearest configuration that fits."""
    found = planned(args, limit)
    best = found.best
    if best is None:
        return f"{found}\nNothing fits: shorten --sequence, or choose a smaller model."
    flags = {
        "release": "--release ",
        "offload": "--offload ",
        "lora": f"--lora {args.lora or 'q_proj,v_proj'} ",
    }
    return f"{found}\nThis fits: {flags.get(best.name, '')}--batch {min(best.batch, args.batch)}"


# ---- the run -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A run under way."""

    args: argparse.Namespace
    program: Program
    schedule: optax.Schedule
    rows: Rows
    held_out: Rows
    trained: Any
    frozen: Any
    state: Any
    step: int

    @property
    def checkpoints(self) -> Path:
        return self.args.out / "checkpoints"

    def save(self) -> None:
        """Save a checkpoint; the two newest are kept."""
        if checkpoint.latest_step(self.checkpoints) != self.step:
            checkpoint.save(
                self.checkpoints, self.program.tx, self.trained, self.state, self.step, keep=2
            )

    def log(self, **row: Any) -> None:
        """Append a line to the log."""
        with (self.args.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, **row}) + "\n")

    def evaluate(self) -> None:
        """Log the mean loss of the held-out rows."""
        batch = max(self.args.batch // self.program.accumulate, 1)
        loss = self.program.held_out_loss(self.trained, self.frozen, self.held_out, batch)
        self.log(validation_loss=loss)

    def advance(self) -> float:
        """Take a step, log it, and return its loss."""
        begin = time.perf_counter()
        some = self.rows[batch_rows(len(self.rows), self.args.batch, self.args.seed, self.step)]
        self.trained, self.state, loss, norm = self.program.step(
            self.trained, self.frozen, self.state, self.program.batch(some)
        )
        loss, norm = float(loss), float(norm)
        rate = float(self.schedule(self.step))
        self.step += 1
        seconds = time.perf_counter() - begin
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        self.log(
            loss=loss, learning_rate=rate, gradient_norm=None if np.isnan(norm) else norm,
            seconds=seconds, tokens_per_s=some.tokens[:, 1:].size / seconds, peak_bytes=peak,
        )  # fmt: skip
        return loss


def make_schedule(args: argparse.Namespace, steps: int) -> optax.Schedule:
    warmup = max(1, round(args.warmup * steps))
    rest = max(steps - warmup, 1)
    after = {
        "cosine": optax.cosine_decay_schedule(args.lr, rest),
        "linear": optax.linear_schedule(args.lr, 0.0, rest),
        "constant": optax.constant_schedule(args.lr),
    }[args.schedule]
    rising = optax.linear_schedule(args.lr / warmup, args.lr, warmup)
    return optax.join_schedules([rising, after], [warmup])


def begin(args: argparse.Namespace) -> int:
    """The step to go on from; ends the program where the folder has another run."""
    described = {k: str(v) for k, v in vars(args).items() if k not in _FREE}
    file, folder = args.out / "run.json", args.out / "checkpoints"
    step = checkpoint.latest_step(folder) if folder.exists() else None
    if step is None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "log.jsonl").unlink(missing_ok=True)
        file.write_text(json.dumps(described, indent=1), "utf-8")
        return 0
    if not args.resume:
        raise SystemExit(f"{args.out} has a run at step {step}: add --resume, or another --out")
    saved = json.loads(file.read_text("utf-8"))
    unlike = [name for name in described if saved.get(name) != described[name]]
    if unlike:
        name = unlike[0]
        raise SystemExit(
            f"{args.out} has a run with {name} {saved.get(name)}, not {described[name]}: resume it "
            "with the flags that it was begun with"
        )
    log = args.out / "log.jsonl"  # without the steps after the checkpoint, which are taken anew
    lines = log.read_text("utf-8").splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), "utf-8")
    return step


def prepare(args: argparse.Namespace, texts: Texts) -> Run:
    """Read data and model, and restore the checkpoint."""
    first = begin(args)
    rows = packed(texts.read(args.data), args.sequence)
    if args.validation:
        held_out = packed(texts.read(args.validation), args.sequence)
    else:
        order = np.random.default_rng(args.seed).permutation(len(rows))
        number = max(1, round(args.held_out * len(rows)))
        held_out, rows = rows[order[:number]], rows[order[number:]]
    if not len(rows):
        raise SystemExit(f"{args.data} has one row of {args.sequence} tokens: pass --validation")
    steps = args.steps or max(1, round(args.epochs * len(rows) / args.batch))
    args.steps = steps
    small = micro_batch(args)
    if args.batch % small:
        raise SystemExit(f"--batch {args.batch} is no multiple of --micro-batch {small}")
    settings = Settings(
        preset=args.model.name,
        optimizer=args.optimizer,
        shape=huggingface.shape_of(huggingface.read_config(args.model)),
        sequence=args.sequence,
        batch=args.batch,
        steps=steps,
        learning_rate=args.lr,
        text=str(args.data),
        remat=NONE if jax.default_backend() == "cpu" else FULL,
        compute=compute_dtype(args.compute),
        seed=args.seed,
        clip=args.clip,
        implementation=args.implementation,
        release=args.release,
        offload="pinned_host" if args.offload else None,
        accumulate=args.batch // small,
    )
    lora = Lora(tuple(args.lora.split(",")), args.rank, args.alpha) if args.lora else None
    schedule = make_schedule(args, steps)
    program = make_program(args.model, settings, schedule, args.weight_decay, lora, args.freeze)
    program.compile(program.batch(rows[batch_rows(len(rows), args.batch, args.seed, first)]))
    trained, frozen, state = program.start()
    if first:
        like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), trained)
        del trained, state
        places = None
        if args.offload:
            places = SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
        trained, state = checkpoint.restore(
            args.out / "checkpoints", program.tx, like, step=first, shardings=places
        )
        state = program.moved(trained, state)
    return Run(args, program, schedule, rows, held_out, trained, frozen, state, first)


class Signals:
    """Requests to save or stop, which take effect after the step that is under way."""

    def __init__(self) -> None:
        self.save = self.stop = False

    def __enter__(self) -> Signals:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self.before = {number: signal.signal(number, self._received) for number in numbers}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: Any) -> None:
        self.save = True
        self.stop |= number != signal.SIGUSR1


def train(run: Run, console: Console) -> None:
    """Take the steps, evaluating, saving and showing."""
    args = run.args
    last = min(args.until or args.steps, args.steps)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[now]}"))  # fmt: skip
    if run.step == 0:
        run.evaluate()
    with Signals() as signals, Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=last, completed=run.step, now="")
        while run.step < last:
            loss = run.advance()
            progress.update(task, completed=run.step, now=f"loss {loss:.4f}")
            if run.step % args.evaluate_every == 0 or run.step == args.steps:
                run.evaluate()
            due = args.save_every and run.step % args.save_every == 0
            if due or signals.save or run.step == last:
                run.save()
                signals.save = False
            if signals.stop:
                print(f"stopped; continue from step {run.step} with --resume", file=sys.stderr)
                raise SystemExit(INTERRUPTED)


def generate(run: Run, texts: Texts, console: Console) -> None:
    """Show what the model makes of the prompts."""
    args = run.args
    continued = jax.jit(run.program.model.generate, static_argnums=(2, 4))
    params = joined(run.trained, run.frozen) if args.prompt else None
    for prompt in args.prompt:
        ids = texts.prompt(prompt)
        tokens = continued(
            params, np.array([ids]), args.tokens, jax.random.key(args.seed), args.temperature
        )
        answer = texts.continued(np.asarray(tokens)[0].tolist(), len(ids))
        console.print(f"{prompt!r}, after {run.step} steps:\n{answer}", markup=False)
        run.log(prompt=prompt, answer=answer)


def export(run: Run) -> None:
    """Write the model, and its adapters where it has some."""
    args, model = run.args, run.program.model
    trained = run.trained
    if args.dtype == "float32" or model.lora is not None:
        trained = lowmem.master_params(trained, run.state)
    if model.lora is not None:
        huggingface.save_adapters(args.out / "adapter", str(args.model), model, trained)
    params = model.merged(joined(trained, run.frozen))
    huggingface.save(args.out / "model", args.model, model, params, args.dtype)


def draw(out: Path) -> None:
    """Plot the losses of the log, and write them for TensorBoard where that is installed."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, label in (("loss", "training"), ("validation_loss", "held out")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(out / "loss.png", dpi=150)
    plt.close(figure)
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        return
    shutil.rmtree(out / "tensorboard", ignore_errors=True)
    with SummaryWriter(str(out / "tensorboard")) as writer:
        for row in rows:
            for name, value in row.items():
                if name != "step" and isinstance(value, float):
                    writer.add_scalar(name, value, row["step"])


def main(arguments: list[str] | None = None) -> Run:
    # by default JAX takes three quarters of a GPU, too little for what would fit
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")
    args, console = parse_arguments(arguments), Console()
    if args.offload:
        allow_pinned_memory()
    check_implementation(args.implementation)
    try:
        texts = Texts(args.model)
        run = prepare(args, texts)
        report = memory.report(run.program.tx, run.trained)
        console.print(
            f"{args.model.name}: {report.parameters / 1e6:,.1f}M trained parameters, "
            f"{args.optimizer}, {len(run.rows)} rows of {args.sequence} tokens, {args.steps} steps "
            f"of {args.batch} rows in {run.program.accumulate} micro-batches",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        if run.step == 0:
            generate(run, texts, console)
        train(run, console)
    except (OSError, ValueError, MemoryError) as error:
        raise SystemExit(str(error)) from None
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        told = advice(args, limit) if args.optimizer in lowmem.OPTIMIZERS else str(error)
        message = out_of_memory_message(error, args.offload)
        print(f"out of memory: {message}\n{told}", file=sys.stderr)
        raise SystemExit(OUT_OF_MEMORY) from None
    if run.step == args.steps:
        generate(run, texts, console)
        export(run)
    draw(args.out)
    return run


if __name__ == "__main__":
    main()
