"""``replicax export``: writes a checkpoint to a file of another program."""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any, Final

from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError

_DESCRIPTION: Final = """\
Writes a checkpoint to a file of another program, in slabs: a model of any size needs less than 0.5 GB of memory. What is
read is verified. The ending of --to says which file:

  model.safetensors                the arrays under their names in the checkpoint
  model.weights.h5, model.keras    a Keras model, as Keras itself writes it; needs --model
  DIRECTORY                        a checkpoint of orbax, a pytree of nested dicts; needs orbax-checkpoint
"""
_EPILOG: Final = """\
--model names a function without arguments that makes the Keras model that was saved. Its script is run, but not as
__main__. Keras variables of 1 MB and more are not allocated. The exit code is 0 if the file was written, otherwise 1.
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command ``export``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "export",
        help="write a checkpoint to safetensors, to files of Keras, or for orbax",
        usage="replicax export CHECKPOINT --to FILE [--only PATTERN] [--model SCRIPT:FUNCTION]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a directory, for its latest one"
    )
    parser.add_argument("--to", required=True, metavar="FILE", help="the file or directory to write")
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="the arrays to write, 'model/*' for example; may be given several times",
    )
    parser.add_argument(
        "--model",
        metavar="SCRIPT:FUNCTION",
        help="what makes the Keras model: train.py:make_model, or package.module:make_model",
    )
    parser.add_argument(
        "--name", default="model", help="the name of the Keras model in the checkpoint (model)"
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Writes the file. Returns the exit code."""
    from replicax._src.checkpoint.export import export  # imports JAX

    try:
        model = None if options.model is None else _function(options.model)
        written = export(options.checkpoint, options.to, only=options.only, model=model, name=options.name)
    except ReplicaxError as error:
        print(f"replicax export: {error}", file=sys.stderr)
        return 1
    print(f"{written}: {_num_bytes(written):,} bytes")
    return 0


def _function(given: str) -> Callable[[], Any]:
    """Returns a function of a script or a module.

    Raises:
      InvalidArgumentError: There is none.
    """
    source, _, name = given.rpartition(":")
    if not source or not name.isidentifier():
        raise InvalidArgumentError(
            f"--model is the name of a script or module and of a function, train.py:make_model for example; got {given!r}."
        )
    os.environ.setdefault("KERAS_BACKEND", "jax")
    if source.endswith(".py"):
        if not os.path.isfile(source):
            raise InvalidArgumentError(f"--model {given}: there is no file {source!r}.")
        sys.path.insert(0, os.path.dirname(os.path.abspath(source)))
        names = runpy.run_path(source, run_name="replicax_export")
    else:
        sys.path.insert(0, os.getcwd())
        names = vars(importlib.import_module(source))
    if not callable(names.get(name)):
        raise InvalidArgumentError(f"--model {given}: {source!r} has no function {name!r}.")
    return names[name]


def _num_bytes(path: str) -> int:
    folders = os.walk(path) if os.path.isdir(path) else [("", [], [path])]
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in folders for name in names)
