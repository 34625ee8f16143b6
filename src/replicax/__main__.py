"""The command ``replicax``, also ``python -m replicax``."""

import sys
from collections.abc import Sequence

from replicax._src.hooks import hook


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` name, those of this process by default; returns the exit code.

    Raises:
      MissingPartError: The checkout lacks the command line.
    """
    code: int = hook("command_line").main(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
