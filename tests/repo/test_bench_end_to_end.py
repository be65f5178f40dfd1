"""The bench of whole steps: its variants are traced as they say, and a tiny one is measured."""

import dataclasses

import jax
import pytest

pytest.importorskip("flax")
pytest.importorskip("rich")

from benchmarks import bench_end_to_end, records  # noqa: E402


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
        f"--preset tiny --steps 3 --loss 64x8x16 --only default products-alone --record {file} "
        "--flags=--remat=dots".split()
    )
    found = {(r["case"], r["impl"], r["metric"]): r["value"] for r in records.load(file)}
    losses = [value for (_, _, metric), value in found.items() if metric == "loss"]
    assert len(losses) == 6 and losses == pytest.approx(losses[:1] * 6, rel=1e-2)
    same = [found["llama-tiny", name, "train_loss"] for name in ("default", "products-alone")]
    assert same[0] == pytest.approx(same[1], abs=1e-4)  # attention by XLA, whichever is kept
    assert found["llama-tiny", "default", "tokens_per_s"] > 0
    assert capsys.readouterr().out.count("products-alone ") == 3


def test_what_variants_change():
    """Loops, and barriers against merging, in what XLA is given."""
    args = bench_end_to_end.parse_arguments("--preset tiny --steps 2 --flags=--remat=dots".split())
    barriers, loops = {}, {}
    for name in ("default", "chunk-512", "unrolled", "unrolled-merged", "lean-unrolled"):
        variant = bench_end_to_end.VARIANTS[name]
        if variant.chunk_tokens:
            variant = dataclasses.replace(variant, chunk_tokens=64)
        text = bench_end_to_end.lowered(args, variant)[1].as_text()
        barriers[name], loops[name] = text.count("optimization_barrier"), text.count("while")
    assert barriers["unrolled"] > barriers["unrolled-merged"]
    assert loops["default"] > loops["unrolled"] == loops["unrolled-merged"]
    assert loops["chunk-512"] == loops["default"] + 1
    assert barriers["lean-unrolled"] > 0 and loops["lean-unrolled"] == loops["unrolled"]
