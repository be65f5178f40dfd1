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


PARAMS = {
    "layers": {"w": jax.ShapeDtypeStruct((3, 256, 256), jnp.bfloat16)},
    "embed": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16),
}
LAYER, EMBED = 2 * 256 * 256, 2 * 64 * 256  # bytes of gradients
WEIGHTS = 3 * LAYER + EMBED
TX = lowmem.flash_adamw(1e-3)
STATE = memory.report(TX, PARAMS).state_bytes


def state_of(path):
    return sum(memory.report(TX, PARAMS).by_leaf[path].values())


def planned(batch=1, **given):
    """State, gradients and activations at the peak, by mode, of activations of 10 bytes a row.

    Of the mode `stream`, weights, too.
    """
    made = {"activations": lambda batch: 10 * batch, "budget": 2**30, "stacks": ("layers",)}
    found = memory.plan(TX, PARAMS, **{**made, **given})
    peaks = {mode.name: mode.peak(batch) for mode in found.modes}
    assert {peak[0] for name, peak in peaks.items() if name != "stream"} == {WEIGHTS}
    return {name: peak if name == "stream" else peak[1:] for name, peak in peaks.items()}


def test_parts_of_a_plan():
    """Sums by hand: three stacked layers and an embedding."""
    layer_state = (state_of("layers/w") - 3 * LAYER) // 3
    assert planned(2) == {
        "resident": (STATE, WEIGHTS, 20),
        "release": (STATE + layer_state, LAYER + EMBED, 20),
        "offload": (3 * layer_state, 2 * LAYER + EMBED, 20),
        "stream": (3 * LAYER, 3 * layer_state, LAYER + EMBED, 20),
    }
    assert planned(accumulate=True) == {
        "resident": (STATE, 2 * WEIGHTS, 10),
        "offload": (3 * layer_state, 3 * LAYER + EMBED, 10),
        "stream": (3 * LAYER, 3 * layer_state, 2 * LAYER + EMBED, 10),
    }

    def at_the_end(batch):
        return memory.Activations(loss=batch, layers=0, end=1000 * LAYER)

    embed_state = state_of("embed") - EMBED
    assert planned(activations=at_the_end) == {
        "resident": (STATE, 3 * LAYER, 1000 * LAYER),
        "release": (STATE, 0, 1000 * LAYER),
        "offload": (embed_state, 0, 1000 * LAYER),
        "stream": (EMBED, embed_state, 0, 1000 * LAYER),
    }


def test_largest_layer_includes_its_state():
    """A bf16 layer with smaller weights than an f32 layer has more bytes: it has a correction."""
    params = {
        "wide": {"w": jax.ShapeDtypeStruct((3, 64, 96), jnp.float32)},
        "narrow": {"w": jax.ShapeDtypeStruct((3, 64, 160), jnp.bfloat16)},
    }
    (mode,) = memory.plan(
        TX, params, stacks=tuple(params), modes=("release",), budget=2**30,
        activations=lambda batch: 0,
    ).modes  # fmt: skip
    report, size = memory.report(TX, params), 64 * 160 * 2
    layer_state = sum(report.by_leaf["narrow/w"].values()) // 3 - size
    assert mode.peak(1)[1:3] == (report.state_bytes + layer_state, size)


