"""Disks that are full, or become read-only: real ones, mounted so that only the tested process sees them."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from checks import path_of_programs

_IN_MOUNTS_OF_ITS_OWN = ["unshare", "--user", "--map-root-user", "--mount"]


def _can_mount():
    command = [*_IN_MOUNTS_OF_ITS_OWN, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and not subprocess.run(command, capture_output=True).returncode


PROGRAM = """
import os, subprocess, sys
import numpy as np
import replicax as rx
from replicax._src.checkpoint import checkpoint as checkpoints
from replicax.checkpoint import CheckpointWriteError

def mount(*options):
    subprocess.run(["mount", *options, "saved"], check=True)

def failing(call):
    try:
        call()
    except CheckpointWriteError as error:
        print(error.errno, error)
        print("left", sorted(os.listdir("saved")))
        return
    print("no error")

os.mkdir("saved")
mount("-t", "tmpfs", "-o", "size=3m", "tmpfs")
v = rx.Variable(np.arange(500_000, dtype=np.float32))
checkpoint = rx.Checkpoint(v=v)
manager = rx.CheckpointManager(checkpoint, "saved", max_to_keep=3)
manager.save()
manager.wait()
failing(lambda: (manager.save(), manager.wait()))  # seen before anything is written
check_space, checkpoints.check_space = checkpoints.check_space, lambda path, num_bytes: None
failing(lambda: (manager.save(), manager.wait()))  # another program has taken the room meanwhile
failing(lambda: checkpoint.write("saved/exact"))
checkpoints.check_space = check_space
mount("-o", "remount,size=40m")
manager.save()
manager.wait()
mount("-o", "remount,ro")
failing(lambda: (manager.save(), manager.wait()))
failing(lambda: checkpoint.write("saved/exact"))
failing(lambda: rx.CheckpointManager(checkpoint, "saved"))
v.assign(v * 0)
checkpoint.restore(manager.latest_checkpoint).assert_consumed()
print("restored", bool((v.numpy() == np.arange(500_000)).all()))
"""


@pytest.mark.skipif(not _can_mount(), reason="disks cannot be mounted here")
def test_full_and_read_only_disks(tmp_path):
    """The errors say so, existing checkpoints are unchanged, and no half-written file is left."""
    result = subprocess.run(
        [*_IN_MOUNTS_OF_ITS_OWN, sys.executable, "-c", textwrap.dedent(PROGRAM)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path_of_programs(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()
    full, read_only = "disk is full. Free some space", "its disk is read-only. Choose another directory"
    expected = ["free. Nothing was written", full, full, read_only, read_only, read_only]
    errors = [line for line in said if line[0].isdigit()]
    assert len(errors) == len(expected), result.stdout
    assert "a margin of 1.0 MiB, but its disk has" in errors[0]
    for error, text in zip(errors, expected, strict=True):
        assert text in error, result.stdout
    assert "no error" not in said
    assert [line for line in said if line.startswith("left")] == ["left ['ckpt-1']"] * 3 + [
        "left ['ckpt-1', 'ckpt-3']"
    ] * 3
    assert said[-1] == "restored True"


CONTINUOUS = """
import logging, os, subprocess, sys
import numpy as np
import replicax as rx
from replicax._src.checkpoint import checkpoint as checkpoints

def mount(*options):
    subprocess.run(["mount", *options, "saved"], check=True)

def train(num_steps):
    for _ in range(num_steps):
        v.assign_add(v * 0 + 1)
        manager.save(int(v[0]))
        manager._background.wait(60, keeps_failure=True)
    print("step", int(v[0]), sorted(os.listdir("saved")), flush=True)

log = logging.getLogger("replicax")
log.setLevel(logging.INFO)
log.addHandler(logging.StreamHandler(sys.stdout))
os.mkdir("saved")
mount("-t", "tmpfs", "-o", "size=3m", "tmpfs")
v = rx.Variable(np.zeros(500_000, np.float32))
manager = rx.CheckpointManager(rx.Checkpoint(v=v), "saved", max_to_keep=2, continuous=True)
train(7)
check_space, checkpoints.check_space = checkpoints.check_space, lambda path, num_bytes: None
train(8)  # another program has taken the room between the check and the write
checkpoints.check_space = check_space
mount("-o", "remount,ro,size=40m")
train(20)
mount("-o", "remount,rw,size=40m")
train(40)
manager.close()
v.assign(v * 0)
print("restored", manager.restore_or_initialize(), int(v[0]))
"""


@pytest.mark.skipif(not _can_mount(), reason="disks cannot be mounted here")
def test_continuous_saves_on_full_and_read_only_disks(tmp_path):
    """One warning for each state of the disk; training goes on, and earlier checkpoints stay."""
    result = subprocess.run(
        [*_IN_MOUNTS_OF_ITS_OWN, sys.executable, "-c", CONTINUOUS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path_of_programs(), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()
    states = [
        "Free some space",
        "its disk is read-only. Choose another directory",
        "The disk takes checkpoints again.",
    ]
    told = [line for line in said if any(state in line for state in states)]
    assert len(told) == 3, result.stdout
    for line, state in zip(told, states, strict=True):
        assert state in line
        assert state == states[2] or "Training continues, and later saves try again" in line
    steps = [line for line in said if line.startswith("step")]
    assert steps == [
        "step 7 ['ckpt-1']",
        "step 15 ['ckpt-1']",
        "step 35 ['ckpt-1']",
        "step 75 ['ckpt-74', 'ckpt-75']",
    ]
    assert said[-1].endswith("saved/ckpt-75 75")
