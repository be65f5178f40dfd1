"""Fine-tunes a Llama, Mistral, Qwen2, Qwen3, Gemma 2 or Gemma 3 of a Hugging Face folder.

    python examples/finetune.py --model FOLDER --data chat.jsonl --budget 24GiB
    python examples/finetune.py --model FOLDER --data text.jsonl --lora q_proj,v_proj --rank 16
    python examples/finetune.py --model FOLDER --data chat.jsonl --freeze 'layers/[0-7]/'
    python examples/finetune.py --model FOLDER --data chat.jsonl --resume

A line of the data is {"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}. Of
a chat, the loss is that of the assistant's answers. --out is a folder with the log (JSON lines), a
plot of the losses, checkpoints, and at the end the model, which transformers loads.

Without --save-every, a checkpoint is saved every ten minutes. SIGTERM and Ctrl-C save one and stop;
SIGUSR1 saves one and goes on.
"""

try:
    import argparse
    import dataclasses
    import math
    import os
    import signal
    import sys
    import time
    from collections.abc import Callable
    from functools import cached_property, partial
    from typing import Any

    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from _finetune import arguments, memory, output
    from _finetune.setup import Setup, make_setup
    from _gpt import arguments as shared
    from _gpt.arguments import OUT_OF_MEMORY
    from _gpt.train import check_implementation
    from _llama import huggingface
    from _llama.config import ON_DEVICE, PLAIN, SPLIT, WEIGHTS, Settings
    from _llama.model import Llama, Packed, joined, leaf_path, part
    from _llama.optimizer import weights_dtype
    from _llama.texts import Rows, Texts, batch_rows
    from _llama.train import layered, offloaded, released
    from jax.sharding import SingleDeviceSharding

    import optax_lowmem as lowmem
    from optax_lowmem import checkpoint, release
except ModuleNotFoundError as error:
    raise SystemExit(
        f"finetune.py needs {error.name}: pip install '.[examples,checkpoint]' in the clone"
    ) from None
except KeyboardInterrupt:
    raise SystemExit(130) from None

_MOST_SKIPPED = 10  # steps in succession
_LEAST_COPIED = 2**16  # bytes of an array of a frozen layer that is kept in host memory
_SAVE_SECONDS = 600.0  # between checkpoints, without --save-every
say = partial(print, flush=True)
parse_arguments = partial(arguments.parse_arguments, __doc__)


# ---- the training step ---------------------------------------------------------------------------


def make_step(
    model: Llama, tx: Any, settings: Settings, skip_nonfinite: bool = False
) -> Callable[..., tuple[Any, Any, jax.Array, jax.Array]]:
    """Return the training step.

    Its arguments are trained weights, frozen weights, state and a batch; its results are trained
    weights and state, in the memory of the arguments, the loss and the norm of the gradient.
    """
    if settings.release:
        return _released(model, tx, settings)
    of_sum = "float32" if settings.optimizer in (PLAIN, SPLIT) else "bfloat16"
    implementation = None if settings.implementation == "auto" else settings.implementation

    def step(trained: Any, frozen: Any, state: Any, batch: Packed) -> tuple[Any, ...]:
        def loss_fn(trained: Any, batch: Packed) -> jax.Array:
            return model(joined(trained, frozen), batch)

        value_and_grad = lowmem.value_and_grad(loss_fn, settings.accumulate, dtype=of_sum)
        loss, grads = value_and_grad(trained, batch, batch.tokens.sum())
        norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))

        def update() -> tuple[Any, Any]:
            return lowmem.step(tx, grads, state, trained, implementation=implementation)

        if skip_nonfinite:
            is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
            return *jax.lax.cond(is_finite, update, lambda: (trained, state)), loss, norm
        return *update(), loss, norm

    return step


def _released(model: Llama, tx: Any, settings: Settings) -> Callable[..., Any]:
    """Return the step that updates each layer in the backward pass; its norm is NaN."""
    take_step = released(model, tx, settings)

    def step(trained: Any, frozen: Any, state: Any, batch: Packed) -> tuple[Any, ...]:
        more = (frozen,) if settings.offload else ()
        loss, trained, state = take_step(trained, state, batch, *more)
        return trained, state, loss, jnp.float32(jnp.nan)

    if settings.offload:
        step.compile, step.loss = take_step.compile, take_step.loss
    return step


