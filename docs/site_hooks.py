"""For the site: pages that lie outside docs/ join it, and links to files that are no pages become plain text,
or links into repo_url."""

import logging
import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

logger = logging.getLogger("mkdocs.hooks.site")  # its warnings end a strict build
ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "recipes/README.md": "recipes.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(
    r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<file>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)|(?<=\]\()(?P<image>docs/[^)\s]+)(?=\))"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    sources = {site: source for source, site in PAGES.items()}
    here = Path(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def rewritten(link: re.Match[str]) -> str:
        if link["image"]:
            return link["image"].removeprefix("docs/")
        target = Path(os.path.normpath(here / link["file"])).as_posix()
        site = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(site) is not None:
            up = "../" * page.file.src_uri.count("/")
            return f"[{link['text']}]({up}{site}{link['anchor'] or ''})"
        # code that looks like a link, or a broken one, which the build reports
        if not (ROOT / target).exists():
            return link[0]
        return (
            f"[{link['text']}]({config.repo_url.rstrip('/')}/blob/main/{target})"
            if config.repo_url
            else link["text"]
        )

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a notebook, which reach no `on_page_markdown`."""

    def rewritten(link: re.Match[str]) -> str:
        file = files.get_file_from_path(link["file"])
        if file is None:
            logger.warning("%s links to %s, which is no page", page.file.src_uri, link["file"])
            return link[0]
        return f'href="{file.url_relative_to(page.file)}{link["anchor"] or ""}"'

    return (
        re.sub(r'href="(?P<file>[^":#]+\.md)(?P<anchor>#[^"]*)?"', rewritten, html)
        if page.file.src_uri.endswith(".ipynb")
        else html
    )


class FieldLists(griffe.Extension):
    """Docstring lines such as `chunk_size: tokens a chunk` as a list."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"(?m)^([a-z_]+(?:, [a-z_]+)*): ", r"\n- `\1`: ", obj.docstring.value
            )
