"""MaxText's pre-training with FSDP, on widths that the groups' scales do not divide.

AdamW and Muon, the state in host memory, and resuming.
"""

import common  # isort: skip

import functools
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # read by MaxText's import

import jax  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from maxtext import configs  # noqa: E402
from maxtext.optimizers import optimizers  # noqa: E402
from maxtext.trainers.pre_train import train as maxtext  # noqa: E402
from maxtext.utils import train_utils  # noqa: E402
from maxtext.utils.muon_utils import get_muon_weight_dimension_numbers  # noqa: E402

import optax_lowmem as lowmem  # noqa: E402
from optax_lowmem.flax import substitute  # noqa: E402

PLAIN = optimizers.get_optimizer
MUON = "opt_type=muon", "muon_consistent_rms=0.2"
OFFLOAD = "optimizer_memory_host_offload=True"


def get_optimizer(config, learning_rate_schedule, model=None, mesh=None):
    kind = config.opt_type.value
    if config.skip_step_on_spikes or config.trainable_parameters_mask:
        raise ValueError("unsupported: skip_step_on_spikes, trainable_parameters_mask")
    if kind == "muon" and config.param_scan_axis == 1 and config.decoder_block.value != "deepseek4":
        return lowmem.flash_muon(
            learning_rate_schedule, beta=config.muon_beta, eps=config.adam_eps,
            weight_decay=config.muon_weight_decay, consistent_rms=config.muon_consistent_rms,
            adam_b1=config.adam_b1, adam_b2=config.adam_b2, adam_eps_root=config.adam_eps_root,
            adam_weight_decay=config.adam_weight_decay,
            muon_weight_dimension_numbers=get_muon_weight_dimension_numbers(model, config),
        )  # fmt: skip
    if kind != "adamw":
        raise ValueError(f"opt_type={kind} is unsupported: adamw, or muon with param_scan_axis=1")
    return lowmem.flash_adamw(
        learning_rate_schedule, b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps,
        eps_root=config.adam_eps_root, weight_decay=config.adam_weight_decay,
        mask=optimizers.get_adamw_mask(config),
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


def train(impl, *options):
    optimizers.get_optimizer = PLAIN if impl == common.PLAIN else get_optimizer
    weights = f"weight_dtype={common.DTYPES[impl].__name__}"
    with tempfile.TemporaryDirectory() as folder:
        options = weights, "enable_checkpointing=False", *options
        losses, state = run(folder, common.STEPS, *options)
    params = nnx.state(state.model, nnx.Param) if hasattr(state, "model") else state["model"]
    return losses, state, sum(x.size for x in jax.tree.leaves(params))


def like_its_muon():
    """For both `muon_type`s of it, whose matrices are the same."""
    ends, sizes = {}, {}
    for impl in common.DTYPES:
        losses, state, size = train(impl, *MUON)
        ends[impl] = np.mean(losses[-3:])
        sizes[impl] = common.bytes_on_first_device(state) / size
        name = impl.replace("AdamW", "Muon").replace("adamw", "muon")
        print(f"{name}: loss {ends[impl]:.3f}, {sizes[impl]:.2f} bytes per parameter", flush=True)
        assert ends[impl] < 0.8 * losses[0], "it does not learn"
    for impl in common.OURS, common.OURS_BF16:
        np.testing.assert_allclose(ends[impl], ends[common.PLAIN], rtol=0.05, err_msg=impl)
    shown = (4.33, 2.65, 2.15)  # on the page of frameworks
    np.testing.assert_allclose(list(sizes.values()), shown, atol=0.005)
    sharded, _, _ = train(common.PLAIN, *MUON, "muon_type=maxtext_muon")
    np.testing.assert_allclose(np.mean(sharded[-3:]), ends[common.OURS], rtol=0.01)


def keeps_the_state_in_host_memory():
    """With the losses of a state on the devices.

    MaxText 0.2.5 cannot resume such a run, with optax neither: it restores the step counter of
    `nnx.Optimizer` to the device, where the jitted step expects it in host memory.
    """
    for options in (), MUON:
        losses, state, _ = train(common.OURS_BF16, *options, OFFLOAD)
        assert losses == train(common.OURS_BF16, *options)[0]
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(nnx.state(state.optimizer))}
        assert kinds == {"pinned_host"}, kinds


def refuses():
    """With `param_scan_axis=0` MaxText's dimension numbers take layers for rows of matrices."""
    for options in ("opt_type=sgd",), ("opt_type=adam_pax",), (*MUON, "param_scan_axis=0"):
        try:
            train(common.OURS, *options)
        except ValueError as error:
            assert f"{options[0]} is unsupported" in str(error), error
        else:
            raise AssertionError(options)


def resumes(*options):
    """Through MaxText's own checkpoints."""
    optimizers.get_optimizer = get_optimizer
    options += ("weight_dtype=bfloat16", "checkpoint_period=2", "async_checkpointing=False")
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        whole, _ = run(one, 6, *options)
        run(other, 3, *options)
        rest, _ = run(other, 6, *options)
    assert 0 < len(rest) < 6 and rest == whole[-len(rest) :], (whole, rest)


if __name__ == "__main__":
    common.compare("maxtext", train)
    like_its_muon()
    keeps_the_state_in_host_memory()
    refuses()
    resumes()
    resumes(*MUON)
