"""The documentation site: it builds strictly, has every public name, and works in a browser."""

import functools
import http.server
import inspect
import json
import re
import shutil
import threading
from pathlib import Path

import pytest

import optax_lowmem
from tests.repo import browser, pages
from tests.repo.pages import DOCS, ROOT
from tools import rendered
from tools.site import BOOSTS, RESULTS

pytest.importorskip("mkdocs", reason="needs the extra docs")
pytest.importorskip("latex2mathml", reason="needs the extra docs")

NAMES = [
    found[1]
    for line in (ROOT / "tests/public_api.txt").read_text("utf-8").splitlines()
    if not line.endswith(": module") and (found := re.match(r"(?:class )?([\w.]+)", line))
]
PAGES = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))

run = functools.partial(pages.run, NO_MKDOCS_2_WARNING="1")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built once; strictly, so that a broken link ends it."""
    folder = tmp_path_factory.mktemp("site")
    done = run("mkdocs", "build", "--strict", "--site-dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_broken_link_ends_the_build(tmp_path):
    """Of `make docs`: MkDocs counts no warnings that it is told not to print."""
    (command,) = re.findall(r"python -m (mkdocs .*build.*)", (ROOT / "Makefile").read_text("utf-8"))
    for name in ("docs", "examples", "notebooks", "optax_lowmem", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "docs/faq.md").open("a", encoding="utf-8") as page:
        page.write("\n[gone](nowhere.md)\n")
    done = run(*command.split(), cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0 and "nowhere.md" in done.stderr, done.stderr


def url_of(page: str) -> str:
    """The address of a page under the site's."""
    return (
        re.sub(r"(?:(^|/)index)?\.md$", r"\1", page)
        if page.endswith("index.md")
        else (page.removesuffix(".md") + "/")
    )


def html_of(site: Path, page: str) -> str:
    return (site / url_of(page) / "index.html").read_text("utf-8")


def test_user_pages_come_first_in_search(site):
    """Entries of other pages count for less, and the digits of results' tables are no text."""
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))["docs"]
    found: dict[str, set[float]] = {}
    for one in index:
        found.setdefault(one["location"].partition("/")[0] + "/", set()).add(one.get("boost", 1))
    for place, boost in BOOSTS.items():
        assert found[place.replace(".md", "/")] == {boost}, place
    assert all(found[folder] == {1} for folder in ("compare/", "how_to/", "tutorials/"))
    evidence = [one for one in index if one["location"].startswith(RESULTS)]
    assert len(evidence) > 50 and not [one for one in evidence if "<td" in one["text"]]


def test_every_public_name_is_on_an_api_page(site):
    ids = set()
    for page in PAGES:
        if page.startswith("api/"):
            ids |= set(re.findall(r'id="(optax_lowmem[\w.]*)"', html_of(site, page)))
    assert len(NAMES) > 120
    assert not [name for name in NAMES if name not in ids]


def test_docstrings_are_rendered(site):
    text = html_of(site, "api/optimizers.md")
    assert "<math" in text and "language-pycon highlight" in text
    assert ":math:" not in text and ".. math::" not in text


def test_brackets_of_formulas_grow(site):
    """None of fixed height is around a fraction or a root."""
    opened, closed = (f'stretchy="false">&#x0002{digit};' for digit in "89")
    small, formulas = re.compile(f"{opened}(?:(?!{closed}).)*<(?:mfrac|msqrt)"), []
    for page in (page for page in PAGES if page.startswith("api/")):
        formulas += re.findall("<math.*?</math>", html_of(site, page), re.DOTALL)
    assert len(formulas) > 20 and any('fence="true"' in formula for formula in formulas)
    assert not [formula for formula in formulas if small.search(formula)]


def test_signatures_have_types(site):
    text = re.sub("<[^>]+>", "", html_of(site, "api/training.md"))
    assert "allow_rounding: bool = False" in text


def test_notebooks_and_examples_have_pages(site):
    """With what they print and draw; pages link to them, not out of the site."""
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text = html_of(site, f"notebooks/{path.stem}.md")
        shown = path.read_text("utf-8").count('"image/png"')
        assert shown and len(re.findall(rf'<img[^>]+src="../{path.stem}-', text)) == shown
    for name in rendered.EXAMPLES:
        assert "argparse" in html_of(site, f"examples/{name}.md")
    links = re.findall(r'href="([^"]+)"', html_of(site, "results/formats.md"))
    assert "../../notebooks/coat_states/" in links


def test_every_argument_of_an_optimizer_is_described(site):
    """Also those that its docstring gets from a decorator, which the site's reader does not run."""
    text = html_of(site, "api/optimizers.md")
    for name, optimizer in optax_lowmem.OPTIMIZERS.items():
        _, _, own = text.partition(f'id="optax_lowmem.{name}"')
        own = own.partition('id="optax_lowmem.')[0]
        described = re.findall(r"<b><code>(\w+)</code></b>", own)
        assert described == list(inspect.signature(optimizer.make).parameters), name


