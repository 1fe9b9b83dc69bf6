"""The documentation site: each image, link and anchor leads somewhere, and the navigation holds each page."""

import os
import posixpath
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

import hf_graphfilter

ROOT = Path(__file__).parents[1]
LINKS = runpy.run_path(str(ROOT / "docs" / "links.py"))
TARGETS = {"a": "href", "img": "src", "link": "href", "script": "src", "source": "srcset", "video": "src"}


class Page(HTMLParser):
    """What a page links to, its anchors, the links of the navigation, and tables that stayed Markdown."""

    def __init__(self, file):
        super().__init__()
        self.targets, self.anchors, self.placed, self.raw = [], set(), set(), []
        self.code = 0  # how many elements of code are open
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.code += tag in ("pre", "code", "script")
        self.anchors |= {attributes.get("id"), attributes.get("name") if tag == "a" else None} - {None}
        if target := attributes.get(TARGETS.get(tag)):
            self.targets.append(target)
            if "md-nav__link" in (attributes.get("class") or ""):
                self.placed.add(target)

    def handle_endtag(self, tag):
        self.code -= tag in ("pre", "code", "script")

    def handle_data(self, data):
        if not self.code and re.search(r"^\s*\|.*\|", data, re.MULTILINE):
            self.raw.append(data)


def build_site(temporary):
    """Return the folder of the site; the processes of a run share one build."""
    pytest.importorskip("material", reason="the site is built with mkdocs-material")
    pytest.importorskip("mkdocstrings")
    shared = temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not folder.is_dir():
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
            environment = {**os.environ, "PATH": path, "NO_MKDOCS_2_WARNING": "1"}
            built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site, and {path below it: Page}. ``make docs`` names its build by SITE, so it skips no test."""
    named = os.environ.get("SITE")
    folder = ROOT / named if named else build_site(tmp_path_factory.getbasetemp())
    return folder, {str(file.relative_to(folder)): Page(file) for file in folder.rglob("*.html")}


def file_of(page, path):
    """Return the file, below the root of the site, that a link on a page leads to."""
    file = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(path)))
    return posixpath.join(file, "index.html").removeprefix("./") if path.endswith(("/", ".")) or not path else file


def test_each_link_and_image_leads_somewhere(site):
    folder, pages = site
    dead = []
    for name, page in pages.items():
        if name == "404.html":  # its links start at the address of the site, which is not known
            continue
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                path = target.removeprefix(f"{LINKS['ADDRESS']}/blob/main/")
                if path != target and not (ROOT / path).exists():
                    dead.append((name, target))
                continue
            file = file_of(name, parts.path) if parts.path else name
            anchors = pages[file].anchors if file in pages else {parts.fragment}
            if not (folder / file).is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                dead.append((name, target))
    assert dead == []


def test_the_navigation_holds_each_page(site):
    _, pages = site
    placed = {file_of("index.html", urlsplit(target).path) for target in pages["index.html"].placed}
    source = f"{LINKS['SOURCE']}/"
    assert {name for name in pages if name != "404.html" and not name.startswith(source)} - placed == set()


def test_tables_are_tables(site):
    _, pages = site
    assert {name: page.raw for name, page in pages.items() if page.raw} == {}


def test_pages_show_the_figures(site):
    folder, pages = site
    shown = {file_of(name, target) for name, page in pages.items() for target in page.targets if target.endswith("png")}
    figures = {str(file.relative_to(folder)) for file in (folder / "figures").glob("*.png")}
    assert figures
    assert figures - shown == set()


def test_the_reference_holds_each_public_name_once(site):
    _, pages = site
    names = [anchor for name, page in pages.items() if name.startswith("reference/") for anchor in page.anchors]
    for public in hf_graphfilter.__all__:
        assert names.count(f"hf_graphfilter.{public}") == 1, public


def test_the_index_of_the_reference_links_each_public_name(site):
    _, pages = site
    linked = {urlsplit(target).fragment for target in pages["reference/index.html"].targets}
    assert {f"hf_graphfilter.{name}" for name in hf_graphfilter.__all__} - linked == set()
