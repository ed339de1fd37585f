"""The site in a real browser: every page at two widths, without overflow, errors or dead links. `make test-all` alone runs it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.browser import WIDTHS, Browser, chromium

ROOT = Path(__file__).parent.parent
COLUMNS = 5  # at 420 pixels, a table with at least so many columns may be scrolled sideways
pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium here: install the package chromium to check the site in a browser"),
]

WIDER = """(() => {
  const scrolls = ".md-typeset__scrollwrap, pre > code", found = [], wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) found.push(`the page is ${wide} wide`);
  for (const e of document.querySelectorAll(scrolls))
    if (e.scrollWidth > e.clientWidth + 1 && !(MAY_SCROLL)(e))
      found.push(`${e.tagName} ${e.scrollWidth} > ${e.clientWidth}: ${e.innerText.slice(0, 70)}`);
  for (const e of document.querySelectorAll("article *"))
    if (e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(scrolls) && !e.closest(".md-clipboard, .md-code__nav"))
      found.push(`${e.tagName} leaves the window: ${e.innerText.slice(0, 70)}`);
  for (const e of document.querySelectorAll("article img"))
    if (!e.complete || !e.naturalWidth) found.push(`no picture ${e.src}`);
  return found;
})()"""
MAY_SCROLL = {  # on a phone: tables of many columns, and code, in which a line break would change the meaning
    1280: "e => false",
    420: f"e => e.tagName == 'CODE' || e.querySelector('tr').cells.length >= {COLUMNS}",
}
LINKS = "[...document.querySelectorAll('a[href]')].map(e => e.href)"
ANCHORS = "[...document.querySelectorAll('[id]')].map(e => e.id)"
NEIGHBOURS = "document.querySelectorAll('.md-footer__link').length"  # links to the previous and the next page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def pages(site: Path) -> list[Path]:
    found = [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]  # its links start at the root of a server
    assert len(found) > 25
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_and_has_no_error(site: Path, browser: Browser, width: int) -> None:
    browser.resize(width)
    found = []
    for page in pages(site):
        browser.open(page.as_uri())
        problems = browser.evaluate(WIDER.replace("MAY_SCROLL", MAY_SCROLL[width])) + browser.errors()
        found += [f"{page.relative_to(site)}: {problem}" for problem in problems]
    assert not found, "\n".join(found)


def test_every_link_leads_somewhere(site: Path, browser: Browser) -> None:
    """Links to other hosts are not followed."""
    links, anchors = [], {}
    for page in pages(site):
        browser.open(page.as_uri())
        links += [(page, link) for link in browser.evaluate(LINKS)]
        anchors[page.as_uri()] = set(browser.evaluate(ANCHORS))
        assert browser.evaluate(NEIGHBOURS), f"{page.relative_to(site)} links to no previous or next page"
    dead = []
    for page, link in links:
        url, anchor = urldefrag(link)
        parts = urlsplit(url)
        if parts.scheme == "file":
            missing = not Path(unquote(parts.path)).is_file()
            if missing or (anchor and unquote(anchor) not in anchors[url]):
                dead.append(f"{page.relative_to(site)}: {link}")
        elif parts.scheme != "https":
            dead.append(f"{page.relative_to(site)}: {link}")
    assert not dead, "\n".join(dead)


def test_the_search_works_from_disk(site: Path, browser: Browser) -> None:
    browser.resize(1280)
    browser.open((site / "index.html").as_uri())
    found = browser.evaluate("""new Promise(done => {
      document.querySelector('[data-md-toggle=search]').click();
      const field = document.querySelector('.md-search__input');
      let left = 100;
      const look = () => {
        const links = [...document.querySelectorAll('.md-search-result__link')].map(e => e.href);
        if (links.length || !left--) return done(links);
        field.focus(); field.value = 'push-sum'; field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
        setTimeout(look, 100);
      };
      look();
    })""")
    assert any("algorithms.html" in link or "methods.html" in link for link in found), found