def test_frozen_weights_on_the_host():
    """Sums by hand: adapters stay on the device, with a copy of one layer's state."""
    adapters = {"layers": {"a": jax.ShapeDtypeStruct((3, 256, 8), jnp.bfloat16)}}
    report, trained = memory.report(TX, adapters), 3 * 256 * 8 * 2
    state, layer_state = (
        report.state_bytes,
        (sum(report.by_leaf["layers/a"].values()) - trained) // 3,
    )

    def peak(**sizes):
        of_batch = memory.Activations(**{"loss": 0, "layers": 0, "end": 0} | sizes)
        (mode,) = memory.plan(
            TX, adapters, frozen=PARAMS, stacks=("layers",), modes=("stream-frozen",),
            budget=2**30, activations=lambda batch: of_batch,
        ).modes  # fmt: skip
        assert mode.host == WEIGHTS and mode.copies == (WEIGHTS, WEIGHTS, 0)
        return mode.peak(1)

    assert peak(loss=2**20) == (trained + EMBED + LAYER, state, 0, 2**20)
    assert peak(end=2**20) == (trained + EMBED + 2 * LAYER, state, 0, 2**20)
    assert peak(layers=2**20) == (trained + 3 * LAYER, state + layer_state, trained // 3, 2**20)


def test_what_fits():
    budget = 4_000_000

    def activations(batch):
        return memory.Activations(loss=batch * 1_000_000, layers=0, end=0)

    found = memory.plan(TX, PARAMS, budget=budget, activations=activations, stacks=("layers",))
    resident, release, offload, stream = found.modes
    assert release.batch == (budget - WEIGHTS - STATE) // 1_000_000 == found.best.batch
    assert resident.total_bytes(release.batch) == WEIGHTS + STATE + release.batch * 1_000_000
    assert (resident.host, release.host, offload.host) == (0, 0, STATE)
    assert stream.host == WEIGHTS + STATE and stream.copies == (WEIGHTS, *[WEIGHTS + STATE] * 2)
    # 2 FLOP per token and parameter forward, and 2 bytes; 6 backward, and 5.2 bytes
    assert stream.copies.tokens(WEIGHTS // 2, 100e12, 25e9) == pytest.approx(4000)
    number, moved = WEIGHTS // 2, stream.copies._replace(forward=0)
    assert moved.tokens(number, 6e12, number) == pytest.approx(1e12 * (WEIGHTS + STATE) / number**2)
    line = str(found).splitlines()[1]
    assert line.split()[0] == "resident" and line.split()[-1] == str(resident.batch)
    (adapters,) = memory.plan(
        TX, PARAMS, frozen=PARAMS, budget=budget, activations=lambda batch: batch
    ).modes
    assert adapters.peak(1) == (2 * WEIGHTS, STATE, WEIGHTS, 1)
    nothing = memory.plan(TX, PARAMS, budget=1000, activations=lambda batch: batch)
    assert nothing.best is None and "none: 0.00 GiB too large" not in str(nothing)
    assert "too large" in str(nothing)


def test_wrong_arguments():
    params, given = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}, {"budget": 1}
    tx = lowmem.flash_adamw(1e-3)
    with pytest.raises(ValueError, match="no stack 'layers'"):
        memory.plan(tx, params, activations=lambda batch: 0, stacks=("layers",), **given)
    with pytest.raises(ValueError, match=r"modes must be among .*\['streamed'\]"):
        memory.plan(tx, params, activations=lambda batch: 0, modes=("streamed",), **given)
    with pytest.raises(ValueError, match="'mamba' is not known"):
        plan.decoder({"model_type": "mamba"})
    with pytest.raises(ValueError, match="'24' is neither a size"):
        plan.bytes_of("24")
    assert plan.bytes_of("1.5 GB") == 3 * 2**29


def run(capsys, *arguments):
    """The lines that the command prints."""
    plan.main(list(arguments))
    return capsys.readouterr().out.splitlines()


def test_command(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    lines = run(capsys, "--params", str(tmp_path), "--gpu", "80GiB")
    modes = ["resident", "release", "offload", "stream"]
    modes += ["lora", "qlora", "lora-stream", "qlora-stream"]
    assert [line.split()[0] for line in lines[3:11]] == modes
    command = f"    python examples/finetune.py --model {tmp_path} --data FILE"
    assert lines[-1].startswith(command) and lines[-1].endswith("--batch 23")
    lines = run(capsys, "--params", str(file), "--gpu", "48GiB")
    assert lines[-1].endswith("--batch 5 --release")
    lines = run(capsys, "--params", str(file), "--gpu", "24GB", "--pcie", "50")
    assert "offload, with at most 9 rows" in lines[12] and "name the GPU" in lines[13]
    assert "23.84 GiB to the GPU and 23.84 GiB back" in lines[-3]
    assert "0.51 s and 0.51 s at 50 GB/s" in lines[-3]
    assert "264 KiB per token" in lines[-2] and "back: 4.64 GiB" in lines[-2]
    assert "--batch" in lines[-1] and "--offload --micro-batch" in lines[-1]
    assert lines[-1].startswith("    XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async python examples/")
    lines = run(capsys, "--params", str(file), "--gpu", "RTX 3060")
    assert "--offload weights --micro-batch" in lines[-1] and "computation" not in "".join(lines)
    assert "53.75 GiB to the GPU and 38.80 GiB back" in lines[-3]
    lines = run(capsys, "--params", str(file), "--gpu", "RTX 4080")
    assert "more than 2,716 tokens" in lines[-3] and "the command below has 47,104" in lines[-3]
    # 8 FLOP per parameter and token, or copies of 53.75 GiB and 38.80 GiB at 0.25 GB/s
    assert "RTX 4080: at most 1,057 tokens/s (at 70% of 97 TFLOP/s)" in lines[13]
    lines = run(
        capsys, "--params", str(file), "--gpu", "RTX 4080", "--tflops", "970", "--pcie", "0.25"
    )
    assert "more than 2,716,090 tokens" in lines[-3] and "at most 204 tokens/s" in lines[13]
    words = "--gpu 5GB --tflops 100 --sequence 512".split()
    speed = next(line for line in run(capsys, "--params", str(file), *words) if "Speed" in line)
    assert "at most 1,453 tokens/s" in speed  # adapters: 6 FLOP per parameter and token
    lines = run(capsys, "--params", str(file), "--gpu", "4GiB", "--lora", "all-linear")
    assert "29.92 GiB to the GPU and 0.00 GiB back" in lines[-3]
    assert "--lora q_proj,k_proj" in lines[-1] and "--offload weights --micro-batch" in lines[-1]


def test_names_of_gpus(tmp_path, capsys):
    """With or without the maker; GB are GiB; others name those that are near."""
    assert plan.bytes_of("RTX 4090") == plan.bytes_of("NVIDIA GeForce RTX4090") == 24_564 * 2**20
    assert plan.bytes_of("a100-80gb") == plan.bytes_of("80GB") == plan.bytes_of("80GiB") == 80 << 30
    for text, near in (("RTX 4091", "RTX 4090"), ("A100", "A100 40GB, A100 80GB"), ("24", "24GiB")):
        with pytest.raises(ValueError, match=f"'{text}' is neither a size.*{near}"):
            plan.bytes_of(text)
    for text in ("-3GiB", "1.2.3GiB", "nanGB", "GiB", ""):
        with pytest.raises(ValueError, match="is neither a size"):
            plan.bytes_of(text)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    lines = run(capsys, "--params", str(tmp_path), "--gpu", "RTX 4090")
    assert "RTX 4090: 23.99 GiB, of which 22.31 GiB are usable (93%)" in lines[0]


def test_optax_in_f32(tmp_path, capsys):
    """16 bytes of weights, state and gradients per parameter, and no modes of this package's."""
    sizes = plan.decoder(LLAMA_8B)
    modes = plan.plan_decoder(sizes, "optax.adamw", 0, 2048, (("q_proj",), 8)).modes
    resident, lora, qlora = modes
    number = sum(math.prod(p.shape) for p in jax.tree.leaves(sizes.params()))
    table = 128_256 * 4096
    held, state, gradients, _ = resident.peak(1)
    assert held == 4 * number
    assert state == 8 * number + 4 and gradients == 4 * (number - 2 * table - 4096)
    adapters = 4 * 32 * 8 * (4096 + 4096)
    of_lora, of_qlora = (mode.peak(1)[0] for mode in (lora, qlora))
    assert lora.name == "lora" and of_lora - adapters == 2 * (number + 65 * 4096)  # f32 norms
    matrices = number - 2 * table - 65 * 4096
    saved = (2 - 1 / 2 - 1 / 64 - 1 / 4096) * matrices - 4 * 7 * 32  # and an offset for each
    assert qlora.name == "qlora" and of_lora - of_qlora == saved
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    lines = run(capsys, "--params", str(tmp_path), "--gpu", "H200", "--optimizer", "optax.adamw")
    assert [line.split()[0] for line in lines[3:6]] == ["resident", "lora", "qlora"]
    assert lines[-1].count("--optimizer optax.adamw") == 1


GEMMA = LLAMA_8B | {"model_type": "gemma2"}


@pytest.mark.parametrize(
    ("config", "mixed"),
    [
        (GEMMA, True),
        (GEMMA | {"layer_types": ["full_attention"] * 32}, False),
        (LLAMA_8B | {"model_type": "qwen2"}, False),
        (LLAMA_8B | {"model_type": "qwen2", "use_sliding_window": True}, True),
    ],
)
def test_release_takes_layers_that_are_equal(config, mixed):
    modes = plan.plan_decoder(plan.decoder(config), "flash_adamw", 0, 2048).modes
    names = ["resident", "release", "offload", "stream"]
    assert [mode.name for mode in modes] == names[: 1 if mixed else 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "config.json: a configuration is an object, not a list"),
        (json.dumps({"model_type": "llama"}), "the llama lacks hidden_size, lacks intermediate"),
        (json.dumps(LLAMA_8B | {"quantization_config": {}}), "has quantization_config {}"),
        (json.dumps(LLAMA_8B | {"rope_scaling": {"type": "yarn"}}), "has rope_type 'yarn'"),
        (json.dumps(LLAMA_8B | {"num_hidden_layers": 0}), "has num_hidden_layers 0"),
    ],
)
def test_files_without_a_plan(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SystemExit, match=message) as stopped:
        plan.main(["--params", str(tmp_path), "--gpu", "24GiB"])
    assert "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    "flag", ["--rank=-1", "--rank=0", "--sequence=0", "--pcie=0", "--pcie=inf"]
)
def test_numbers_that_are_not_above_zero(capsys, flag):
    with pytest.raises(SystemExit):
        plan.main(["--params", "x", "--gpu", "24GiB", flag])
    assert (
        f"argument {flag.split('=')[0]}: {flag.split('=')[1]} is not above 0"
        in capsys.readouterr().err
    )


def test_nothing_fits(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    with pytest.raises(SystemExit, match=r"qlora-stream needs the least memory: a GPU of 1\.7 GiB"):
        plan.main(["--params", str(file), "--gpu", "1GiB"])
    with pytest.raises(SystemExit, match="With --sequence 32768, stream does"):
        plan.main(["--params", str(file), "--gpu", "20GiB", "--sequence", "65536"])
    with pytest.raises(SystemExit, match="no matrix of the layers is named 'nothing'"):
        plan.main(["--params", str(file), "--gpu", "24GiB", "--lora", "nothing"])
    with pytest.raises(SystemExit, match="no file .*/other/config.json: download"):
        plan.main(["--params", str(tmp_path / "other"), "--gpu", "24GiB"])
