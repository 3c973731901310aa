"""What the site has of the repository beside `docs/`: its README as the front page, and what pages
link to."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
BESIDE = {  # path in the repository -> path in the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "reports/example.png": "report.png",
}
_CODE = re.compile(r"`[^`\n]+`")  # GitHub wants its bars escaped in a table, the site as they are
_LINK = re.compile(r"(\]\()([^)#\s:]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    for path, name in BESIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links as they are in the site."""
    name = page.file.src_uri
    whence = {there: path for path, there in BESIDE.items()}.get(name, f"docs/{name}")

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(whence), link[2]))
        there = BESIDE.get(path, path.removeprefix("docs/"))
        return link[1] + posixpath.relpath(there, posixpath.dirname(name) or ".")

    return _LINK.sub(moved, _CODE.sub(lambda code: code[0].replace("\\|", "|"), markdown))
