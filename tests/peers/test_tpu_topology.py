"""Topologies and device assignments compared with TensorFlow's: the same bytes, the same cores, errors for the same
arguments."""

import itertools

import pytest
import tensorflow as tf

from replicax._src.devices.tpu.positions import full_mesh
from replicax.tpu.experimental import DeviceAssignment, Topology

MESHES = [
    (2, 2, 1, 2),
    (4, 4, 1, 2),
    (2, 2, 2, 1),
    (4, 4, 4, 2),
    (3, 2, 1, 2),
    (4, 1, 1, 2),
    (1, 4, 2, 1),
    (2, 1, 1, 2),
]


def built(kind, topology, shape, stride, num_replicas, mode):
    try:
        return kind.build(topology, list(shape), list(stride), num_replicas, mode).core_assignment.tolist()
    except ValueError:
        return "ValueError"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_same_cores_are_assigned(mesh):
    ours = full_mesh(mesh)
    experimental = tf.tpu.experimental
    theirs = experimental.Topology(mesh_shape=list(mesh), device_coordinates=ours.device_coordinates)
    assert ours.serialized() == theirs.serialized()
    assert Topology(theirs.serialized()) == ours
    blocks = itertools.product(*[[size for size in (1, 2, 4) if size <= most] for most in mesh])
    num_built = 0
    for shape, stride in itertools.product(blocks, [(1, 1, 1, 1), (2, 1, 1, 1)]):
        num_blocks = 1
        for most, size, step in zip(mesh, shape, stride, strict=True):
            num_blocks *= most // (size * step) * step
        for num_replicas, mode in itertools.product({1, 2, 3, 4, num_blocks} - {0}, range(3)):
            arguments = (shape, stride, num_replicas)
            expected = built(
                experimental.DeviceAssignment, theirs, *arguments, experimental.DeviceOrderMode(mode)
            )
            assert built(DeviceAssignment, ours, *arguments, mode) == expected, (*arguments, mode)
            num_built += expected != "ValueError"
    assert num_built
