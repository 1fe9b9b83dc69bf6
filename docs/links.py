"""Relative links between the repository's files, made to work on the site and on a package index.

mkdocs calls ``on_...``. setup.py calls ``long_description``, so nothing is imported that building a wheel lacks.
"""

import posixpath
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
SOURCE = "source"  # the folder of the site with the source files that pages link to
LANGUAGES = {".py": "python", ".yaml": "yaml", ".cff": "yaml", ".md": "markdown"}
# code is matched to be left alone; then the relative target of [text](target)
LINK = re.compile(r"```.*?```|`[^`\n]*`|(?<=\]\()(?!\w+:|#|/)[^)\s]+", re.DOTALL)


def hosted(path: str) -> str:
    """Return the address of a file or folder on the code host."""
    return f"{ADDRESS}/blob/main/{path}"


def relinked(text: str, page: str, address: Callable[[str], str]) -> str:
    """Return the text of the file ``page`` with ``address(path from the root)`` for each relative link."""

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


def linked_paths(files):
    """Yield the path of each file and folder of the repository that a page links to and the site lacks."""
    present = {in_repository(file.src_uri) for file in files}
    for file in files.documentation_pages():
        paths: list[str] = []
        relinked(file.content_string, in_repository(file.src_uri), lambda path, paths=paths: paths.append(path) or path)
        for path in {*paths} - present:
            if (ROOT / path).is_dir():
                yield path
                yield from (str(f.relative_to(ROOT)) for f in (ROOT / path).iterdir() if f.suffix in LANGUAGES)
            elif (ROOT / path).suffix in LANGUAGES:
                yield path


def source_page(path: str) -> str:
    """Return the Markdown of the page that shows a source file, or lists a folder."""
    lines = ["---", "search: {exclude: true}", "hide: [toc]", "---", "", f"# {path}", ""]
    if (ROOT / path).is_dir():
        names = sorted(f.name for f in (ROOT / path).iterdir() if not f.name.startswith("_"))
        shown = [name for name in names if Path(name).suffix in LANGUAGES]
        folder = posixpath.basename(path)
        lines += [f"- [{name}]({folder}/{name}.md)" if name in shown else f"- {name}" for name in names]
    else:
        lines += [f"`````{LANGUAGES[Path(path).suffix]}", (ROOT / path).read_text("utf-8").rstrip(), "`````"]
    return "\n".join(lines)


def on_config(config):
    config.repo_url, config.repo_name = ADDRESS, "hf_graphfilter"


def on_files(files, config):
    """Add the pages of the nav that lie outside docs/ (README.md ...) and the source files that pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    for uri in pages_of(config.nav):
        if files.get_file_from_path(uri) is None and (ROOT / uri).is_file():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri)))
    for path in sorted({*linked_paths(files)}):
        uri, hidden = f"{SOURCE}/{path}.md", InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, content=source_page(path), inclusion=hidden))


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri.startswith(f"{SOURCE}/"):
        return markdown
    addresses = {in_repository(file.src_uri): file.src_uri for file in files}
    source = in_repository(page.file.src_uri)

    def address(path):
        for uri in (addresses.get(path), addresses.get(f"{path}/README.md"), addresses.get(f"{SOURCE}/{path}.md")):
            if uri:
                return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        # what is nowhere stays as it is, for mkdocs to complain of
        return hosted(path) if (ROOT / path).exists() else posixpath.relpath(path, posixpath.dirname(source) or ".")

    # mkdocs reads no Markdown within HTML that does not ask for it
    return relinked(markdown, source, address).replace("<details>", '<details markdown="1">')
