"""Shared parts of tests in several folders."""

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import hypothesis
import jax
import keras
import numpy as np
import pytest

import replicax as rx

runs_long = True  # conftest.py knows
QUICK_START = Path(__file__).with_name("quick_start")
SOURCES = Path(__file__).parents[1] / "src"


def _has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="the machine has no IPv6")


def not_with_keras_3_12(why):
    """Marks a test of behaviour that the oldest supported version of Keras does not have."""
    return pytest.mark.skipif(keras.__version__.startswith("3.12."), reason=f"Keras 3.12 {why}")


def examples(number, *, short):
    """``hypothesis.settings`` of a test that compiles each example: fewer examples if long tests are left out."""
    return hypothesis.settings(max_examples=number if runs_long else short)


def xla_flags(optimization_level=0):
    """XLA_FLAGS with which programs compile in a third of the time; none if the long tests run too.

    XLA's code generation for CPUs takes three quarters of the time of most tests: these flags skip most of it. The
    program, its partitioning by XLA and its collectives stay the same. `make test-long` compiles like users' programs.

    Args:
      optimization_level: 1 for heavy computations: compiling takes twice as long then, and computing half.
    """
    if runs_long:
        return ""
    flags = [
        f"--xla_backend_optimization_level={optimization_level}",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if jax.__version_info__ < (0, 11):  # jaxlib 0.12 ends a process that has an unknown flag
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


def message(error_type, call, *says):
    """The message of the error that ``call`` raises; checks that it contains all of ``says``."""
    with pytest.raises(error_type) as caught:
        call()
    assert type(caught.value) is error_type, f"{type(caught.value)} is a subclass"
    text = str(caught.value)
    missing = [word for word in says if word not in text]
    assert not missing, f"{missing} not in: {text}"
    return text


def catches(pid, number):
    """True if a process has its own handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1)


def is_there(pid):
    """True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ends between opening and reading
        return False


def path_of_programs(*others):
    """PYTHONPATH for processes whose environment a test makes, so that Keras is imported in half the time.

    Args:
      *others: Folders in place of this process's PYTHONPATH.
    """
    if not others:
        return os.environ["PYTHONPATH"]
    return os.pathsep.join([str(QUICK_START), *map(str, others), str(SOURCES)])


def in_a_process_of_its_own(program, *options, **environment):
    """Runs Python code with a fresh JAX and Keras, and returns its output.

    Args:
      program: The code, indented as where it stands.
      *options: Of Python: ``"-W", "error"``.
      **environment: Variables, besides this process's.
    """
    result = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path_of_programs(), "JAX_PLATFORMS": "cpu", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def assert_close(got, expected, rtol, atol=0.0, what=""):
    """Of pytrees of arrays."""
    keras.tree.assert_same_structure(got, expected)
    for left, right in zip(keras.tree.flatten(got), keras.tree.flatten(expected)):
        np.testing.assert_allclose(left, right, rtol=rtol, atol=atol, err_msg=what)


def assert_logs_equal(got, expected, rtol):
    """Of dicts from names to what a loop reports under them."""
    assert got.keys() == expected.keys()
    for name in expected:
        assert_close(got[name], expected[name], rtol, what=name)


def assert_weights_equal(got, expected, subject):
    """Of lists of (path, array).

    Args:
      subject: Has the tolerances: ``weight_rtol`` and ``weight_atol``.
    """
    assert len(got) == len(expected)
    for (path, value), (_, right) in zip(got, expected):
        assert value.dtype == right.dtype, path
        assert_close(value, right, subject.weight_rtol, subject.weight_atol, path)


def tpu_strategy(num_replicas, num_logical_devices, **options):
    """A TPUStrategy on virtual devices: a replica has the cores of one chip, or of adjacent chips."""
    resolver = rx.cluster_resolver.TPUClusterResolver("local")
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    shapes = {1: [1, 1, 1, 1], 2: [1, 1, 1, 2], 4: [2, 1, 1, 2], 8: [2, 2, 1, 2]}
    assignment = rx.tpu.experimental.DeviceAssignment.build(
        topology, shapes[num_logical_devices], num_replicas=num_replicas
    )
    return rx.TPUStrategy(resolver, assignment, **options)


def closure_statistics(**counts):
    """The coordinator's counters of scheduled functions: 0, except for ``counts``."""
    names = "scheduled finished failed cancelled retried queued in_flight rounds gradients_dropped"
    return {**dict.fromkeys(names.split(), 0), **counts}
