"""Plans for replicas of several TPUs or GPUs: groups, layouts of variables, memory. Nothing ran on any device."""

import pytest

from logical_training import F32, ROWS, WIDTH, Training
from replicax._src.devices.hardware import hardware_of


@pytest.fixture(scope="module")
def training():
    return Training()


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5e:4x4", "v5p:2x2x2", "h100:1x2", "h100:2x8"])
def test_a_step_of_replicas_of_two(training, topology):
    found = training.strategy.plan(training.step, args=(training.described,), topology=topology)
    num_replicas = hardware_of(topology).num_devices // 2
    assert found.fits
    assert (found.num_replicas, found.num_logical_devices) == (num_replicas, 2)
    assert found.memory.arguments == training.state_bytes + ROWS * WIDTH * F32
    assert found.memory.donated == training.state_bytes
    exchanged = {(c.kind, c.axes, c.group_size) for c in found.compiled}
    assert ("all-reduce", ("logical",), 2) in exchanged
    if num_replicas > 1:
        assert any(axes == ("replica",) and size == num_replicas for _, axes, size in exchanged)
    assert {axes for _, axes, _ in exchanged} <= {("logical",), ("replica",)}
    assert {a.name: a.split for a in found.arrays}["up"] == (None, "logical")
    assert not any("hosts" in note for note in found.notes)


def test_replica_over_several_hosts_raises():
    training = Training(1, 8)
    found = training.strategy.plan(training.step, args=(training.described,), topology="v5p:2x2x4")
    assert any("devices of 2 hosts" in note for note in found.notes)
