"""The coordinates of cores, and the cores of a replica, compared with TensorFlow's recorded answers."""

import numpy as np
import pytest

from checks import message
from replicax._src.devices.tpu.positions import full_mesh, usual_mesh_shape
from replicax._src.jax_internals import jax_compat
from replicax._src.strategies.tpu_system import TPUSystem, _topology
from replicax.cluster_resolver import TPUClusterResolver
from replicax.errors import DeviceError, InvalidArgumentError, UnsupportedError
from replicax.tpu.experimental import DeviceAssignment, DeviceOrderMode, Topology

# TensorFlow 2.21's result for the mesh (2, 1, 1, 2).
SERIALIZED = bytes.fromhex("0a0402010102100118042210" + "00000000" + "00000001" + "01000000" + "01000001")
TWO_CHIPS = [[[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]]]


def test_a_topology_is_written_as_tensorflow_does():
    topology = Topology(mesh_shape=[2, 1, 1, 2], device_coordinates=TWO_CHIPS)
    assert topology.serialized() == SERIALIZED
    assert Topology(SERIALIZED) == topology == full_mesh((2, 1, 1, 2))
    assert (
        Topology(Topology(mesh_shape=[300, 1, 1, 1], device_coordinates=[[[299, 0, 0, 0]]]).serialized())
        != topology
    )


def test_a_topology_knows_tasks_and_names():
    topology = full_mesh((2, 2, 2, 2), num_tasks=2)
    assert (topology.num_tasks, topology.num_tpus_per_task, topology.mesh_rank) == (2, 8, 4)
    assert topology.task_ordinal_at_coordinates((1, 0, 1, 0)) == 1
    assert topology.tpu_device_ordinal_at_coordinates((1, 0, 1, 1)) == 3
    assert (
        topology.tpu_device_name_at_coordinates((1, 0, 1, 1), job="worker")
        == "/job:worker/task:1/device:TPU:3"
    )
    assert topology.cpu_device_name_at_coordinates((1, 0, 1, 1)) == "/task:1/device:CPU:0"
    assert not len(topology.missing_devices)
    partial = Topology(mesh_shape=[2, 1, 1, 1], device_coordinates=[[[1, 0, 0, 0]]])
    assert partial.missing_devices.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"mesh_shape": [2, 2], "device_coordinates": [[[0, 0]]]}, "4 positive entries"),
        ({"mesh_shape": [2, 0, 1, 1], "device_coordinates": [[[0, 0, 0, 0]]]}, "[2, 0, 1, 1]"),
        ({"mesh_shape": [2, 1, 1, 1], "device_coordinates": [[0, 0, 0, 0]]}, "[tasks, devices, 4]"),
        ({"mesh_shape": [2, 1, 1, 1], "device_coordinates": [[[2, 0, 0, 0]]]}, "must be inside the mesh"),
        ({"mesh_shape": [2, 1, 1, 1], "device_coordinates": [[[0, 0, 0, 0]] * 2]}, "twice"),
        ({"mesh_shape": "2x2", "device_coordinates": [[[0, 0, 0, 0]]]}, "integers"),
        ({"serialized": b"\xff\xff"}, "is not a topology"),
        ({"serialized": SERIALIZED[:-3]}, "is not a topology"),
    ],
)
def test_invalid_topologies(arguments, says):
    message(InvalidArgumentError, lambda: Topology(**arguments), says)


def test_the_cores_of_a_replica_are_near_one_another():
    topology = full_mesh((2, 2, 1, 2))
    assignment = DeviceAssignment.build(
        topology, [1, 1, 1, 2], num_replicas=np.prod(topology.mesh_shape) // 2
    )
    assert (assignment.num_replicas, assignment.num_cores_per_replica) == (4, 2)
    # A ring of chips, both cores of each.
    assert assignment.core_assignment[:, :, :2].tolist() == [
        [[0, 0], [0, 0]], [[1, 0], [1, 0]], [[1, 1], [1, 1]], [[0, 1], [0, 1]],
    ]  # fmt: skip
    mesh = DeviceAssignment.build(topology, [1, 1, 1, 2], None, 4, DeviceOrderMode.MESH)
    assert mesh.core_assignment[:, 0, :2].tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    apart = DeviceAssignment.build(topology, [2, 1, 1, 1], [1, 1, 1, 1], 3)
    assert apart.core_assignment[2].tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]
    assert assignment.coordinates(2, 1) == (1, 1, 0, 1)
    for place in ((4, 0), (-1, 0), (0, 2)):
        message(
            InvalidArgumentError, lambda place=place: assignment.tpu_ordinal(*place), "must be one of 0 to"
        )
    assert assignment.lookup_replicas(0, 1) == [0, 1, 2, 3]
    assert assignment.tpu_ordinal(2, 1) == 7
    assert assignment.tpu_device(2, 1, "worker") == "/job:worker/task:0/device:TPU:7"
    assert assignment.host_device(2, 1) == "/task:0/device:CPU:0"


