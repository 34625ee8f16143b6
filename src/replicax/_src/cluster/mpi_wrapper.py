"""Generates the C code of the library through which JAX reaches MPI. ``mpi_wrapper.c`` has its functions. Pure."""

from __future__ import annotations

import re
from pathlib import Path

from replicax._src.errors import UnsupportedError

_FUNCTIONS = Path(__file__).with_name("mpi_wrapper.c")


def wrapper_source(library: bytes, version: str) -> str:
    """Returns the C code for the names that JAX looks up.

    Args:
      library: The contents of jaxlib's ``libjax_common.so``, which has the names.
      version: The version of jaxlib, for the message.

    Raises:
      UnsupportedError: This jaxlib does not use MPI as the functions expect it.
    """
    # 634 names in jaxlib 0.10.2. A linker may let a name share the end of another string, so what precedes it is free.
    names = {name.decode() for name in re.findall(rb"MPIX?ABI_\w+(?=\0)", library)}
    functions = _FUNCTIONS.read_text()
    here = set(re.findall(r"^int (MPIABI_\w+)\(", functions, re.MULTILINE))
    constants = {f"MPIABI_{name}" for name in re.findall(r"\bSET\((\w+)\) ?", functions) if name != "name"}
    absent = sorted((here | constants) - names)
    if absent:
        raise UnsupportedError(
            f"jaxlib {version} does not look up {', '.join(absent[:3])}{' …' * (len(absent) > 3)}, so that it does not use "
            "MPI through MPItrampoline, as jaxlib 0.10 does. Use gloo: unset JAX_CPU_COLLECTIVES_IMPLEMENTATION."
        )
    is_constant = {name: name == name.upper() for name in sorted(names - here)}
    lists = {
        "CONSTANTS": [name for name, yes in is_constant.items() if yes],
        "MISSING": [name for name, yes in is_constant.items() if not yes],
    }
    heads = (
        f"#define {title}(X) {' '.join(f'X({name})' for name in found)}" for title, found in lists.items()
    )
    return "\n".join([*heads, functions])
