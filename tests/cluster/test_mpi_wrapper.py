"""The C code of the library through which JAX reaches MPI. ``tests/engines/test_mpi.py`` compiles and uses it."""

import importlib.metadata
import importlib.util
import pathlib
import re

import pytest

from checks import message
from replicax import errors
from replicax._src.cluster.mpi_wrapper import wrapper_source

# What XLA's communicator for MPI calls in jaxlib 0.10.
CALLED = [
    "Allgather",
    "Allreduce",
    "Comm_free",
    "Comm_rank",
    "Comm_size",
    "Comm_split",
    "Error_string",
    "Finalize",
    "Init_thread",
    "Irecv",
    "Is_thread_main",
    "Isend",
    "Reduce_scatter",
    "Sendrecv",
    "Wait",
]


@pytest.fixture(scope="module")
def library():
    (folder,) = importlib.util.find_spec("jaxlib").submodule_search_locations
    return (pathlib.Path(folder) / "libjax_common.so").read_bytes()


def list_of(title, source):
    (line,) = (line for line in source.splitlines() if line.startswith(f"#define {title}(X) "))
    return set(re.findall(r"X\((\w+)\)", line.partition(")")[2]))


def test_each_name_of_jaxlib_is_defined_once(library):
    source = wrapper_source(library, importlib.metadata.version("jaxlib"))
    constants, missing = list_of("CONSTANTS", source), list_of("MISSING", source)
    functions = set(re.findall(r"^int (MPIABI_\w+)\(", source, re.MULTILINE))
    assert {f"MPIABI_{name}" for name in CALLED} <= functions
    assert not functions & missing
    assert len(constants | missing | functions) > 600
    assert {"MPIABI_COMM_WORLD", "MPIABI_UINT16_T", "MPIABI_IN_PLACE"} <= constants
    assert {"MPIABI_Bcast", "MPIXABI_Query_cuda_support"} <= missing


def test_jaxlib_without_the_names_is_an_error():
    message(
        errors.UnsupportedError,
        lambda: wrapper_source(b"\0MPIABI_Bcast\0", "0.99"),
        "jaxlib 0.99 does not look up MPIABI_Allgather, MPIABI_Allreduce",
        "Use gloo: unset JAX_CPU_COLLECTIVES_IMPLEMENTATION",
    )
