"""Relative links between the repository's files, made to work elsewhere: on the site (mkdocs calls ``on_...``) and on a
package index (setup.py calls ``long_description``, so nothing is imported that building a wheel lacks)."""

import posixpath
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
# code is matched to be left alone; then the relative target of [text](target)
LINK = re.compile(r"```.*?```|`[^`\n]*`|(?<=\]\()(?!\w+:|#|/)[^)\s]+", re.DOTALL)


def hosted(path: str) -> str:
    """The address of a file or folder on the code host."""
    return f"{ADDRESS}/blob/main/{path}"


def relinked(text: str, page: str, address: Callable[[str], str]) -> str:
    """The text of the file ``page`` with ``address(path from the root)`` in place of each relative link."""

    def replace(match: re.Match[str]) -> str:
        if match[0].startswith("`"):
            return match[0]
        path, *anchor = match[0].split("#")
        return "#".join([address(posixpath.normpath(posixpath.join(posixpath.dirname(page), path))), *anchor])

    return LINK.sub(replace, text)


def long_description() -> str:
    return relinked((ROOT / "README.md").read_text(encoding="utf-8"), "README.md", hosted)


def in_repository(uri: str) -> str:
    """Where a page of the site lies: those in docs/ have a short address, the others that of the repository."""
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def pages_of(nav):
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(entry)


def on_config(config):
    config.repo_url, config.repo_name = ADDRESS, "hf_graphfilter"
    placed = set(pages_of(config.nav))  # other pages of docs/ come last among the guides
    guides = next(entry["Guides"] for entry in config.nav if "Guides" in entry)
    guides += sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name not in placed)


def on_files(files, config):
    """Pages of the nav that lie outside docs/ (README.md, recipes/README.md ...) are read where they are."""
    from mkdocs.structure.files import File

    for uri in pages_of(config.nav):
        if files.get_file_from_path(uri) is None and (ROOT / uri).is_file():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri)))


def on_page_markdown(markdown, page, config, files):
    pages = {in_repository(file.src_uri): file.src_uri for file in files.documentation_pages()}
    source = in_repository(page.file.src_uri)

    def address(path):
        if path in pages:
            return posixpath.relpath(pages[path], posixpath.dirname(page.file.src_uri) or ".")
        # what is nowhere stays as it is, for mkdocs to complain of
        return hosted(path) if (ROOT / path).exists() else posixpath.relpath(path, posixpath.dirname(source) or ".")

    return relinked(markdown, source, address)
