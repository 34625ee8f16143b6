"""``replicax mpi-collectives build`` without a compiler, with one that fails, and with a jaxlib that does not fit."""

import re

import pytest

from replicax.__main__ import main
from replicax._src.cli import mpi_collectives


@pytest.fixture(autouse=True)
def few_names(tmp_path, monkeypatch):
    """A jaxlib with the names that the C code needs, which is read in no time."""
    source = mpi_collectives.wrapper_source.__globals__["_FUNCTIONS"].read_text()
    names = re.findall(r"^int (MPIABI_\w+)\(", source, re.MULTILINE)
    names += [f"MPIABI_{name}" for name in re.findall(r"\bSET\((\w+)\)", source)]
    library = tmp_path / "libjax_common.so"
    library.write_bytes(b"\0".join(name.encode() for name in names) + b"\0")
    monkeypatch.setattr(mpi_collectives, "_jax_library", lambda version: library)
    monkeypatch.setenv("PATH", str(tmp_path))
    return library


def compiler(folder, script):
    (folder / "mpicc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "mpicc").chmod(0o755)


def build(capsys, folder):
    code = main(["mpi-collectives", "build", str(folder / "libmpiwrapper.so")])
    return code, capsys.readouterr()


def test_without_a_compiler(capsys, tmp_path):
    code, printed = build(capsys, tmp_path)
    assert (code, printed.out) == (1, "")
    assert printed.err.startswith("replicax mpi-collectives: There is no mpicc on the PATH. Install")


def test_compiler_that_fails(capsys, tmp_path):
    compiler(tmp_path, "echo 'fatal error: mpi.h: No such file' >&2; exit 1")
    code, printed = build(capsys, tmp_path)
    assert code == 1
    assert "mpicc failed with code 1: fatal error: mpi.h: No such file" in printed.err


def test_jaxlib_that_does_not_fit(capsys, tmp_path, few_names):
    few_names.write_bytes(few_names.read_bytes().replace(b"MPIABI_Wait\0", b""))
    code, printed = build(capsys, tmp_path)
    assert code == 1
    assert "does not look up MPIABI_Wait" in printed.err


@pytest.mark.timeout(120)
def test_library_with_which_jax_does_not_start_in_a_process(capsys, tmp_path):
    compiler(tmp_path, "exit 0")
    code, printed = build(capsys, tmp_path)
    assert code == 1
    assert f"JAX does not start with {tmp_path / 'libmpiwrapper.so'}" in printed.err
    assert "could not dlopen library" in printed.err.lower()
