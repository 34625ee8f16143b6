"""What tests of several folders share."""

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


def _has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="the machine has no IPv6")


def not_with_keras_3_12(why):
    """Marks a test of what that version of Keras, the oldest that is supported, does otherwise by itself."""
    return pytest.mark.skipif(keras.__version__.startswith("3.12."), reason=f"Keras 3.12 {why}")


def examples(number, *, short):
    """``hypothesis.settings`` of a test each of whose examples is compiled: fewer, where what is marked long is left out."""
    return hypothesis.settings(max_examples=number if runs_long else short)


def xla_flags(optimization_level=0):
    """XLA_FLAGS with which programs are compiled in a third of the time; none where the long tests run too.

    Three quarters of the time of most tests go where XLA makes code for CPUs: these leave out most of what it does there. What
    a program is, how XLA partitions it and which collectives it has stays the same. `make test-long` compiles as users' programs do.

    Args:
      optimization_level: 1 where much is computed: compiling takes twice as long then, computing half.
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
    """The message of the error that ``call`` raises, having checked that it says all of ``says``."""
    with pytest.raises(error_type) as caught:
        call()
    assert type(caught.value) is error_type, f"{type(caught.value)} is a subclass"
    text = str(caught.value)
    missing = [word for word in says if word not in text]
    assert not missing, f"{missing} not in: {text}"
    return text


def catches(pid, number):
    """Whether a process has a function of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1)


def path_of_programs(*others):
    """PYTHONPATH of processes whose environment a test makes, in which Keras is imported in half the time.

    Args:
      *others: Folders in place of this process's PYTHONPATH.
    """
    return os.pathsep.join([str(QUICK_START), *map(str, others)]) if others else os.environ["PYTHONPATH"]


def in_a_process_of_its_own(program, *options, **environment):
    """Runs Python code with a fresh JAX and Keras, and gives what it printed.

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
    """Of nests of arrays."""
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
    """A TPUStrategy on virtual devices: the cores of a chip, and of chips beside one another, are a replica."""
    resolver = rx.cluster_resolver.TPUClusterResolver("local")
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    shapes = {1: [1, 1, 1, 1], 2: [1, 1, 1, 2], 4: [2, 1, 1, 2], 8: [2, 2, 1, 2]}
    assignment = rx.tpu.experimental.DeviceAssignment.build(
        topology, shapes[num_logical_devices], num_replicas=num_replicas
    )
    return rx.TPUStrategy(resolver, assignment, **options)


def closure_statistics(**counts):
    """What a coordinator counts of scheduled functions: 0, but for ``counts``."""
    names = "scheduled finished failed cancelled retried queued in_flight rounds gradients_dropped"
    return {**dict.fromkeys(names.split(), 0), **counts}
