"""Device names, the mesh of replicas, and the number of virtual devices."""

import os
import subprocess
import sys

import jax
import pytest

import replicax as rx
from replicax._src.devices.jax_backend import prepare_backend
from replicax._src.devices.named_devices import device_name, resolve_device, resolve_devices
from replicax._src.devices.topology import REPLICA_AXIS, Topology
from replicax._src.jax_internals import jax_compat
from replicax.errors import DeviceError


@pytest.mark.parametrize(
    "name",
    [
        "cpu:3",
        "CPU:3",
        "/cpu:3",
        "/CPU:3",
        "/device:CPU:3",
        "device:cpu:3",
        "/job:localhost/replica:0/task:0/device:CPU:3",
        "/job:worker/replica:0/task:1/device:CPU:3",
        "/task:0/cpu:3",
        "/replica:0/task:0/cpu:3",
    ],
)
def test_names_that_tensorflow_accepts(name):
    assert resolve_device(name) is jax.devices("cpu")[3]


def test_a_name_without_an_index_is_the_first():
    assert resolve_device("cpu") is resolve_device("/device:CPU") is jax.devices("cpu")[0]


def test_device_object_is_accepted():
    device = jax.devices("cpu")[5]
    assert resolve_device(device) is device
    assert device_name(device) == "cpu:5"


@pytest.mark.parametrize(
    "name", ["", "cpu:", "cpu:-1", "cpu:x", ":0", "cpu:0:1", "/job:x", None, 3, b"cpu:0"]
)
def test_invalid_names(name):
    with pytest.raises(DeviceError):
        resolve_device(name)


def test_all_devices_are_the_default():
    assert resolve_devices(None) == jax.local_devices()
    assert rx.MirroredStrategy().num_replicas_in_sync == 8
    assert rx.CentralStorageStrategy().num_replicas_in_sync == 8


def test_one_device_is_a_list_of_one():
    assert resolve_devices("cpu:2") == resolve_devices(("cpu:2",)) == [jax.devices()[2]]
    assert rx.MirroredStrategy("cpu:2").extended.worker_devices == (jax.devices()[2],)


def test_a_number_is_that_of_the_first_devices():
    first = tuple(jax.devices()[:3])
    for strategy in (
        rx.MirroredStrategy(3),
        rx.MirroredStrategy(num_devices=3),
        rx.CentralStorageStrategy(3),
    ):
        assert strategy.extended.worker_devices == first


def test_replicas_are_in_the_order_of_the_devices():
    devices = [jax.devices()[i] for i in (4, 1, 6)]
    topology = Topology.of(devices)
    assert topology.num_replicas == 3
    assert topology.is_cpu
    assert topology.mesh.axis_names == (REPLICA_AXIS,)
    assert list(topology.mesh.devices) == devices
    assert topology.replicated.is_fully_replicated
    placed = jax.device_put(jax.numpy.arange(3.0)[:, None], topology.per_replica)
    assert {shard.device: float(shard.data[0, 0]) for shard in placed.addressable_shards} == {
        device: float(r) for r, device in enumerate(devices)
    }


def test_central_storage_holds_variables_on_the_cpu_or_a_given_device():
    cpu = jax.devices("cpu")
    assert rx.CentralStorageStrategy(["cpu:2", "cpu:3"]).extended.parameter_devices == (cpu[0],)
    assert rx.CentralStorageStrategy(["cpu:2"]).extended.parameter_devices == (cpu[2],)
    chosen = rx.CentralStorageStrategy(["cpu:2", "cpu:3"], parameter_device="/cpu:5")
    assert chosen.extended.parameter_devices == (cpu[5],)
    assert chosen.extended.worker_devices == (cpu[2], cpu[3])


def test_setting_the_current_number_of_devices_is_allowed():
    rx.config.set_local_devices(8)
    assert len(jax.local_devices()) == 8


@pytest.mark.parametrize(("given", "expected"), [(None, "16"), ("64", "64")])
def test_the_thread_pool_is_enlarged_unless_it_was_chosen(given, expected):
    program = (
        "import os, replicax as rx; before = os.environ.get('PJRT_NPROC'); rx.config.set_local_devices(3);"
        "print(before, os.environ['PJRT_NPROC'], rx.MirroredStrategy().num_replicas_in_sync)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "XLA_FLAGS")}
    if given is not None:
        environment["PJRT_NPROC"] = given
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment,
    )
    assert process.stdout.split() == [str(given), expected, "3"]


@pytest.mark.parametrize(
    ("num_devices", "num_processes", "environment", "expected"),
    [
        (1, 1, {}, None),
        (1, 2, {}, "4"),
        (1, 8, {}, "1"),
        (1, 20, {}, "1"),
        (1, 2, {"PJRT_NPROC": "3"}, "3"),
        (1, 1, {"REPLICAX_TASKS_ON_HOST": "4"}, "2"),
        (1, 2, {"LOCAL_WORLD_SIZE": "8"}, "1"),
        (1, 2, {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "4"),
        (2, 1, {}, "16"),
        (2, 2, {"REPLICAX_TASKS_ON_HOST": "2"}, "16"),
    ],
)
def test_processes_on_one_host_share_its_cores(
    monkeypatch, num_devices, num_processes, environment, expected
):
    monkeypatch.setattr(jax_compat, "backend_started", lambda: False)
    monkeypatch.setattr(jax_compat, "has_several_cpu_devices", lambda: num_devices > 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name in ("PJRT_NPROC", "REPLICAX_TASKS_ON_HOST", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    prepare_backend(num_processes)
    chosen = os.environ.get("PJRT_NPROC")
    monkeypatch.undo()
    assert chosen == expected