def start(setup: Setup, weights: Any) -> tuple[Any, Any, Any]:
    """Return trained weights, frozen weights and the optimizer's state."""
    model, tx = setup.model, setup.tx
    if setup.settings.offload == WEIGHTS and model.lora is None:
        return weights, {}, None
    if model.lora is None:
        trained = part(weights, lambda path: not setup.is_frozen(path))
        frozen = part(weights, setup.is_frozen)
    else:
        trained, frozen = model.adapters(jax.random.key(setup.settings.seed)), weights
    if setup.is_bf16 and model.lora is None:  # lowmem.init would copy weights that need no split
        return trained, frozen, None if setup.settings.offload else tx.init(trained)
    trained, state = lowmem.init(
        tx, trained, lambda path, leaf: weights_dtype(setup.settings, path)
    )
    return trained, frozen, state


def moved(setup: Setup, trained: Any, frozen: Any, state: Any) -> tuple[Any, Any, Any]:
    """Return these where the step takes them; a state of None is a new one."""
    model, tx, settings = setup.model, setup.tx, setup.settings
    if model.lora is None or not settings.offload:
        trained, state = offloaded(model, tx, settings, trained, state)
        return trained, frozen, state
    stages = layered(model)
    state = release.offload(tx, stages, trained, state, memory_kind=ON_DEVICE)
    return trained, release.offload_weights(stages, frozen, min_bytes=_LEAST_COPIED), state


def compile_step(setup: Setup, micro_batches: int) -> Any:
    """Compile the step, from shapes."""
    settings = dataclasses.replace(setup.settings, accumulate=micro_batches)
    step = make_step(setup.model, setup.tx, settings, setup.args.skip_nonfinite)
    like = jax.eval_shape(partial(start, setup), setup.weights)
    if not settings.offload:
        return jax.jit(step, donate_argnums=(0, 2)).lower(*like, setup.batch).compile()
    here = SingleDeviceSharding(jax.local_devices()[0])
    trained = jax.tree.map(lambda w: w.update(sharding=here), like[0])
    trained, frozen, state = moved(setup, trained, like[1], None)
    step.compile(trained, state, setup.batch, frozen)
    return step


def fewer_bytes(args: argparse.Namespace) -> str:
    """Return what needs less memory than the flags of a run, for display."""
    less = ["a shorter --sequence"]
    if args.lora:
        less += [] if args.base else ["--base nf4"]
        less += [] if args.offload or jax.default_backend() == "cpu" else ["--offload weights"]
    else:
        less += [] if args.release else ["--release"]
        less += ["--lora q_proj,v_proj"]
    return " or ".join([", ".join(less[:-1]), less[-1]] if less[1:] else less)


