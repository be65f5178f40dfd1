"""The metadata that an index would show, and what the project's address fills."""

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

from tests.repo.pages import ROOT, run
from tools import address, ci_table, release

SOMEWHERE = "https://example.org/someone/optax_lowmem"
SETTINGS = address.settings()
LIMIT = 1_700_000  # bytes of the source distribution


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with a source distribution and the wheel that was built from it."""
    for module in ("build", "hatchling", "twine"):
        pytest.importorskip(module, reason="needs the extra package")
    folder = tmp_path_factory.mktemp("dist")
    done = run("build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    """The source distribution's folder."""
    folder = tmp_path_factory.mktemp("sdist")
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def test_an_index_would_take_them(built):
    done = run("twine", "check", "--strict", *map(str, sorted(built.iterdir())))
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_the_source_distribution_is_small(built):
    (archive,) = built.glob("*.tar.gz")
    assert archive.stat().st_size < LIMIT


def test_metadata(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [n for n in opened.namelist() if n.endswith("METADATA")]
        found = email.message_from_bytes(opened.read(name))
        assert not [n for n in opened.namelist() if n.startswith(("tests", "tools", "docs"))]
    assert found["Author"] == "optax_lowmem developers"
    assert found["Version"] == SETTINGS["project"]["version"]
    assert found.get_all("Project-URL", []) == [
        f"{name}, {url}" for name, url in address.urls(address.address()).items()
    ]
    text = found.get_payload()
    assert text.startswith("# optax_lowmem")
    assert not re.search(r"\]\((?!https?://|#)", text)  # nothing relative is left to break


def test_the_default_tier_is_whole_in_a_source_distribution(unpacked):
    """Its tests are collected without the repository, and some run: nothing is missing."""
    assert (unpacked / ".ci" / "find-python").exists() and (unpacked / "Makefile").exists()
    found = run("pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu and not tpu",
                "-k", "test_records or what_was_measured or round_trip and test_codecs",
                cwd=unpacked, PYTHONPATH="", JAX_PLATFORMS="cpu")  # fmt: skip
    assert found.returncode == 0, found.stdout[-3000:]
    assert found.stdout.count("no records here: a source distribution") == 2


# ---- the address ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", address.PAGES)
def test_pages_follow_the_address(name):
    text = (ROOT / name).read_text("utf-8")
    assert "<!-- address:" in text
    assert address.filled(text, address.address()) == text, "run python -m tools.address"


def test_without_an_address():
    text = address.readme("")
    assert "![" not in text and "in the clone" in text and "make wheel" in text
    assert not re.search(r"\]\((?!https?://|#)", text)
    assert address.urls("") == {} and address.badges("") == ""


def test_with_an_address():
    text = address.readme(SOMEWHERE)
    assert f'pip install "optax-lowmem @ git+{SOMEWHERE}"' in text
    picture = f"({SOMEWHERE}/raw/main/docs/figures/llama_8b_memory.png)"
    assert picture in text and text.count("img.shields.io") == 2
    assert f"({SOMEWHERE}/actions/workflows/tests.yml/badge.svg)" in text
    new = address.moved((ROOT / "pyproject.toml").read_text("utf-8"), f"{SOMEWHERE}/")
    assert f'\naddress = "{SOMEWHERE}"\n' in new
    assert f"[Results]({SOMEWHERE}/blob/main/docs/results/index.md)" in text
    assert not re.search(r"\]\((?!https?://|#)", text)
    assert set(address.urls(SOMEWHERE)) >= {"Homepage", "Documentation", "Issues"}


def test_links_out_of_the_site():
    from tools import site

    line = "see [the notes](../../notebooks/a.ipynb) and [this](../other.md#x)"
    assert site.leaving(line, "guides", "") == "see the notes and [this](../other.md#x)"
    led = site.leaving(line, "guides", SOMEWHERE)
    assert f"[the notes]({SOMEWHERE}/blob/main/notebooks/a.ipynb)" in led


# ---- names ---------------------------------------------------------------------------------------
INDEX = re.compile(r"pip (?:install|download)[^\n]*\boptax[-_]lowmem\b(?! @)")
TEXT = {".cff", ".cfg", ".ipynb", ".md", ".py", ".toml", ".yaml", ".yml"}


def test_nothing_is_installed_by_our_name():
    """The name on the index is not the project's, so what is there could be anybody's."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a clone")
    files = [ROOT / name for name in done.stdout.split()]
    named = [
        path.relative_to(ROOT).as_posix()
        for path in files
        if (path.suffix in TEXT or path.name in ("Makefile", "run"))
        and path.exists()
        and INDEX.search(path.read_text("utf-8"))
    ]
    assert not named


def test_one_version():
    version = SETTINGS["project"]["version"]
    found = release.versions()
    assert {found[name] for name in release.PLACES} == {version}
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    heads = re.findall(r"^## \[(.*?)\]", changes, re.MULTILINE)
    assert heads[0] in ("Unreleased", version)


def test_a_release_sets_the_version_everywhere(tmp_path, monkeypatch):
    for name in (*release.PLACES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"))
    release.prepare("7.8.9rc1", tmp_path)
    assert set(release.versions(tmp_path).values()) == {"7.8.9rc1"}
    changes = (tmp_path / "CHANGELOG.md").read_text("utf-8")
    assert re.search(r"## \[Unreleased\]\n\n## \[7.8.9rc1\] - \d{4}-\d\d-\d\d\n", changes)
    with pytest.raises(SystemExit, match="already"):
        release.prepare("7.8.9rc1", tmp_path)
    monkeypatch.setattr(release.versions, "__defaults__", (tmp_path,))
    release.main(["--check", "v7.8.9rc1"])
    with pytest.raises(SystemExit, match="not 7.8.9"):
        release.main(["--check", "v7.8.9"])


def test_workflows_run_what_exists():
    """Each `make` and module of a workflow; a release can publish, and nothing else may write."""
    workflows = {path.stem: path.read_text("utf-8") for path in
                 (ROOT / ".github/workflows").glob("*.yml")}  # fmt: skip
    assert workflows.keys() >= {"tests", "site", "release"}
    text = "\n".join(workflows.values())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    made = {name for line in re.findall(r"run: make ([a-z -]+)", text) for name in line.split()}
    assert {"test", "test-jax", "docs", "package"} <= made <= {*targets}
    assert re.findall(r"python -m (\S+)", text) == ["tools.release"]
    assert all("permissions: { contents: read }" in one for one in workflows.values())
    assert [name for name, one in workflows.items() if "pypi-publish" in one] == ["release"]
    uses = re.findall(r"uses: (.*)", text)
    assert len(uses) > 10
    assert not [one for one in uses if not re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", one)]


def test_the_oldest_versions_are_the_lower_bounds():
    """`make test-jax JAX=0.9.2` installs these pins."""
    project = SETTINGS["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["flax"], *extras["checkpoint"]]
    lines = (ROOT / ".ci/jax/0.9.2.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins["jaxlib"] == pins.pop("jax")
    assert {f"{name}>={pin}" for name, pin in pins.items()} == {
        line.replace("jax>=", "jaxlib>=") for line in wanted
    }


def test_versions_of_ci():
    """Each folder of pins is run by CI, and pins the version of its name."""
    versions = {path.stem: path.read_text("utf-8") for path in (ROOT / ".ci/jax").glob("*.txt")}
    listed = re.search(r"for version in (.*);", (ROOT / ".ci/run").read_text("utf-8"))[1].split()
    assert listed == sorted(versions, key=lambda name: (len(name), name))
    pins = {name: re.search(r"^jax==(.*)", text, re.M) for name, text in versions.items()}
    assert {name: pin and pin[1] for name, pin in pins.items()} == {
        name: None if name == "newest" else name for name in versions
    }


def test_the_table_of_versions():
    """Stages with tests that passed, from CI's last lines; other stages have no versions."""
    output = (
        "lint         ok         4s of   20s  1 passed, 0 failed  \n"
        "test         ok       401s of  520s  4269 passed, 0 failed  "
        "python 3.11.7, jax 0.10.2, optax 0.2.8, flax 0.12.7\n"
        "full         ok       101s of  200s  90 passed, 0 failed  "
        "python 3.13.0, jax 0.12.0.1, optax 0.2.8, flax 0.12.12, sample 1 of 8 of the full tier\n"
    )
    page = f"before\n{ci_table.BEGIN}old\n{ci_table.END}\nafter"
    assert ci_table.written(page, output) == (
        f"before\n{ci_table.BEGIN}"
        "| stage | Python | JAX | optax | Flax | tests | seconds |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| test | 3.11.7 | 0.10.2 | 0.2.8 | 0.12.7 | 4,269 | 401 |\n"
        "| full | 3.13.0 | 0.12.0.1 | 0.2.8 | 0.12.12 | 90 | 101 |\n"
        f"{ci_table.END}\nafter"
    )
    with pytest.raises(ValueError, match="no stage"):
        ci_table.written(page, "nothing")


@pytest.mark.parametrize("extra", ["lint", "types", "docs", "package"])
def test_tools_do_not_install_the_library(extra):
    """`make lint` installs what `.ci/requirements` prints."""
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/requirements", extra], capture_output=True, text=True
    )
    names = {re.split(r"[<>=\[]", line)[0] for line in done.stdout.split("\n") if line}
    assert names and not names & {"jax", "flax", "triton", "optax", "optax-lowmem"}
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert done.stdout.splitlines() == wanted["project"]["optional-dependencies"][extra]
