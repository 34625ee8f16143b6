"""The script or module that a command runs, and the check of its Keras."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from replicax._launch.script_keras import script_path, use_of_keras
from replicax._src.keras.backend import chosen_backend, wrong_backend


def add_script(parser: argparse.ArgumentParser) -> None:
    """Adds the script and its arguments, or ``-m`` and a module."""
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="run a module, like python -m"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def python_arguments(
    options: argparse.Namespace, parser: argparse.ArgumentParser, *, is_here: bool = True
) -> list[str]:
    """Returns the arguments of ``python``.

    Args:
      is_here: True if the script runs on this machine, where its path must exist.
    """
    if options.module is not None:
        if not options.module:
            parser.error("-m needs the name of a module")
        return ["-m", *options.module]
    command = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not command:
        parser.error("which script? Give its path after the options, or -m and a module")
    script = Path(command[0])
    if not is_here:
        return command
    if not script.exists():
        parser.error(f"there is no script {command[0]!r} in {Path.cwd()}")
    if not os.access(script, os.R_OK):
        parser.error(f"the script {command[0]!r} cannot be read: no permission")
    return command


def check_keras(command: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Refuses a script whose Keras would not run on JAX. Returns a note to show if that is not certain."""
    path = script_path(command)
    if path is None or chosen_backend(os.environ).is_jax:
        return []
    use = use_of_keras(path)
    if use is None:
        return []
    text = str(wrong_backend(chosen_backend(os.environ)))
    if use.is_certain:
        parser.error(f"{path}, line {use.line}, imports Keras. {text}")
    return [
        f"{path}, line {use.line}, imports Keras. Unless a module that it imports before sets KERAS_BACKEND: {text}"
    ]
