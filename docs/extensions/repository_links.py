"""A page's relative link to a file that is not a page (an example, a source file) leads to the file in the repository.

While there is no public repository, the site has a copy of the file, which Sphinx makes.
"""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

log = logging.getLogger(__name__)
LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^)\s#]+|[\w.-]+\.ipynb)(?=[)#])")


def link_to_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    docs = Path(app.srcdir)
    page = docs / f"{docname}.md"

    def linked(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match[1]))
        if target.suffix == ".ipynb":  # beside its page
            return f"path:{match[1]}"
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            log.warning("there is no %s", match[1], location=docname, type="replicax", subtype="link")
        if not app.config.repository_url:
            return f"path:{match[1]}"
        return f"{app.config.repository_url}/blob/main/{target.relative_to(docs.parent).as_posix()}"

    source[0] = LINK.sub(linked, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("repository_url", "", "env", types=(str,))
    app.connect("source-read", link_to_repository)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
