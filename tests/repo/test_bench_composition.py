"""The suite that compiles the chains of docs/guides/composition.md beside the drop-ins."""

import optax_lowmem as lowmem
from benchmarks.suites import composition
from tests.claims_cases import made


def test_every_optimizer_of_the_page_is_found():
    found = dict(composition.transformations())
    assert {*lowmem.OPTIMIZERS, "adam_mini"} - {"flash_adam", "flash_muon"} <= found.keys()
    assert set(composition.OPTIMIZERS) <= found.keys()
    assert all(both.keys() == set(composition.KINDS) for both in found.values())


def test_a_chain_holds_more_beside_a_step(monkeypatch):
    """f32 masters, moments and updates at once; the same state."""
    monkeypatch.setattr(composition, "SIDE", 256)
    both = dict(composition.transformations())["flash_lion"]
    drop_in, chain = (composition.measure(both[kind]) for kind in composition.KINDS)
    (state, unit), (other, _) = (one["state_bytes_per_param"] for one in (drop_in, chain))
    assert unit == "bytes" and abs(state - other) < 0.01 and 2 < state < 2.1
    assert chain["temp_bytes_per_param"][0] > 2 * drop_in["temp_bytes_per_param"][0]


def test_the_table():
    rows = [
        made("composition", "flash_lion", kind, metric, value)
        for kind, value in (("drop-in", 1.0), ("chain", 2.0))
        for metric in ("state_bytes_per_param", "temp_bytes_per_param")
    ]
    _, body, used = composition.table(rows)
    assert body == [["`flash_lion`", "1.00", "1.0", "2.0"]] and used == rows
    assert "run composition" in composition.TABLES["composition"]([])
