"""Build hook of hatchling: README.md as it reads where it stands alone, and the addresses of the project.

Both follow src/replicax/_src/packaging/home.py: without a public repository, links to files become names of these
files."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURES = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp")
_IN_CODE = re.compile(r"(^```.*?^```[^\n]*$|^~~~.*?^~~~[^\n]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"(^```.*?^```[^\n]*$|^~~~.*?^~~~[^\n]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)+)\]\(([^)\s]+)\)")  # its words may be code
_TARGETS = (
    re.compile(r"(\]\()([^)\s]+)"),  # [text](target), ![text](target)
    re.compile(r"(^\[[^\]]+\]: *)(\S+)", re.MULTILINE),  # [name]: target
    re.compile(r"(\b(?:src|href)=\")([^\"]+)"),  # <img src="target">
)
_SEVERAL = re.compile(r"(?<=\bsrcset=\")[^\"]+")  # <source srcset="target 1x, target 2x">
_ONE = re.compile(r"(^\s*|,\s+)([^\s,]+)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#", re.IGNORECASE)


class CustomMetadataHook(MetadataHookInterface):
    """Sets ``readme`` and ``urls``. Links to files go to the tag of the version, those of a dev version to ``main``."""

    def update(self, metadata: dict[str, Any]) -> None:
        version = metadata["version"]
        branch = "main" if "dev" in version else f"v{version}"
        home = runpy.run_path(str(Path(self.root) / "src" / "replicax" / "_src" / "packaging" / "home.py"))
        repository, site = home["REPOSITORY"], home["SITE"]
        metadata["urls"] = urls(repository, site)
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(text, repository, branch) if repository else with_named_files(text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def urls(repository: str, site: str) -> dict[str, str]:
    """Returns the addresses of the project. There are none before it has a public home."""
    if not repository:
        return {"Documentation": site} if site else {}
    return {
        "Homepage": repository,
        "Documentation": site or f"{repository}/tree/main/docs",
        "Source": repository,
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def with_named_files(text: str) -> str:
    """Returns Markdown in which links to files are the name of the file instead. Code stays as it is.

    >>> with_named_files("[Notes](docs/a.md#b), [JAX](https://example.com)")
    'Notes (docs/a.md), [JAX](https://example.com)'
    """

    def named(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if _ELSEWHERE.match(target):
            return match[0]
        return f"{words} ({target.partition('#')[0].removeprefix('./')})"

    parts = _FENCED.split(text)
    for number in range(0, len(parts), 2):  # the others are code
        parts[number] = _LINK.sub(named, parts[number])
    return "".join(parts)


def with_absolute_links(text: str, repository: str, branch: str) -> str:
    """Returns Markdown in which links to files, and pictures, lead to a branch of the repository. Code stays as it is."""

    def absolute(match: re.Match[str]) -> str:
        target = match[2]
        if _ELSEWHERE.match(target):
            return match[0]
        path = target.partition("#")[0]
        kind = "raw" if path.lower().endswith(_PICTURES) else "blob"
        return f"{match[1]}{repository}/{kind}/{branch}/{target.removeprefix('./')}"

    parts = _IN_CODE.split(text)
    for number in range(0, len(parts), 2):  # the others are code
        for pattern in _TARGETS:
            parts[number] = pattern.sub(absolute, parts[number])
        parts[number] = _SEVERAL.sub(lambda several: _ONE.sub(absolute, several[0]), parts[number])
    return "".join(parts)
