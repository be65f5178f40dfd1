"""The notebooks run alone: in an empty folder, with what their first cells install."""

import base64
import functools
import shlex
import struct
import subprocess
import sys

import jax
import pytest

from tests.repo import readers
from tests.repo.pages import ROOT
from tests.tiers import rows
from tools import address, notebooks

pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")
nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")

SOMEWHERE = "https://github.com/someone/optax_lowmem"
PICTURE_BYTES, TEXT_BYTES = 150_000, 2_500
WIDEST = 700  # pixels of a picture: pages show 600 or so
PICTURES = {  # notebook -> how many it shows
    "coat_activations": 5, "coat_states": 3, "flashoptim": 5, "gaussws": 4, "q_adam_mini": 3,
    "quickstart": 1, "stable_adamw": 4, "switchback": 4,
}  # fmt: skip
PATHS = {path.stem: path for path in notebooks.paths()}


@pytest.fixture(autouse=True)
def broadcasting():
    """A layer's shapes are traced for the cells of records, and it broadcasts."""
    with jax.numpy_rank_promotion("allow"):
        yield


def codes(book):
    """The cells of code of a notebook."""
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def pictures(book):
    """The pictures that a notebook shows."""
    outputs = [output for cell in codes(book) for output in cell["outputs"]]
    found = [one["data"]["image/png"] for one in outputs if "image/png" in one.get("data", {})]
    return [base64.b64decode(one) for one in found]


def printed(book):
    """The text that each cell of a notebook printed."""
    return [
        "".join("".join(output.get("text", "")) for output in cell["outputs"])
        for cell in codes(book)
    ]


def test_every_notebook_is_tested():
    assert set(PATHS) == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_stored(name):
    book = notebooks.read(PATHS[name])
    nbformat.validate(nbformat.from_dict(book))
    found = pictures(book)
    assert len(found) == PICTURES[name]
    assert sum(map(len, found)) <= PICTURE_BYTES
    for picture in found:
        assert struct.unpack(">I", picture[16:20])[0] <= WIDEST
    assert max(map(len, printed(book))) <= TEXT_BYTES
    counts = [cell["execution_count"] for cell in codes(book)]
    assert counts == list(range(1, len(counts) + 1))
    assert 8 <= len(counts) <= 16


@pytest.mark.parametrize("where", ["", SOMEWHERE])
@pytest.mark.parametrize("name", ["quickstart", "stable_adamw"])
def test_says_how_to_install(name, where):
    """By the project's address, with a badge, once there is one; until then a reader sets it."""
    book = notebooks.filled(notebooks.read(PATHS[name]), name, where)
    nbformat.validate(nbformat.from_dict(book))
    top, first = notebooks.source(book["cells"][0]), notebooks.source(codes(book)[0])
    badge = (
        f"colab.research.google.com/github/someone/optax_lowmem/blob/main/notebooks/{name}.ipynb"
    )
    assert (badge in top) == bool(where)
    assert first.startswith(f'INSTALL = "optax-lowmem @ git+{where}"' if where else 'INSTALL = ""')
    assert notebooks.filled(book, name, address.address()) == notebooks.read(PATHS[name])


@pytest.mark.parametrize("where", ["", "a.whl"])
def test_installs_what_a_reader_names(tmp_path, where):
    """In an interpreter without the package, as on Colab: pip gets the wheel, or an error says."""
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    asked = []
    shell.register_magic_function(asked.append, magic_name="pip")
    cell = notebooks.install("", ["a>=1", "b"]).replace("optax_lowmem as", "not_installed as")
    ran = shell.run_cell(cell.replace('INSTALL = ""', f'INSTALL = "{where}"', 1))
    assert asked == ([f'install -q "{where}" "a>=1" "b"'] if where else [])
    assert isinstance(ran.error_in_exec, ImportError)
    assert ("make wheel" in str(ran.error_in_exec)) != bool(where)


def test_filled_cells_follow_their_files():
    """The install cell, the style and the records: `python -m tools.notebooks --fill`."""
    for name, path in PATHS.items():
        book = notebooks.read(path)
        assert notebooks.filled(book, name, address.address()) == book, name
        tags = [tag for cell in book["cells"] for tag in cell["metadata"].get("tags", ())]
        assert tags[0] == "install" and tags.count("style") == 1, name


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """Makes the interpreter of a reader: what a first cell installs, and no repository."""
    folder = tmp_path_factory.mktemp("readers")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, ROOT], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")

    @functools.cache
    def make(*needed):
        return readers.environment(folder / str(len(list(folder.iterdir()))), wheel, needed)

    return make


def installed_by(name):
    """Return the requirements that the first cell of a notebook installs, beside the package."""
    (line,) = [line for line in readers.lines(PATHS[name]) if "%pip" in line]
    what, *needed = shlex.split(line.strip().removeprefix("%pip install -q "))
    assert what == "$INSTALL"
    return needed


def ask(python, program, cwd):
    environment = notebooks.bare({"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, quick=True)
    assert environment == {"PATH": "/usr/bin:/bin", notebooks.QUICK: "1"}
    return subprocess.run(
        [python, "-c", program], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_the_reader_has_no_repository(reader, tmp_path):
    """Or a notebook that imports from it would pass here and fail for everybody else."""
    python = reader("matplotlib")
    done = ask(python, "import optax_lowmem as o; print(o.__file__)\nimport benchmarks", tmp_path)
    assert str(python.parents[1]) in done.stdout and str(ROOT) not in done.stdout
    assert "No module named 'benchmarks'" in done.stderr


def test_the_reader_has_no_more_than_the_cell_installs(reader, tmp_path):
    python = reader("matplotlib")
    save = "import matplotlib, optax_lowmem as lowmem\n"
    save += "lowmem.checkpoint.save('run', lowmem.flash_adamw(1.0), {}, {}, step=1)"
    assert "checkpoints need Orbax and xxhash" in ask(python, save, tmp_path).stderr
    for name in ("flax", "sklearn", "safetensors"):
        assert f"No module named '{name}'" in ask(python, f"import {name}", tmp_path).stderr


@pytest.mark.parametrize("name", rows(PICTURES, ["quickstart", "flashoptim", "coat_states"]))
def test_runs_alone(name, reader, monkeypatch):
    """Every cell, with its assertions, draws what is stored, at the sizes of tests."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    book = notebooks.executed(PATHS[name], str(reader(*installed_by(name))), quick=True)
    assert len(pictures(book)) == PICTURES[name]
    assert all(cell["execution_count"] for cell in codes(book))


def test_a_failing_notebook_fails(reader, tmp_path):
    book = notebooks.read(PATHS["quickstart"])
    broken = {**book["cells"][1], "source": ["assert 1 == 2, 'as it must'"], "outputs": []}
    path = tmp_path / "broken.ipynb"
    path.write_text(notebooks.text(book | {"cells": [broken]}), encoding="utf-8")
    with pytest.raises(RuntimeError, match="broken.ipynb failed(.|\n)*as it must"):
        notebooks.executed(path, str(reader("matplotlib")), quick=True)
