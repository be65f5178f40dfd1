"""MaxText's pre-training with FSDP, on widths that the groups' scales do not divide; resume."""

import common  # isort: skip

import functools
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # read by MaxText's import

import jax  # noqa: E402
from flax import nnx  # noqa: E402
from maxtext import configs  # noqa: E402
from maxtext.optimizers import optimizers  # noqa: E402
from maxtext.trainers.pre_train import train as maxtext  # noqa: E402
from maxtext.utils import train_utils  # noqa: E402

import optax_lowmem as lowmem  # noqa: E402
from optax_lowmem.flax import substitute  # noqa: E402

PLAIN = optimizers.get_optimizer


def get_optimizer(config, learning_rate_schedule, model=None, mesh=None):
    ignored = config.skip_step_on_spikes, config.trainable_parameters_mask, config.adam_eps_root
    if any(ignored) or config.opt_type != "adamw":
        raise ValueError("a setting of MaxText that this get_optimizer does not apply")
    return lowmem.flash_adamw(
        learning_rate_schedule, b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps,
        weight_decay=config.adam_weight_decay, mask=optimizers.get_adamw_mask(config),
    )  # fmt: skip


def run(folder, steps, *options):
    """Return the losses of a run, and its training state."""
    states, setup = [], train_utils.setup_train_loop

    @functools.wraps(setup)
    def keeping(*args, **kwargs):
        result = setup(*args, **kwargs)
        states.append(result[-1])
        return result

    metrics = Path(folder, "metrics.jsonl")
    metrics.unlink(missing_ok=True)
    train_utils.setup_train_loop = keeping
    sys.argv = [
        "train", str(Path(configs.__file__).parent / "base.yml"), "run_name=run",
        f"base_output_directory={folder}", f"metrics_file={metrics}", f"steps={steps}",
        "learning_rate_schedule_steps=30", f"learning_rate={common.RATE}",
        "dataset_type=synthetic", "hardware=cpu", "skip_jax_distributed_system=True",
        "base_emb_dim=160", "base_mlp_dim=320", "base_num_query_heads=4",
        "base_num_kv_heads=2", "head_dim=32", "base_num_decoder_layers=2",
        "vocab_size=256", "max_target_length=32", "per_device_batch_size=4",
        f"ici_fsdp_parallelism={common.DEVICES}", "attention=dot_product",
        "enable_tensorboard=False", "enable_goodput_recording=False",
        "monitor_goodput=False", "enable_checkpoint_cloud_logger=False", *options,
    ]  # fmt: skip
    try:
        with substitute():
            maxtext.main(sys.argv)
    finally:
        train_utils.setup_train_loop = setup
    rows = map(json.loads, metrics.read_text().splitlines())
    return [row["learning/loss"] for row in rows], states[-1]


def train(impl):
    optimizers.get_optimizer = PLAIN if impl == common.PLAIN else get_optimizer
    weights = f"weight_dtype={common.DTYPES[impl].__name__}"
    with tempfile.TemporaryDirectory() as folder:
        losses, state = run(folder, common.STEPS, weights, "enable_checkpointing=False")
    params = nnx.state(state.model, nnx.Param) if hasattr(state, "model") else state["model"]
    return losses, state, sum(x.size for x in jax.tree.leaves(params))


def resumes():
    """Through MaxText's own checkpoints."""
    optimizers.get_optimizer = get_optimizer
    options = ("weight_dtype=bfloat16", "checkpoint_period=2", "async_checkpointing=False")
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        whole, _ = run(one, 6, *options)
        run(other, 3, *options)
        rest, _ = run(other, 6, *options)
    assert 0 < len(rest) < 6 and rest == whole[-len(rest) :], (whole, rest)


if __name__ == "__main__":
    common.compare("maxtext", train)
    resumes()
