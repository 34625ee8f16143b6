"""The devices of a process by TensorFlow's names."""

import logging
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from replicax import errors
from replicax._src.devices import listing
from replicax._src.jax_internals import jax_compat


@pytest.mark.timeout(120)
def test_listing_physical_devices_does_not_start_the_backend():
    code = (
        "import replicax as rx\n"
        "assert rx.config.list_physical_devices()\n"
        "rx.config.set_local_devices(3)\n"
        "print([d.name for d in rx.config.list_logical_devices('CPU')])\n"
        "print(len(rx.config.list_physical_devices('CPU')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "['/device:CPU:0', '/device:CPU:1', '/device:CPU:2']\n1\n", done.stderr


def test_strategies_take_listed_devices_and_their_names():
    devices = rx.config.list_logical_devices("CPU")
    assert [d.name for d in devices] == [
        f"/device:CPU:{i}" for i in range(len(jax.local_devices(backend="cpu")))
    ]
    assert rx.MirroredStrategy(devices[:2]).num_replicas_in_sync == 2
    assert rx.MirroredStrategy([d.name for d in devices[:2]]).num_replicas_in_sync == 2
    assert rx.OneDeviceStrategy(devices[1]).extended.worker_devices == (jax.local_devices(backend="cpu")[1],)


def test_a_kind_that_the_machine_lacks_has_no_devices():
    assert rx.config.list_logical_devices("IPU") == []
    assert rx.config.list_physical_devices("IPU") == []


@pytest.mark.parametrize(
    "name", ["/cpu:1", "cpu:1", "/job:localhost/replica:0/task:0/device:CPU:1", "listed", "object"]
)
def test_device_places_arrays(name):
    second = jax.local_devices(backend="cpu")[1]
    given = {"listed": rx.config.list_logical_devices("CPU")[1], "object": second}.get(name, name)
    with rx.device(given):
        x = jnp.ones(3)
    assert x.devices() == {second}
    with rx.device(None):
        assert jnp.ones(3).devices() == {jax.local_devices()[0]}


def test_device_of_a_missing_kind_is_the_default_one(monkeypatch, caplog):
    monkeypatch.setattr(listing, "_num_logical", lambda kind: 0)
    listing._report_missing.cache_clear()
    with caplog.at_level(logging.INFO, "replicax"):
        for _ in range(2):
            with rx.device("/tpu:3"):
                assert jnp.ones(3).devices() == {jax.local_devices()[0]}
    assert len(caplog.records) == 1


def test_device_rejects_what_names_none():
    with pytest.raises(errors.DeviceError, match="is not a device"):
        rx.device("/job:ps/task:0")
    with pytest.raises(errors.DeviceError, match="does not exist"):
        rx.device("/cpu:99")


def test_device_in_a_step_leaves_placing_to_the_strategy():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    def step():
        with rx.device("/cpu:1"):
            return jnp.ones(2) + rx.get_replica_context().replica_id_in_sync_group

    assert [v.tolist() for v in strategy.experimental_local_results(strategy.run(step))] == [[1, 1], [2, 2]]


class Driver:
    """NVIDIA's driver with three GPUs."""

    fails = 0

    def cuInit(self, flags):
        return self.fails

    def cuDeviceGetCount(self, number):
        number._obj.value = 3
        return 0


@pytest.fixture
def machine(monkeypatch):
    """A machine whose backend has not started, with JAX for NVIDIA's GPUs."""
    monkeypatch.setattr(jax_compat, "backend_started", lambda: False)
    monkeypatch.setattr(listing, "prepare_backend", lambda: pytest.fail("the backend starts"))
    monkeypatch.setattr(listing, "_plugins", lambda: iter(["cuda"]))
    monkeypatch.setattr(listing, "_google_devices", lambda: iter(()))
    monkeypatch.setattr(listing.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(listing, "jax", types.SimpleNamespace(config=types.SimpleNamespace()))
    listing.jax.config.jax_platforms = None
    listing.jax.config.jax_cuda_visible_devices = "all"
    return listing.jax.config


def test_gpus_are_counted_by_their_driver(machine):
    assert [d.name for d in rx.config.list_physical_devices()] == [
        "/physical_device:CPU:0",
        *(f"/physical_device:GPU:{i}" for i in range(3)),
    ]
    machine.jax_cuda_visible_devices = "1,2"
    assert len(rx.config.list_physical_devices("GPU")) == 2


@pytest.mark.parametrize("reason", ["platform", "no JAX for GPUs", "no driver", "driver fails"])
def test_no_gpu_is_listed_that_jax_cannot_use(machine, monkeypatch, reason):
    def no_driver(name):
        raise OSError

    if reason == "platform":
        machine.jax_platforms = "cpu"
    elif reason == "no JAX for GPUs":
        monkeypatch.setattr(listing, "_plugins", lambda: iter(()))
    elif reason == "no driver":
        monkeypatch.setattr(listing.ctypes, "CDLL", no_driver)
    else:
        monkeypatch.setattr(Driver, "fails", 100)
    assert rx.config.list_physical_devices("GPU") == []
