"""The hosts of a TPU, and the mesh of virtual devices."""

import subprocess
import sys

import jax
import pytest

import replicax as rx
from checks import message
from replicax._src.cluster import tpu
from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax.cluster_resolver import ClusterSpec, SimpleClusterResolver, TPUClusterResolver
from replicax.errors import DeviceError, InvalidArgumentError, UnsupportedError

TWO_HOSTS = {"TPU_WORKER_HOSTNAMES": "10.0.0.1, 10.0.0.2", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize("name", [None, "", "my-tpu"])
def test_hosts_of_a_tpu(name):
    resolver = TPUClusterResolver(name, environ=TWO_HOSTS)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["10.0.0.1:20480", "10.0.0.2:20480"]})
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "10.0.0.2:20480"
    assert resolver.needs_tpu is bool(name)


@pytest.mark.parametrize("environ", [{}, {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}])
def test_one_host_is_no_cluster(environ, monkeypatch):
    monkeypatch.setattr(tpu, "has_tpu", lambda: not environ)
    resolver = TPUClusterResolver(environ=environ)
    assert resolver.cluster_spec() == ClusterSpec({})
    assert resolver.master() == ""
    assert TPUClusterResolver("local", environ=TWO_HOSTS).cluster_spec() == ClusterSpec({})


def test_the_port_and_addresses_can_be_chosen():
    environ = {**TWO_HOSTS, "REPLICAX_PORT": "7000"}
    assert TPUClusterResolver(environ=environ, job_name="tpu").cluster_spec().as_dict() == {
        "tpu": ["10.0.0.1:7000", "10.0.0.2:7000"]
    }
    environ["TPU_WORKER_HOSTNAMES"] = "a:7001,b:7002"
    assert TPUClusterResolver(environ=environ).cluster_spec().as_dict() == {"worker": ["a:7001", "b:7002"]}


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("grpc://10.0.0.1:8470", UnsupportedError, "on each host of the TPU"),
        (8, InvalidArgumentError, "got 8"),
        ("local:8", InvalidArgumentError, "'local:2x2x1x2'"),
        ("local:0x8", InvalidArgumentError, "'local:0x8'"),
        ("local:axb", InvalidArgumentError, "sizes in x and y"),
    ],
)
def test_no_tpu(name, error, says):
    message(error, lambda: TPUClusterResolver(name, environ={}), says)


@pytest.mark.parametrize(
    "make",
    [
        TPUClusterResolver,
        lambda: TPUClusterResolver(tpu=""),
        TPUClusterResolver.connect,
        rx.tpu.experimental.initialize_tpu_system,
        rx.TPUStrategy,
        rx.experimental.TPUStrategy,
    ],
)
def test_without_a_tpu_the_usual_fallback_runs_as_in_tensorflow(make):
    says = "there is no TPU", "TPU_WORKER_HOSTNAMES", 'pip install "jax[tpu]"', "tpu='local'"
    message(DeviceError, make, *says)
    try:
        strategy = make()
    except ValueError:
        strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    assert isinstance(strategy, rx.MirroredStrategy)


@pytest.mark.timeout(120)
def test_looking_for_a_tpu_does_not_start_the_backend():
    code = (
        "import replicax as rx\n"
        "try:\n"
        "    rx.cluster_resolver.TPUClusterResolver()\n"
        "except ValueError:\n"
        "    rx.config.set_local_devices(2)\n"
        "print(rx.MirroredStrategy().num_replicas_in_sync)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


def test_a_host_must_know_its_number():
    hosts = {"TPU_WORKER_HOSTNAMES": "a,b"}
    message(ClusterEnvironmentError, lambda: TPUClusterResolver(environ=hosts), "TPU_WORKER_ID is not set")
    message(
        ClusterEnvironmentError,
        lambda: TPUClusterResolver(environ={**hosts, "TPU_WORKER_ID": "2"}),
        "less than",
    )


def test_virtual_devices_stand_for_cores():
    initialize = rx.tpu.experimental.initialize_tpu_system
    assert initialize(TPUClusterResolver("local")).mesh_shape.tolist() == [2, 2, 1, 2]
    assert initialize(TPUClusterResolver("local")).num_tpus_per_task == len(jax.devices()) == 8
    assert initialize(TPUClusterResolver("local:4x2")).mesh_shape.tolist() == [4, 2, 1, 1]
    assert initialize(TPUClusterResolver("local:1x2x4")).mesh_shape.tolist() == [1, 2, 4, 1]
    message(
        DeviceError,
        lambda: initialize(TPUClusterResolver("local:4x4")),
        "16 places",
        "8 CPU",
        "set_local_devices(16)",
    )
    message(DeviceError, lambda: initialize(TPUClusterResolver("my-tpu")), "jax[tpu]", "tpu='local'")
    message(InvalidArgumentError, lambda: initialize("local"), "TPUClusterResolver")
    assert rx.tpu.experimental.shutdown_tpu_system() is None


def test_connecting_is_for_tpus():
    connect = rx.config.experimental_connect_to_cluster
    assert connect(TPUClusterResolver("local"), job_name="worker") is None
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    message(UnsupportedError, lambda: connect(SimpleClusterResolver(spec)), "MultiWorkerMirroredStrategy")


def test_a_connected_resolver_has_the_devices_of_the_tpu(caplog):
    with caplog.at_level("INFO", logger="replicax"):
        resolver = TPUClusterResolver.connect("local:2x2x1x2")
    assert "The TPU system is Topology(mesh_shape=[2, 2, 1, 2]" in caplog.text
    metadata = resolver.get_tpu_system_metadata()
    assert isinstance(metadata, rx.tpu.experimental.TPUSystemMetadata)
    assert metadata[:3] == (8, 1, 8)
    assert metadata.topology == rx.tpu.experimental.initialize_tpu_system(resolver)
    assert metadata.devices == jax.local_devices()
    assert rx.TPUStrategy(resolver).num_replicas_in_sync == metadata.num_cores
    message(DeviceError, lambda: TPUClusterResolver.connect("my-tpu"), "jax[tpu]")


def test_the_leader_of_a_tpu():
    assert TPUClusterResolver("local").get_coordination_service_leader() == "/job:worker/task:0"
    assert TPUClusterResolver("local", job_name="tpu").get_coordination_service_leader() == "/job:tpu/task:0"


def test_set_tpu_topology_points_to_asking_jax():
    resolver = TPUClusterResolver("local")
    assert resolver.tpu_hardware_feature is None
    text = "initialize_tpu_system(resolver)", "TPUClusterResolver('local:2x2x1x2')"
    message(UnsupportedError, lambda: resolver.set_tpu_topology(b"topology"), *text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rx.experimental.TPUStrategy(steps_per_run=10),
        lambda: rx.experimental.TPUStrategy(TPUClusterResolver("local"), 10),  # as in TensorFlow 1
    ],
)
def test_steps_per_run_says_what_to_write(make):
    text = "strategy.run_steps(fn, iterator, 10)", "steps_per_execution=10"
    message(UnsupportedError, make, "steps_per_run=10", *text)
