"""Plans of a training step's memory, and the command that prints them."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import optax_lowmem as lowmem
from optax_lowmem import memory, plan

TINY = sorted((Path(__file__).parents[1] / "golden/huggingface").glob("*/config.json"))
LLAMA_8B = {
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "vocab_size": 128_256,
}  # fmt: skip


@pytest.mark.parametrize("file", TINY, ids=lambda file: file.parent.name)
def test_parameters_of_a_decoder(file):
    """As many as are in the files of the model."""
    sizes = plan.decoder(json.loads(file.read_text()))
    stored = 0
    for weights in file.parent.glob("*.safetensors"):
        with weights.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__")
        stored += sum(math.prod(one["shape"]) for one in header.values())
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(sizes.params())) == stored


def test_parts_of_a_plan():
    """Sums by hand: three stacked layers, an embedding, and adapters beside frozen weights."""
    params = {
        "layers": {"w": jax.ShapeDtypeStruct((3, 256, 256), jnp.bfloat16)},
        "embed": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16),
    }
    tx = lowmem.flash_adamw(1e-3)

    def activations(batch):
        return memory.Activations(loss=batch * 1_000_000, backward=batch * 1000)

    budget = 4_000_000
    found = memory.plan(tx, params, budget=budget, activations=activations, stacks=("layers",))
    resident, release = found.modes
    weights = 2 * (3 * 256 * 256 + 64 * 256)
    assert resident.weights == release.weights == weights
    assert resident.state == memory.report(tx, params).state_bytes
    assert (resident.gradients, release.gradients) == (weights, 2 * (256 + 64) * 256)
    fixed = weights + resident.state
    assert resident.total_bytes(0) == fixed + weights
    assert release.total_bytes(2) == fixed + 2_000_000  # the peak is in the loss
    assert release.batch == (budget - fixed) // 1_000_000 == found.best.batch
    line = str(found).splitlines()[1]
    assert line.split()[0] == "resident" and line.split()[-1] == str(resident.batch)
    (adapters,) = memory.plan(
        tx, params, frozen=params, budget=budget, activations=lambda batch: batch
    ).modes
    assert (adapters.weights, adapters.gradients) == (2 * weights, weights)
    nothing = memory.plan(tx, params, budget=1000, activations=lambda batch: batch)
    assert nothing.best is None and "none fits" in str(nothing)


def test_wrong_arguments():
    params, given = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}, {"budget": 1}
    tx = lowmem.flash_adamw(1e-3)
    with pytest.raises(ValueError, match="no stack 'layers'"):
        memory.plan(tx, params, activations=lambda batch: 0, stacks=("layers",), **given)
    with pytest.raises(ValueError, match=r"modes must be among .*\['streamed'\]"):
        memory.plan(tx, params, activations=lambda batch: 0, modes=("streamed",), **given)
    with pytest.raises(ValueError, match="'mamba' is not known"):
        plan.decoder({"model_type": "mamba"})
    with pytest.raises(ValueError, match="'24' is no size"):
        plan.bytes_of("24")
    assert plan.bytes_of("1.5 GB") == 1_500_000_000


def test_command(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    plan.main(["--params", str(tmp_path), "--gpu", "80GiB"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["resident", "release", "lora"]
    assert lines[5].startswith(f"python examples/finetune.py --model {tmp_path} --data FILE")
    plan.main(["--params", str(file), "--gpu", "24GiB", "--lora", "o_proj", "--rank", "4"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("--lora o_proj --rank 4")
    with pytest.raises(SystemExit, match="Nothing fits"):
        plan.main(["--params", str(file), "--gpu", "8GiB"])
    with pytest.raises(SystemExit, match="no matrices"):
        plan.main(["--params", str(file), "--gpu", "24GiB", "--lora", "nothing"])
    with pytest.raises(SystemExit, match="No such file"):
        plan.main(["--params", str(tmp_path / "other.json"), "--gpu", "24GiB"])