def fit(setup: Setup, rows: int | None) -> tuple[int, Any]:
    """Return the number of micro-batches and the compiled step.

    A micro-batch has so many rows; None: the most that there is memory for, or a ValueError.
    """
    args, batch = setup.args, setup.settings.batch
    numbers = [n for n in range(1, batch + 1) if batch % n == 0]
    if args.release or rows:
        numbers = [batch // (rows or (1 if args.offload else batch))]
    if args.offload or (rows and not args.budget):
        return numbers[0], compile_step(setup, numbers[0])
    limit = memory.limit_bytes(args.budget)
    number, step, size = memory.step_that_fits(partial(compile_step, setup), numbers, limit)
    if number is None:
        raise ValueError(
            f"--batch {batch} --micro-batch {batch // numbers[-1]} needs {size / memory.GIB:.2f} "
            f"GiB, and {memory.room(args.budget, limit)}. These need less: {fewer_bytes(args)}"
        )
    return number, step


# ---- the run -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A run under way; `total` rows are those of all steps, and `skipped` steps change nothing."""

    setup: Setup
    texts: Texts
    rows: Rows
    held_out: Rows
    take_step: Any
    micro_batches: int
    total: int
    trained: Any
    frozen: Any
    state: Any
    step: int
    skipped: int = 0
    in_succession: int = 0

    @property
    def args(self) -> argparse.Namespace:
        return self.setup.args

    @property
    def steps(self) -> int:
        return self.setup.settings.steps

    def log(self, **row: Any) -> None:
        """Append a line to the log."""
        output.log(self.args.out, step=self.step, **row)

    def save(self) -> None:
        """Save a checkpoint; only the newest is kept."""
        folder, tx = self.args.out / output.CHECKPOINTS, self.setup.tx
        if checkpoint.latest_step(folder) == self.step:
            return
        with output.one_error(f"the checkpoint of step {self.step} was not saved in {folder}"):
            checkpoint.save(folder, tx, self.trained, self.state, self.step, keep=1)

    def batch(self) -> Packed:
        """Return the rows of the next step; the loss of a micro-batch is its share of the mean."""
        rows = batch_rows(self.rows, self.args.batch, self.args.seed, self.step, self.total)
        weights = rows.weights * (self.micro_batches / max(rows.weights.sum(), 1))
        return jax.device_put(Packed(rows.tokens, rows.segments, weights))

    def advance(self) -> dict[str, Any]:
        """Take a step; return its line of the log."""
        begin, batch = time.perf_counter(), self.batch()
        self.trained, self.state, *results = self.take_step(
            self.trained, self.frozen, self.state, batch
        )
        loss, norm = map(float, results)
        rate = float(self.setup.schedule(self.step - self.skipped))
        self.step += 1
        seconds = time.perf_counter() - begin
        row = {
            "loss": loss, "learning_rate": rate, "gradient_norm": norm, "seconds": seconds,
            "tokens_per_s": self.args.batch * self.args.sequence / seconds,
            "peak_bytes": memory.used_bytes(),
        }  # fmt: skip
        is_finite = math.isfinite(loss) and (self.args.release or math.isfinite(norm))
        self.in_succession = 0 if is_finite else self.in_succession + 1
        if not is_finite:
            row["skipped"] = True
            self.skipped += 1
        self.log(**row)
        most = _MOST_SKIPPED if self.args.skip_nonfinite else 0
        if self.in_succession > most:
            raise ValueError(self._why_not_finite(loss, norm, rate))
        return row

    def _why_not_finite(self, loss: float, norm: float, rate: float) -> str:
        """Describe a step whose loss or gradient is not finite, and its likely cause."""
        where = f"step {self.step}: the loss is {loss}, and the norm of the gradient {norm}"
        if self.step == self.skipped and not math.isfinite(loss):
            tensors = huggingface.tensors_of(self.args.model).items()
            wrong = [n for n, t in tensors if not np.isfinite(t.read().astype(np.float32)).all()]
            cause = "No weight has changed yet; " + (
                f"{wrong[0]} of {self.args.model} is not finite"
                if wrong
                else "try --compute float32"
            )
        elif math.isfinite(loss):
            cause = "The backward pass overflows: try --compute float32, or a lower --lr"
        else:
            cause = (
                f"The learning rate, {rate:.3g} here, is likely too high: begin again with a lower "
                "--lr, or a longer --warmup, and another --out"
            )
        more = "" if self.args.skip_nonfinite else ". --skip-nonfinite skips such steps"
        return f"{where}. {cause}{more}. No model was written"

    def evaluate(self) -> float:
        """Return the mean loss of the held-out rows, and log it."""
        total, rows = 0.0, self.held_out
        size = min(self.args.batch // self.micro_batches, len(rows))
        for at in range(0, len(rows), size):
            numbers = np.arange(at, at + size)
            some = rows[numbers % len(rows)]
            weights = some.weights * (numbers < len(rows))[:, None]
            batch = Packed(some.tokens, some.segments, weights)
            total += float(self.held_out_loss(self.trained, self.frozen, batch))
        loss = total / max(float(rows.weights.sum()), 1.0)
        self.log(validation_loss=loss)
        return loss

    @cached_property
    def held_out_loss(self) -> Callable[..., jax.Array]:
        """(trained, frozen, batch) -> the weighted sum of losses."""
        model = self.setup.model
        if self.args.offload == WEIGHTS:
            return lambda trained, frozen, batch: self.take_step.loss(
                trained, self.state, batch, frozen
            )
        return jax.jit(lambda trained, frozen, batch: model(joined(trained, frozen), batch))


def read_rows(args: argparse.Namespace, texts: Texts) -> tuple[Rows, Rows]:
    """Return the rows to train on and the held-out ones."""
    data, held_out = texts.read(args.data, args.sequence), None
    if args.validation:
        held_out = texts.read(args.validation, args.sequence)
    elif args.held_out:
        data, held_out = data.split(args.held_out, args.seed)
    say("\n".join(str(one) for one in (data, held_out) if one))
    return data.rows, held_out.rows if held_out else data.rows[:0]


def prepare(args: argparse.Namespace) -> Run:
    """Read data and model, compile the step, and start or restore the run."""
    if args.offload:
        shared.allow_pinned_memory()
    check_implementation(args.implementation)
    if not args.model.is_dir():
        raise ValueError(
            f"--model {args.model} is no folder: download a model of huggingface.co into one, with "
            "`hf download NAME --local-dir FOLDER`"
        )
    first, of_run = output.begin(args)
    if args.resume:
        none = f"no checkpoint in {args.out}: the run begins at step 0"
        say(f"the run goes on from the checkpoint of step {first}" if first else none)
    shape = huggingface.read_shape(args.model, say)
    texts = Texts(args.model, shape.vocab)
    rows, held_out = read_rows(args, texts)
    total = args.steps * args.batch if args.steps else max(1, round(args.epochs * len(rows)))
    setup = make_setup(args, shape, -(-total // args.batch))
    micro_batches, step = fit(setup, args.micro_batch or of_run)
    of_trained, *_ = jax.eval_shape(partial(start, setup), setup.weights)
    load = huggingface.load_in_turn if args.offload == WEIGHTS else huggingface.load
    trained, frozen, state = start(setup, load(args.model, setup.model, setup.dtype))
    here = SingleDeviceSharding(jax.local_devices()[0])
    there = here.with_memory_kind("pinned_host")
    streams = args.offload == WEIGHTS and not args.lora  # trained weights
    if args.offload and not streams:  # on the device for which the step was compiled
        trained = jax.device_put(trained, here)
    if first:
        del trained, state
        places = (here if args.lora else there) if args.offload else None
        like = jax.tree.map(lambda p: p.update(sharding=there if streams else None), of_trained)
        trained, state = checkpoint.restore(
            args.out / output.CHECKPOINTS, setup.tx, like, step=first, shardings=places
        )
    else:
        output.write_run(args, args.batch // micro_batches)
    trained, frozen, state = moved(setup, trained, frozen, state)
    report = lowmem.memory.report(setup.tx, of_trained)
    say(
        f"{args.model.name}: {report.parameters / 1e6:,.1f}M trained parameters, {args.optimizer}, "
        f"{setup.settings.steps} steps of {args.batch} rows, {args.batch // micro_batches} at once"
    )
    skipped = output.cut_log(args.out, first) if first else 0
    return Run(
        setup, texts, rows, held_out, step, micro_batches, total, trained, frozen, state, first,
        skipped,
    )  # fmt: skip


def train(run: Run) -> None:
    """Take the steps, evaluating, saving and showing; signals take effect after a step."""
    received: set[int] = set()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {n: signal.signal(n, lambda number, frame: received.add(number)) for n in numbers}
    try:
        with shared.progress_bar("steps", disable=not sys.stdout.isatty()) as progress:
            take_steps(run, progress, received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take_steps(run: Run, progress: Any, received: set[int]) -> None:
    """Take the steps; raise KeyboardInterrupt, with a checkpoint saved, if a signal says so."""
    args, last = run.args, min(run.args.until or run.steps, run.steps)
    saved = time.monotonic()
    task = progress.add_task("", total=last, completed=run.step, now="")

    def evaluate() -> None:
        if len(run.held_out):
            say(f"step {run.step}/{run.steps}  held-out loss {run.evaluate():.4f}")

    if run.step == 0:
        evaluate()
    while run.step < last:
        row = run.advance()
        now = f"loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s"
        progress.update(task, completed=run.step, now=now)
        if run.step % args.print_every == 0 or run.step in (1, last) or "skipped" in row:
            now += f"  {row['peak_bytes'] / memory.GIB:.2f} GiB"
            say(f"step {run.step}/{run.steps}  {now}{'  skipped' * row.get('skipped', False)}")
        if run.step % args.evaluate_every == 0 or run.step == run.steps:
            evaluate()
        if args.save_every:
            due = run.step % args.save_every == 0
        else:
            due = time.monotonic() - saved >= _SAVE_SECONDS
        if due or received or run.step == last:
            run.save()
            saved = time.monotonic()
        if stopping := received - {signal.SIGUSR1}:
            raise KeyboardInterrupt(max(stopping))
        received.clear()


def generate(run: Run) -> None:
    """Print what the model generates from the prompts."""
    args = run.args
    continued = jax.jit(run.setup.model.generate, static_argnums=(2, 4))
    params = joined(run.trained, run.frozen) if args.prompt else None
    for prompt in args.prompt:
        ids = run.texts.encode(prompt)
        tokens = continued(
            params, np.array([ids]), args.tokens, jax.random.key(args.seed), args.temperature
        )
        answer = run.texts.decode(np.asarray(tokens)[0, len(ids) :].tolist())
        say(f"{prompt!r}, after {run.step} steps:\n{answer}")
        run.log(prompt=prompt, answer=answer)


def masters_on_host(trained: Any, state: Any) -> Any:
    """Return the f32 weights in host memory; the device makes one parameter at a time."""

    def master(keys: tuple[Any, ...], _: jax.Array) -> np.ndarray:
        alone = part(trained, lambda path: path == leaf_path(keys))
        return np.asarray(jax.tree.leaves(lowmem.master_params(alone, state))[0])

    return jax.tree_util.tree_map_with_path(master, trained)


def export(run: Run) -> None:
    """Write the model, and its adapters if it has some."""
    args, model, trained = run.args, run.setup.model, release.stacked(run.trained)
    is_wide = args.dtype == "float32" or not run.setup.is_bf16
    if model.lora or (is_wide and not args.offload):
        trained = masters_on_host(trained, release.stacked(run.state))
    if model.lora is not None:
        huggingface.save_adapters(args.out / output.ADAPTER, args.model, model, trained)
    huggingface.save(args.out / output.MODEL, args.model, model, trained, args.dtype)


def main(arguments: list[str] | None = None) -> Run:
    # by default JAX takes three quarters of a GPU, too little for what would fit
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")
    args, run = parse_arguments(arguments), None
    try:
        run = prepare(args)
        if run.step == 0:
            generate(run)
        train(run)
        if run.step == run.steps:
            generate(run)
            export(run)
        output.draw(args.out, args.optimizer)
        say(output.contents(args.out))
    except (OSError, ValueError, MemoryError) as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt as error:
        step = checkpoint.latest_step(args.out / output.CHECKPOINTS) if run else None
        where = f"continue from step {step} with --resume" if step else "nothing was saved"
        print(f"stopped; {where}", file=sys.stderr)
        (number,) = error.args or (signal.SIGINT,)
        raise SystemExit(128 + number) from None
    except jax.errors.JaxRuntimeError as error:
        if not shared.is_out_of_memory(error):
            raise
        message = shared.out_of_memory_message(error, args.offload)
        print(f"out of memory: {message}", file=sys.stderr)
        rows = args.batch // run.micro_batches if run else args.micro_batch or args.batch
        fewer = f"--micro-batch {rows // 2} instead of {rows}, " if rows > 1 else ""
        print(f"These need less: {fewer}{fewer_bytes(args)}", file=sys.stderr)
        raise SystemExit(OUT_OF_MEMORY) from None
    return run


if __name__ == "__main__":
    main()
