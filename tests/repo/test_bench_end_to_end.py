"""The bench of whole steps: its variants are traced as they say, and a tiny one is measured."""

import jax
import pytest

pytest.importorskip("flax")
pytest.importorskip("rich")

from benchmarks import records  # noqa: E402
from benchmarks.suites.end_to_end import bench as bench_end_to_end  # noqa: E402
from benchmarks.suites.end_to_end import figures as end_to_end_figures  # noqa: E402
from benchmarks.suites.end_to_end import in_torch as end_to_end_torch  # noqa: E402
from benchmarks.suites.end_to_end import tables as end_to_end_tables  # noqa: E402
from optax_lowmem import layers  # noqa: E402


@pytest.fixture(autouse=True)
def as_users_do(monkeypatch):
    """Models broadcast; only the library is held to explicit ranks. (Threads see no context.)"""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")


def test_a_tiny_model(tmp_path, capsys):
    """Steps of two variants and all chunks of the loss, recorded and in the table at the end."""
    file = tmp_path / "records.jsonl"
    bench_end_to_end.main(
        f"--preset tiny --steps 3 --loss 64x8x16 --only default optax.adamw --record {file}".split()
    )
    found = {(r["case"], r["impl"], r["metric"]): r["value"] for r in records.load(file)}
    for case in ("loss and gradients", "loss alone"):
        assert {impl for where, impl, _ in found if where == case} == set(end_to_end_tables.LOSSES)
    losses = [found["llama-tiny", name, "train_loss"] for name in ("default", "optax.adamw")]
    assert losses[0] == pytest.approx(losses[1], abs=0.1)  # three small steps
    assert found["llama-tiny", "default", "tokens_per_s"] > 0
    assert capsys.readouterr().out.count("optax.adamw ") >= 3


def test_the_chunked_loss_is_the_loss():
    """The loss in chunks and that from all logits are one function."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, head = (jax.random.normal(k, (n, 8)) for k, n in zip(keys, (64, 16), strict=False))
    labels = jax.random.randint(keys[2], (64,), 0, 16)
    chunked = layers.linear_cross_entropy(hidden, head, labels, vocab_axis=0, chunk_tokens=16)
    whole = bench_end_to_end.full_loss(hidden, head, labels)
    assert float(chunked) == pytest.approx(float(whole), rel=1e-5)


def measured(case, impl, device="NVIDIA H200", **values):
    own = {"bench": "end_to_end", "case": case, "impl": impl, "device": device}
    return [own | {"metric": name, "value": value} for name, value in values.items()]


def test_tables_and_picture():
    """Ours and torch's, of the device measured last; accumulation is of another batch."""
    common = {"tokens_per_s": 72_973.0, "mfu": 0.577, "compile_s": 15.7}
    rows = [
        *measured("llama-1b", "default", "NVIDIA H100", planned_bytes=2.0**35, **common),
        *measured("llama-1b", "torch-liger", peak_bytes=25.3 * 2**30, **common),
        *measured("llama-1b", "default", planned_bytes=22.1 * 2**30, **common),
        *measured("llama-8b", "fp8-accumulated", planned_bytes=79.0 * 2**30, **common),
        *measured("loss and gradients", "all logits", device_ms=80.9, temporary_bytes=2.0**34),
        *measured("loss alone", "all logits", device_ms=16.4, temporary_bytes=2.0**33),
    ]
    head, body, used = end_to_end_tables.programs(rows)
    assert [row[:2] + row[3:5] for row in body] == [
        ["Llama-3.2-1B", "8 x 2048", "72,973", "22.1"],
        ["Llama-3.2-1B", "8 x 2048", "72,973", "25.3"],
        ["Llama-3.1-8B", "64 x 8 x 1024", "72,973", "79.0"],
    ]
    assert {len(row) for row in body} == {len(head)} and len(used) == 3 * 4
    _, body, _ = end_to_end_tables.losses(rows)
    assert body == [["all logits", "80.9", "16.00", "16.4", "8.00"]]
    figure = end_to_end_figures.draw(rows)
    assert "peak memory, GiB, on one " in figure.axes[-1].get_xlabel()
    with pytest.raises(SystemExit, match="run `benchmarks.run end_to_end` first"):
        end_to_end_figures.draw([])


def test_peers_say_why_they_do_not_run():
    """In a process of their own: what is not installed, not a trace."""
    args = bench_end_to_end.parse_arguments("--preset tiny --peers torch-liger".split())
    if "torch 2" in end_to_end_torch.versions():
        pytest.skip("torch is installed")
    assert "No module named 'torch'" in bench_end_to_end.peer("torch-liger", args)


def test_what_variants_change():
    """Loops, and products in 8 bits, in what XLA is given."""
    args = bench_end_to_end.parse_arguments("--preset tiny --steps 2 --flags=--remat=dots".split())
    loops, barriers = {}, {}
    for name in ("default", "fp8-unrolled", "fp8-accumulated-16", "fp8-accumulated-16-anew"):
        text = bench_end_to_end.lowered(args, name)[1].as_text()
        barriers[name], loops[name] = text.count("optimization_barrier"), text.count("while")
    assert loops["default"] > loops["fp8-unrolled"]
    # micro-batches that quantize hold each kernel back
    assert barriers["fp8-accumulated-16-anew"] != barriers["fp8-accumulated-16"]
    eight_bits = []
    for more in ("", " --head fp8-gradients", " --head fp8"):
        flags = bench_end_to_end.VARIANTS["fp8-unrolled"] + more
        lines = bench_end_to_end.lowered(args, "", flags)[1].as_text().splitlines()
        eight_bits.append(sum("dot_general" in line and "f8E" in line for line in lines))
    assert [count - eight_bits[0] for count in eight_bits] == [0, 2, 3]
