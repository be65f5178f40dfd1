"""Pages of the README and docs/: code runs, commands exist, links have a target."""

import ast
import re
import shlex

import jax
import jax.numpy as jnp
import pytest

import optax_lowmem as lowmem
from tests.lowering import kernels_in, lower_for_cuda
from tests.repo.pages import DOCS, PAGES, README, ROOT, blocks_of, name_of, run_block

WITH_CODE = [page for page in PAGES if blocks_of(page)]


def test_pages_with_code_were_found():
    assert len(WITH_CODE) >= 18
    assert sum(len(blocks_of(page)) for page in WITH_CODE) >= 70


@pytest.fixture
def as_users_do(tmp_path, monkeypatch):
    """In a folder of its own; programs may broadcast, as users' do."""
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_runs_and_prints_what_the_page_shows(page, as_users_do):
    assert jax.device_count() == 8
    namespace: dict = {"__name__": "page"}
    for block in blocks_of(page):
        printed = run_block(block, namespace)
        if block.printed is not None:
            assert printed == block.printed, block.name


def test_code_for_a_gpu_has_a_kernel_in_it(on_a_gpu, as_users_do):
    blocks = [block for page in PAGES for block in blocks_of(page) if block.lowered]
    assert blocks
    for block in blocks:
        namespace: dict = {}
        run_block(block, namespace)
        step = namespace["train_step"].__wrapped__
        assert kernels_in(lower_for_cuda(step, *namespace["arguments"])), block.name


def test_no_python_block_is_left_out():
    for page in PAGES:
        text = page.read_text("utf-8")
        assert text.count("```python") == sum(
            "```python" not in b.source for b in blocks_of(page)
        ) - (text.count("<!-- run\n")), name_of(page)


def test_the_readme_trains(as_users_do):
    namespace: dict = {}
    first = blocks_of(README)[0]
    assert "donate_argnums" in first.source and "value_and_grad" in first.source
    run_block(first, namespace)
    start = namespace["loss_fn"](namespace["params_f32"], namespace["x"], namespace["y"])
    assert float(namespace["loss"]) < 0.2 * float(start)
    old = namespace["params"]["w1"]
    namespace["train_step"](*(namespace[name] for name in ("params", "state", "x", "y")))
    assert old.is_deleted()


def test_code_for_frameworks_is_that_of_programs():
    """Every statement of the page is one of tests/integrations, run by `make test-frameworks`."""
    page = (DOCS / "how_to" / "frameworks.md").read_text("utf-8")
    blocks = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    programs = [path.read_text("utf-8") for path in ROOT.glob("tests/integrations/on_*.py")]
    known = {ast.dump(node) for text in programs for node in ast.walk(ast.parse(text))}
    shown = [node for text in blocks for node in ast.parse(text).body]
    assert len(blocks) >= 4
    assert not [ast.unparse(node) for node in shown if ast.dump(node) not in known]


@pytest.mark.parametrize("page", ["README.md", "docs/choose.md"])
def test_bytes_of_the_optimizers_tables(page):
    like = {"w": jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)}
    text, found = (ROOT / page).read_text("utf-8"), {}
    (table,) = re.findall(r"<!-- table:optimizers -->\n(.*?)<!-- end -->", text, re.DOTALL)
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        told = next((cell for cell in cells if re.fullmatch(r"\d[\d., ]*", cell)), "")
        numbers = told.split(", ") if told else []
        names = [n for n in re.findall(r"`(\w+)`", " ".join(cells[:2])) if n in lowmem.OPTIMIZERS]
        if line.startswith("|") and names and numbers and "`Storage" not in line:
            found |= zip(names, numbers * (len(names) // len(numbers)), strict=True)
    assert found.keys() >= lowmem.OPTIMIZERS.keys() - {"q_adamw"}
    for name, shown in found.items():
        report = lowmem.memory.report(lowmem.OPTIMIZERS[name].make(1e-3), like)
        assert f"{report.state_bytes / report.parameters:.2f}" == shown, name


def test_user_pages_are_short():
    """Without generated tables; evidence stands under Results, and signatures under API."""
    left_out = re.compile("<!-- table:.*?<!-- end -->|<!--.*?-->", re.DOTALL)
    behind = ("api/", "internals/", "results/")
    words = {}
    for page in DOCS.rglob("*.md"):
        if not page.relative_to(DOCS).as_posix().startswith(behind):
            words[name_of(page)] = len(left_out.sub("", page.read_text("utf-8")).split())
    assert len(words) > 25 and sum(words.values()) <= 20_000
    assert not {name: count for name, count in words.items() if count > 1_500}
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 130
    assert len((ROOT / "CONTRIBUTING.md").read_text("utf-8").split()) <= 1_200
    assert not re.findall(r"\b(?=\w*\d)(?=\w*[a-f])[\da-f]{7,40}\b", "\n".join(lines))  # commits


def test_results_have_two_levels():
    """The results and their tables are short; the rest is in the records."""
    pages = (DOCS / "results").glob("*.md")
    assert sum(len(page.read_text("utf-8").split()) for page in pages) <= 20_000


# ---- commands ------------------------------------------------------------------------------------
EXAMPLE = re.compile(
    r"python examples/(train_\w+|finetune)\.py((?: (?!#|and\b)(?:'[^']*'|[\w./=:,-]+))*)"
)


def commands():
    found = {match for page in PAGES for match in EXAMPLE.findall(page.read_text("utf-8"))}
    return sorted(found)


@pytest.mark.parametrize(("script", "flags"), commands())
def test_commands_of_examples_parse(example, script, flags):
    assert example(script).parse_arguments(shlex.split(flags))


def test_commands_were_found():
    assert len(commands()) >= 5


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {
        name for page in PAGES for name in re.findall(r"`make ([a-z-]+)", page.read_text("utf-8"))
    }
    assert named and named <= targets


# ---- links ---------------------------------------------------------------------------------------
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\((?!https?://|mailto:|#)([^)#\s]+)")


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"], ids=name_of
)
def test_relative_links_have_a_target(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    missing = [to for to in LINK.findall(text) if not (page.parent / to).exists()]
    assert not missing


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    missing = [p for p in DOCS.rglob("*.md") if f"- {p.relative_to(DOCS).as_posix()}\n" not in nav]
    assert not missing
