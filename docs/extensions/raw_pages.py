"""Pages that read well in the checkout become pages of the site: blocks are directives, and tutorials' listings cells."""

from blocks import as_directives, with_code_cells
from sphinx.application import Sphinx

DIRECTIVES = {"api": "api", "contents": "toctree"}
TUTORIALS = "tutorials/"


def prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = as_directives(source[0], DIRECTIVES)
    if docname.startswith(TUTORIALS) and docname != f"{TUTORIALS}index":
        source[0] = with_code_cells(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", prepare)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
