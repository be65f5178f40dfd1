"""The text of pinned packages, on small wheels, and the preset of paired runs that reads it."""

import zipfile

import numpy as np
import pytest

from benchmarks import package_text, training
from benchmarks.suites.pairs.presets import ADAM, PRESETS

LINES = [f"def function_{i}(argument): return argument + {i}\n" for i in range(4000)]
FILES = {f"p/{i}.py": "".join(LINES[20 * i : 20 * i + 20]).encode() for i in range(200)}
LEFT_OUT = {
    "p/copied.py": FILES["p/0.py"] + b"x = 1\n",
    "p/wide.py": b"x = " + b"1 + " * 100,
    "p/data.json": b'{"a key that is longer than a line has to be": 1}\n',
    "p/latin.py": b"# a comment in another encoding: \xe9\xe8\n",
    "p/short.py": b"x = 1\n",
}


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def texts(*wheels):
    return list(package_text.deduplicated(package_text.documents(wheels)))


def test_each_text_is_kept_once(tmp_path):
    first = wheel(tmp_path / "a.whl", FILES | LEFT_OUT)
    assert sorted(texts(first)) == sorted(FILES.values())
    second = wheel(tmp_path / "b.whl", FILES | {"p/new.md": "".join(LINES[:41:2]).encode()})
    assert texts(first, second) == texts(first)


def test_tokens_do_not_depend_on_the_order_of_files(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(package_text, "HELD_OUT_OF_256", 64)
    orders = [dict(FILES), dict(reversed(FILES.items()))]
    wheels = [wheel(tmp_path / f"{i}.whl", files) for i, files in enumerate(orders)]
    (train, held_out, ratio), other = (package_text.tokenized(texts(one), 300) for one in wheels)
    assert package_text.digest(train, held_out) == package_text.digest(*other[:2])
    assert 0 < held_out.size < train.size and train.max() < 300 and ratio > 1
    assert (train == 0).sum() + (held_out == 0).sum() == len(FILES)


def test_other_tokens_are_refused(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="run python -m benchmarks.package_text"):
        package_text.load(tmp_path)
    arrays = {"train": np.arange(5000, dtype=np.uint16), "held_out": np.arange(9, dtype=np.uint16)}
    np.savez(tmp_path / "packages.npz", **arrays, bytes_per_token=4.0)
    with pytest.raises(SystemExit, match="has the digest"):
        package_text.load(tmp_path)
    monkeypatch.setattr(package_text, "DIGEST", package_text.digest(*arrays.values()))
    assert package_text.load(tmp_path).vocab == 50_304


def test_every_wheel_is_pinned():
    rows = package_text.WHEELS.read_text("utf-8").splitlines()
    pinned = [row for row in rows if not row.startswith("#")]
    assert pinned and all("==" in row and " --hash=sha256:" in row for row in pinned)
    assert len(package_text.DIGEST) == 64


def test_the_long_run_has_half_a_billion_tokens_and_ends_at_zero():
    run = PRESETS["gpt2-124m-long"]
    assert run.steps * run.tokens >= 500e6 and run.text == package_text.NAME
    schedule = run.schedule(ADAM)
    peak = run.rates[ADAM]
    rates = [float(schedule(step)) for step in range(0, run.steps + 1, 12)]
    assert max(rates) == pytest.approx(peak) and rates[-1] < 1e-6 * peak
    assert not run.steps % run.every
    assert training.UNITS[run.tokenizer] == "token"