def test_a_ring_through_a_large_mesh_goes_from_neighbour_to_neighbour():
    topology = full_mesh((4, 4, 4, 2))
    cores = DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=64).core_assignment[:, 0, :3]
    steps = np.abs(cores - np.roll(cores, 1, axis=0)).sum(axis=1)
    assert steps.tolist() == [1] * 64
    assert len(np.unique(cores, axis=0)) == 64


def test_missing_devices_are_left_out():
    places = full_mesh((2, 2, 1, 1)).device_coordinates[:, 1:]
    topology = Topology(mesh_shape=[2, 2, 1, 1], device_coordinates=places)
    assert (
        DeviceAssignment.build(topology, num_replicas=3).core_assignment.tolist()
        == places[0][:, None].tolist()
    )
    message(
        InvalidArgumentError,
        lambda: DeviceAssignment.build(topology, [2, 1, 1, 1], num_replicas=2),
        "lacks 1",
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"computation_shape": [1, 1, 2]}, "must have shape [4]"),
        ({"computation_shape": [1, 1, 1, 0]}, "must be positive"),
        ({"computation_shape": [1, 1, 1, 4]}, "does not fit in TPU topology shape [2, 2, 1, 2]"),
        ({"computation_stride": [1, 1, 1, 0.5]}, "integers"),
        ({"computation_shape": [1, 1, 1, 2], "num_replicas": 5}, "only 4 replicas with shape [1, 1, 1, 2]"),
        ({"num_replicas": 0}, "at least 1"),
        ({"num_replicas": 3, "device_order_mode": DeviceOrderMode.RING}, "AUTO"),
    ],
)
def test_invalid_assignments(arguments, says):
    message(InvalidArgumentError, lambda: DeviceAssignment.build(full_mesh((2, 2, 1, 2)), **arguments), says)


@pytest.mark.parametrize(
    ("cores", "says"),
    [
        ([[0, 0, 0, 0]], "rank 3"),
        ([[[0, 0, 0, 2]]], "does not exist"),
        ([[[0, 0, 0, 0.5]]], "integers"),
        ([[[0, 0, 0, 0]], [[0, 0, 0, 0]]], "twice"),
    ],
)
def test_an_assignment_by_hand(cores, says):
    message(InvalidArgumentError, lambda: DeviceAssignment(full_mesh((1, 1, 1, 2)), cores), says)


class Core:
    """A device with the attributes of JAX's TPU devices."""

    platform = "tpu"

    def __init__(self, *place, process_index=0, slice_index=0):
        *self.coords, self.core_on_chip = place
        self.process_index, self.slice_index = process_index, slice_index


def test_tpu_devices_report_their_coordinates():
    hosts = [[Core(x, y, 0, 0, process_index=x // 2) for x in (h, h + 1) for y in (0, 1)] for h in (0, 2)]
    topology = _topology(hosts, TPUClusterResolver("my-tpu", environ={}))
    assert topology.mesh_shape.tolist() == [4, 2, 1, 1]
    assert topology.task_ordinal_at_coordinates((3, 1, 0, 0)) == 1
    slices = [[Core(x, 0, 0, 0, slice_index=s) for x in (0, 1)] for s in (0, 1)]
    assert jax_compat.tpu_coordinates(slices)[:, :, 0].tolist() == [[0, 1], [2, 3]]
    message(DeviceError, lambda: _topology(hosts, TPUClusterResolver("local:4x2")), "Leave the shape out")


def test_replicas_of_one_host_are_adjacent():
    hosts = [[Core(x, y, 0, 0) for x in (h, h + 1) for y in (0, 1)] for h in (0, 2)]
    system = TPUSystem(None, hosts, _topology(hosts, TPUClusterResolver("my-tpu")))
    build = DeviceAssignment.build
    grid = system.grid(build(system.topology, [1, 2, 1, 1], None, 4, DeviceOrderMode.MESH))
    assert grid == [hosts[0][:2], hosts[0][2:], hosts[1][:2], hosts[1][2:]]
    assert system.grid(None) == [[core] for host in hosts for core in host]
    across = build(system.topology, [4, 1, 1, 1], num_replicas=2)
    message(UnsupportedError, lambda: system.grid(across), "tasks [0, 1]", "must be in one process")
    uneven = DeviceAssignment(system.topology, [[[0, 0, 0, 0]], [[1, 0, 0, 0]], [[2, 0, 0, 0]]])
    message(InvalidArgumentError, lambda: system.grid(uneven), "{0: 2, 1: 1}")
    other = DeviceAssignment.build(full_mesh((2, 1, 1, 1)))
    message(InvalidArgumentError, lambda: system.grid(other), "initialize_tpu_system(resolver)")


def test_the_shape_of_a_host():
    shapes = {n: usual_mesh_shape(n) for n in (1, 2, 6, 16)}
    assert shapes == {1: (1, 1, 1, 1), 2: (1, 1, 1, 2), 6: (3, 1, 1, 2), 16: (4, 2, 1, 2)}
