"""``{command} replicax launch`` is a directive: what ``replicax launch --help`` prints."""

import contextlib
import io
import os

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from replicax.__main__ import main

COLUMNS = "84"


def help_of(command: str) -> str:
    """What a command of ``replicax`` prints with ``--help``."""
    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS  # argparse wraps its lines to it
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*command.split()[1:], "--help"])
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    return printed.getvalue()


class Command(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        text = help_of(self.arguments[0])
        if not text:
            raise self.error(f"{self.arguments[0]} --help prints nothing")
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command", Command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
