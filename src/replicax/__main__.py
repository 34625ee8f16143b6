"""The command ``replicax``, also ``python -m replicax``."""

import argparse
import sys
from collections.abc import Sequence

from replicax._src.cli import doctor, launch, plan, server, top

# Each has ``add_parser(subparsers)``, whose parser has the defaults ``run``, a function from options to the exit code,
# and ``parser``, itself.
COMMANDS = (launch, server, top, plan, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` name, those of this process by default; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="replicax", description="tf.distribute's programming model for JAX and Keras 3."
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="command")
    for command in COMMANDS:
        command.add_parser(subparsers)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