def test_nothing_is_loaded_from_elsewhere(site):
    for page in PAGES:
        text = html_of(site, page)
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert not [url for url in loaded if 'rel="canonical"' not in url], page


# ---- in a browser --------------------------------------------------------------------------------
class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(site):
    """The site's address on this machine."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    program = browser.find()
    if program is None:
        pytest.skip(f"needs a Chromium (apt-get install chromium): none of {browser.NAMES} here")
    with browser.Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


# What a reader cannot see in the window: parts that leave it, or their box, where nothing scrolls
# or scrolling starts behind the first column; and, if asked, lines of Python that have to scroll.
CUT = """(() => {
  const inside = part => {
    const box = part.getBoundingClientRect();
    return box.left > -1 && box.right < innerWidth + 1;
  };
  const shown = part => {
    const own = part.getBoundingClientRect();
    for (let around = part; around !== document.body; around = around.parentElement) {
      const style = getComputedStyle(around).overflowX, box = around.getBoundingClientRect();
      if (['auto', 'scroll'].includes(style) && inside(around))
        return own.left >= box.left - 1 && around.scrollLeft === 0;
      if (['hidden', 'clip'].includes(style) && own.right > box.right + 1) return false;
    }
    return inside(part);
  };
  const parts = [...document.querySelectorAll(
    'article :is(pre, pre > code, table, img, math[display=block])')];
  const code = [...document.querySelectorAll(
    ':is(.language-python, .language-pycon) pre > code')];
  return [
    ...parts.filter(part => part.offsetParent && !shown(part)),
    ...code.filter(part => SCROLLING && part.scrollWidth > part.clientWidth + 1),
  ].map(part => part.tagName + ': ' + (part.innerText || part.src || '').slice(0, 60));
})()"""
BROKEN = "[...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
WIDTHS = {400: "false", 1280: "true", 1920: "true"}  # whether a line of Python must fit


def test_nothing_is_cut(chromium, served):
    """On a telephone, a laptop and a large screen; no page scrolls sideways."""
    pictures, cut = 0, []
    try:
        for page in PAGES:
            chromium.open(served + url_of(page))
            assert chromium.evaluate("document.querySelector('article h1') !== null"), page
            assert chromium.evaluate(BROKEN) == [], page
            pictures += chromium.evaluate("document.images.length")
            chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            for width, code in WIDTHS.items():
                chromium.width(width)
                found = chromium.evaluate(CUT.replace("SCROLLING", code))
                size = chromium.evaluate("document.scrollingElement.scrollWidth")
                found += [f"the page: {size} pixels"] if size > width else []
                cut += [(width, page, *found)] if found else []
        assert not cut and pictures >= 15
    finally:
        chromium.width(1280)


def test_what_is_cut_is_noticed(chromium, served):
    """The check of `test_nothing_is_cut` on a page that has all faults."""
    chromium.open(served)
    chromium.evaluate("""document.querySelector('article').insertAdjacentHTML('beforeend',
      '<div style="overflow: hidden"><table class="wide" style="width: 3000px"><tr><td>hidden' +
      '</td></tr></table></div><div class="language-python"><pre><code style="display: block; ' +
      'overflow: auto">' + 'x'.repeat(500) + '</code></pre></div>')""")
    found = chromium.evaluate(CUT.replace("SCROLLING", "true"))
    assert [one.partition(":")[0] for one in found] == ["TABLE", "CODE"]


def test_the_search_finds_an_optimizer(chromium, served):
    chromium.open(served)
    chromium.wait_for("document.querySelector('input[data-md-component=search-query]') !== null")
    chromium.evaluate(
        "document.querySelector('label[for=__search]').click();"
        "const box = document.querySelector('input[data-md-component=search-query]');"
        "box.focus(); box.value = 'flash_adamw';"
        "box.dispatchEvent(new Event('keyup', {bubbles: true}));"
        "box.dispatchEvent(new Event('input', {bubbles: true}));"
    )
    links = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    chromium.wait_for(f"{links}.length > 0")
    found = json.loads(chromium.evaluate(f"JSON.stringify({links})"))
    assert any("api/optimizers" in link for link in found), found


def test_the_site_follows_its_address(chromium, served):
    """Links that leave the pages are plain text while there is no address."""
    chromium.open(served + "internals/")
    assert not chromium.evaluate(
        "[...document.querySelectorAll('article a')].some(a => a.href.includes('CONTRIBUTING'))"
    )
    assert "CONTRIBUTING.md" in chromium.evaluate("document.querySelector('article').innerText")
