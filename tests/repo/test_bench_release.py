"""The table and the picture of an 8B Llama's memory, from made records."""

import pytest

from benchmarks import records, tables
from benchmarks.suites import release

GIB = 2**30
N = 8_030_261_248


def made(case, release, **values):
    flags = {"release": release, "parameters": N}
    return [
        {"bench": "train", "case": case, "impl": "any", "metric": metric, "value": value,
         "unit": "", "device": "GPU", "jax": "1", "commit": "c", "flags": flags}
        for metric, value in values.items()
    ]  # fmt: skip


RELEASED = made(
    "llama-8b clip=0.0 release=True/flash_adamw", True, bytes_per_param=5.19, fits=1,
    device_bytes=38 * GIB, argument_bytes=38 * GIB, temporary_bytes=4 * GIB,
    backward_bytes=3.5 * GIB, beside_backward=5.2, limit_bytes=75 * GIB,
)  # fmt: skip
PLAIN = made("llama-8b/optax.adamw", False, bytes_per_param=12.0, fits=0, device_bytes=90 * GIB)
OTHER = made("llama-1b/optax.adamw", False, bytes_per_param=12.0, fits=1)


def test_rows():
    """The table lists what fits first, uses the newest records and has no unmeasured number."""
    older = made("llama-8b/optax.adamw", False, fits=1)
    head, body, used = release.table([*older, *PLAIN, *OTHER, *RELEASED])
    rows = [dict(zip(head, row, strict=True)) for row in body]
    assert [row["Llama-3.1-8B, one GPU"] for row in rows] == [
        "`flash_adamw`, gradient release",
        "`optax.adamw`",
    ]
    assert [row["fits"] for row in rows] == ["yes", "out of memory"]
    assert [row["all but that, bytes/param"] for row in rows] == ["5.20", ""]
    assert [row["beside it, GiB"] for row in rows] == ["4.0", ""]
    assert len(used) == len(RELEASED) + len(PLAIN)


def test_parts_add_up():
    """To arguments and temporaries; where nothing was planned, to weights and state."""
    both = release.runs(RELEASED + PLAIN)
    released, plain = (release.parts(*run) for run in both.items())
    assert sum(released.values()) == pytest.approx(42, abs=1e-6)
    assert released["forward and backward"] == 3.5
    assert released["weights"] == pytest.approx(2 * N / GIB)
    assert sum(plain.values()) == pytest.approx(12 * N / GIB) and "correction" not in plain


def test_picture():
    figure = release.draw(RELEASED + PLAIN)
    assert "fits with 8-bit state, not with optax.adamw" in figure.get_suptitle()
    words = {text.get_text() for text in figure.axes[0].texts}
    assert {"42.0 GiB", "75 GiB that JAX may take"} <= words
    assert any(one.endswith(": out of memory") for one in words)
    with pytest.raises(SystemExit, match="no records of llama-8b"):
        release.draw(OTHER)


def test_without_records():
    assert "run release" in tables.TABLES["release"]([])


def test_commands(tmp_path):
    given = f"--preset tiny --steps 2 --record {tmp_path / 'r'} --profiles {tmp_path}".split()
    args = release.parse_arguments(given)
    words = [" ".join(release.command(name, args)) for name in args.runs]
    assert ["--release" in word for word in words] == [True, False, False]
    assert f"--memory-profile {tmp_path}/llama-tiny-optax.pprof" in words[-1]
    with pytest.raises(SystemExit, match="failed: optax"):
        release.main("--preset tinier --runs optax".split())


@pytest.mark.full
def test_on_a_small_model(tmp_path):
    """Runs the example as it is; every run leaves records that the table takes."""
    file = tmp_path / "records.jsonl"
    flags = f"--preset tiny --steps 2 --record {file} --profiles {tmp_path / 'profiles'}"
    release.main(flags.split())
    rows = records.load(file)
    assert len({row["case"] for row in rows}) == 3
    for row in rows:
        row["case"] = row["case"].replace("tiny", "8b")
    head, body, _ = release.table(rows)
    assert len(body) == 3 and all("" not in row for row in body)
    assert len(list((tmp_path / "profiles").iterdir())) == 3
