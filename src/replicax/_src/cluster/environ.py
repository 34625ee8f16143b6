"""Reads the environment variables of launchers: numbers, sets of variables, the leader's port. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from replicax._src.cluster.errors import ClusterEnvironmentError

PORT_VARIABLE = "REPLICAX_PORT"

# Derived ports are FIRST_PORT to FIRST_PORT + NUM_PORTS - 1: below the ports that Linux gives to outgoing connections.
FIRST_PORT = 20480
NUM_PORTS = 8192

# Time limits in seconds, by the environment variables that may set them; the values are the defaults.
START_LIMIT = "REPLICAX_START_TIMEOUT_S"
SILENCE_LIMIT = "REPLICAX_SILENCE_TIMEOUT_S"
STALL_LIMIT = "REPLICAX_STALL_WARNING_S"
STUCK_LIMIT = "REPLICAX_STUCK_TIMEOUT_S"
FAILURE_SAVE_LIMIT = "REPLICAX_FAILURE_SAVE_TIMEOUT_S"
LIMITS_S = {
    START_LIMIT: 300.0,
    SILENCE_LIMIT: 60.0,
    STALL_LIMIT: 60.0,
    STUCK_LIMIT: 1800.0,
    FAILURE_SAVE_LIMIT: 600.0,
}
_MOST_S = 10**7

CPU_COLLECTIVES = "JAX_CPU_COLLECTIVES_IMPLEMENTATION"


def limit_s(environ: Mapping[str, str], name: str) -> float:
    """Returns one of ``LIMITS_S``, from the environment or its default.

    Raises:
      ClusterEnvironmentError: The value is not a positive number of seconds, or is more than four months.

    >>> limit_s({"REPLICAX_START_TIMEOUT_S": "0.5"}, "REPLICAX_START_TIMEOUT_S")
    0.5
    """
    text = environ.get(name)
    if text is None:
        return LIMITS_S[name]
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= _MOST_S:
            return float(text)
    raise ClusterEnvironmentError(
        f"{name}={text!r} in the environment must be a number of seconds above 0, of at most {_MOST_S}. Correct it, or "
        f"leave it out for {LIMITS_S[name]:g}."
    )


def check_cpu_collectives(requested: str | None) -> None:
    """Checks that the requested library for collectives between processes on CPUs is one that replicax uses.

    Args:
      requested: The value of ``JAX_CPU_COLLECTIVES_IMPLEMENTATION``, or of JAX's option of that name.

    Raises:
      ClusterEnvironmentError: MPI is requested.
    """
    if requested == "mpi":
        raise ClusterEnvironmentError(
            f"{CPU_COLLECTIVES} is mpi, and replicax no longer has collectives by MPI. Unset it, or set it to gloo, which "
            "comes with JAX: mpirun starts the workers as before, and they communicate by gloo."
        )


def require(environ: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
    """Checks that all of these variables are set.

    Args:
      launcher: The launcher that sets them, for the message: ``torchrun``.

    Raises:
      ClusterEnvironmentError: Some are missing.
    """
    missing = [name for name in names if not environ.get(name)]
    if missing:
        there = [f"{name}={environ[name]!r}" for name in names if environ.get(name)]
        raise ClusterEnvironmentError(
            f"{', '.join(missing)} not found in environment. {launcher} sets {', '.join(names)}; there is "
            f"{', '.join(there) or 'none of them'}. Start the program with {launcher}, or set what is missing, or set "
            f"TF_CONFIG."
        )


def whole_number(environ: Mapping[str, str], name: str, *, least: int = 0, most: int | None = None) -> int:
    """Returns the number that a variable holds.

    Raises:
      ClusterEnvironmentError: The variable is not set, not a whole number, or out of range.
    """
    value = environ.get(name, "")
    number = int(value) if value.strip().isdecimal() and value.isascii() else -1
    if number < least or (most is not None and number > most):
        allowed = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ClusterEnvironmentError(
            f"{name}={value!r} in the environment must be a whole number {allowed}. Correct it, or leave it out "
            f"together with the launcher's other variables."
        )
    return number


def optional_number(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the number that a variable holds; None if it is not set or empty.

    Raises:
      ClusterEnvironmentError: The value is not a whole number.
    """
    return whole_number(environ, name) if environ.get(name) else None


def rank_and_size(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    """Returns the number of this process, from 0, and the number of processes.

    Args:
      rank: The variable that has the number of this process.
      size: The variable that has the number of processes.

    Raises:
      ClusterEnvironmentError: One is not a whole number, or the rank is not less than the size.
    """
    num_processes = whole_number(environ, size, least=1)
    number = whole_number(environ, rank)
    if number >= num_processes:
        raise ClusterEnvironmentError(
            f"{rank}={number} in the environment must be less than {size}={num_processes}: processes are numbered from "
            f"0. One of the two is left over from another launch, or was set by hand."
        )
    return number, num_processes


def leader_port(environ: Mapping[str, str], number: int) -> int:
    """Returns the port of the leader: ``REPLICAX_PORT``, or else one derived from a number of the job.

    Args:
      number: A number that is the same in all tasks and differs between jobs.

    Raises:
      ClusterEnvironmentError: ``REPLICAX_PORT`` is not a port.
    """
    if environ.get(PORT_VARIABLE):
        return whole_number(environ, PORT_VARIABLE, least=1, most=65535)
    return FIRST_PORT + number % NUM_PORTS
