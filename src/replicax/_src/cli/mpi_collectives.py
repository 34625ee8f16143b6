"""``replicax mpi-collectives``: compiles the library through which JAX reaches the MPI of this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.mpi import CHOICE, LIBRARY
from replicax._src.cluster.mpi_wrapper import wrapper_source
from replicax._src.errors import ReplicaxError, UnsupportedError

_DESCRIPTION: Final = """\
Compiles the library through which JAX reaches the MPI of this machine, for the jaxlib that is installed, and checks that JAX
starts with it. It needs mpicc: on Debian `apt-get install libopenmpi-dev gcc`. Build it again for another jaxlib or MPI.
"""
_TIMEOUT_S: Final = 120


def add_parser(subparsers: Any) -> None:
    """Adds the command ``mpi-collectives``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "mpi-collectives",
        help="compile the library through which JAX reaches MPI",
        usage="%(prog)s build [FILE]",
        description=_DESCRIPTION,
        epilog="The exit code is 0 if the library was built and JAX starts with it, otherwise 1.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=["build"], help="compile the library")
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=Path("libmpiwrapper.so"),
        metavar="FILE",
        help="the library to write (./libmpiwrapper.so)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Builds the library and prints what to set. Returns the exit code."""
    file = options.file.absolute()
    try:
        version = importlib.metadata.version("jaxlib")
        source = wrapper_source(_jax_library(version).read_bytes(), version)
        _compile(source, file)
        _start_jax(file)
    except (ReplicaxError, subprocess.TimeoutExpired) as error:
        print(f"{options.parser.prog}: {error}", file=sys.stderr)
        return 1
    print(f"Built {file} for jaxlib {version}. Use it with:")
    print(f"  export {LIBRARY}={file} {CHOICE}=mpi")
    print(f"  mpirun -n 2 -x {LIBRARY} -x {CHOICE} {sys.executable} train.py")
    return 0


def _jax_library(version: str) -> Path:
    spec = importlib.util.find_spec("jaxlib")
    folders = spec.submodule_search_locations if spec is not None else None
    path = Path(folders[0] if folders else "", "libjax_common.so")
    if not path.is_file():
        raise UnsupportedError(
            f"jaxlib {version} has no {path.name}, which names what JAX needs of MPI: use gloo."
        )
    return path


def _compile(source: str, file: Path) -> None:
    command = ["mpicc", "-shared", "-fPIC", "-O1", "-w", "-x", "c", "-", "-o", os.fspath(file)]
    try:
        done = subprocess.run(
            command, input=source, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise ClusterEnvironmentError(
            "There is no mpicc on the PATH. Install the development files of your MPI and a C compiler, on Debian "
            "`apt-get install libopenmpi-dev gcc`, or load the MPI module of your cluster."
        ) from None
    if done.returncode:
        raise ClusterEnvironmentError(
            f"mpicc failed with code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )


def _start_jax(file: Path) -> None:
    """Lets JAX start with the library in a process of its own, which MPI may end."""
    environment = {LIBRARY: os.fspath(file), CHOICE: "mpi", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise ClusterEnvironmentError(
            f"JAX does not start with {file}; the process ended with code {done.returncode}: {done.stderr.strip()}"
        )
