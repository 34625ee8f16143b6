"""``replicax run``: runs a script as the task that the environment of this process describes."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Final

from replicax._launch.python_arguments import add_script, check_keras, python_arguments
from replicax._src.cluster.machine_layout import RESTART_COUNT_VARIABLE

_DESCRIPTION: Final = """\
Runs a script in this process, as the task that the launcher of the process describes: srun, mpirun, torchrun, TF_CONFIG. It
checks Keras's backend first, and sets REPLICAX_RESTART_COUNT under Slurm. Otherwise it is the same as python. To start all
tasks of a cluster on this machine use replicax launch.
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command ``run``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run a script as one task of a cluster, under srun, mpirun or torchrun",
        usage="%(prog)s (script.py | -m module) [arguments ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_script(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Replaces this process by Python with the script. Ends it with code 2 if the options are wrong."""
    command = python_arguments(options, options.parser)
    for note in check_keras(command, options.parser):
        print(note, file=sys.stderr)
    count = os.environ.get("SLURM_RESTART_COUNT", "0")
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *command], {RESTART_COUNT_VARIABLE: count, **os.environ})
