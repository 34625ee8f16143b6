"""Kubernetes: TensorFlow's kubernetes_cluster_resolver_test with a fake client, and the real one."""

import sys
import urllib.parse
from types import SimpleNamespace

import pytest

from checks import message
from replicax import errors
from replicax._src.cluster.resolver import membership_of
from replicax.cluster_resolver import KubernetesClusterResolver, KubernetesExecutableLocation


def pod(name, phase="Running", pod_ip="10.1.2.3"):
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name),
        status=SimpleNamespace(phase=phase, pod_ip=pod_ip, host_ip="10.9.9.9"),
    )


class FakeClient:
    """The two calls of CoreV1Api that the resolver makes."""

    def __init__(self, pods):
        self.pods = pods
        self.namespaces = []

    def list_pod_for_all_namespaces(self, *, label_selector):
        return SimpleNamespace(items=self.pods.get(label_selector, []))

    def list_namespaced_pod(self, namespace, *, label_selector):
        self.namespaces.append(namespace)
        return self.list_pod_for_all_namespaces(label_selector=label_selector)


def resolver(pods, *args, **kwargs):
    return KubernetesClusterResolver(*args, **kwargs, override_client=FakeClient(pods))


# --- TensorFlow's -------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", [*KubernetesExecutableLocation, "off_cluster"])
def test_one_pod(location):
    found = resolver({"job-name=tensorflow": [pod("tensorflow-abc123")]}, executable_location=location)
    assert found.cluster_spec() == {"worker": ["10.1.2.3:8470"]}
    assert found.cluster_spec().source == "Kubernetes"
    assert (found.environment, found.rpc_layer, found.num_accelerators()) == ("", "grpc", {})


def test_pods_are_sorted_by_name():
    pods = [
        pod("tensorflow-abc123"),
        pod("tensorflow-def456", pod_ip="10.1.2.4"),
        pod("tensorflow-999999", pod_ip="10.1.2.5"),
    ]
    found = resolver({"job-name=tensorflow": pods})
    assert found.cluster_spec() == {"worker": ["10.1.2.5:8470", "10.1.2.3:8470", "10.1.2.4:8470"]}


def test_numbers_in_names_are_numbers():
    pods = [
        pod(f"job-{index}-x{'abcdefghijkl'[-index]}", pod_ip=f"10.0.0.{index}") for index in (10, 2, 1, 0, 11)
    ]
    addresses = resolver({"a=b": pods}, {"worker": ["a=b"]}, 2222).cluster_spec().job_tasks("worker")
    assert addresses == [f"10.0.0.{index}:2222" for index in (0, 1, 2, 10, 11)]


def test_master():
    pods = [pod(f"worker-{index}", pod_ip=f"10.1.2.{3 + index}") for index in range(3)]
    found = resolver({"job-name=tensorflow": pods})
    assert (found.task_type, found.task_id, found.master()) == (None, None, "")
    found.task_type, found.task_id = "worker", 0
    assert found.master() == "grpc://10.1.2.3:8470"
    assert found.master("worker", 2) == "grpc://10.1.2.5:8470"
    assert membership_of(found).num_workers == 3


def test_several_selectors_and_jobs():
    found = resolver(
        {
            "job-name=worker1": [pod("b", pod_ip="10.0.0.2"), pod("a", pod_ip="10.0.0.1")],
            "job-name=worker2": [pod("A", pod_ip="fd00::3")],
            "job-name=ps": [pod("ps", pod_ip="10.0.1.1")],
        },
        job_to_label_mapping={"worker": ["job-name=worker1", "job-name=worker2"], "ps": ["job-name=ps"]},
    )
    assert found.cluster_spec() == {
        "worker": ["10.0.0.1:8470", "10.0.0.2:8470", "[fd00::3]:8470"],
        "ps": ["10.0.1.1:8470"],
    }


def test_a_namespace():
    found = resolver({"job-name=tensorflow": [pod("a")]}, namespace="team")
    assert found.cluster_spec() == {"worker": ["10.1.2.3:8470"]}
    assert found._client.namespaces == ["team"]


@pytest.mark.parametrize(("phase", "ip"), [("Failed", "10.1.2.3"), ("Pending", None), ("Running", None)])
def test_pod_that_is_not_running(phase, ip):
    message(
        errors.ClusterManagerError,
        resolver({"job-name=tensorflow": [pod("tensorflow-abc123", phase, ip)]}).cluster_spec,
        f'Pod "tensorflow-abc123" is not running; phase: "{phase}"',
        "Wait until all pods run",
    )
    assert issubclass(errors.ClusterManagerError, RuntimeError)  # TensorFlow's


def test_no_pods():
    message(errors.ClusterManagerError, resolver({}).cluster_spec, "any namespace", "'job-name=tensorflow'")
    message(errors.ClusterManagerError, resolver({}, namespace="team").cluster_spec, "namespace 'team'")


def test_an_answer_that_is_an_error():
    class Forbidden(Exception):
        pass

    class Refusing(FakeClient):
        def list_pod_for_all_namespaces(self, *, label_selector):
            raise Forbidden("(403)\nReason: Forbidden\n" + "x" * 1000)

    text = message(
        errors.ClusterManagerError,
        KubernetesClusterResolver(override_client=Refusing({})).cluster_spec,
        "'job-name=tensorflow'",
        "Forbidden: (403) Reason: Forbidden",
        "right to list pods",
        "namespace=",
    )
    assert len(text) < 600


@pytest.mark.parametrize("location", [None, "elsewhere", 0])
def test_locations_that_do_not_exist(location):
    message(
        errors.InvalidArgumentError,
        lambda: KubernetesClusterResolver(executable_location=location),
        repr(location),
        "WITHIN_CLUSTER, OFF_CLUSTER",
    )


# --- the package --------------------------------------------------------------------------------------


def test_without_the_package(monkeypatch):
    for name in ("kubernetes", "kubernetes.config", "kubernetes.client"):
        monkeypatch.setitem(sys.modules, name, None)
    message(
        errors.MissingExtraError,
        KubernetesClusterResolver,
        "KubernetesClusterResolver needs kubernetes, which is not installed. Run: pip install kubernetes (",
        "the extra k8s",
    )
    assert issubclass(errors.MissingExtraError, ImportError)  # TensorFlow's


class FakePackage:
    """kubernetes.config and kubernetes.client in one."""

    def __init__(self, error=None):
        self.loaded = []
        self.error = error

    def load_incluster_config(self):
        self._load("WITHIN_CLUSTER")

    def load_kube_config(self):
        self._load("OFF_CLUSTER")

    def _load(self, location):
        self.loaded.append(location)
        if self.error:
            raise self.error

    def CoreV1Api(self):
        return FakeClient({"job-name=tensorflow": [pod("a")]})


def install(monkeypatch, package):
    monkeypatch.setitem(sys.modules, "kubernetes", SimpleNamespace())
    for name in ("kubernetes.config", "kubernetes.client"):
        monkeypatch.setitem(sys.modules, name, package)
    return package


@pytest.mark.parametrize("location", ["WITHIN_CLUSTER", "OFF_CLUSTER"])
def test_credentials_are_those_of_the_location(monkeypatch, location):
    package = install(monkeypatch, FakePackage())
    found = KubernetesClusterResolver(executable_location=location)
    assert found.cluster_spec() == {"worker": ["10.1.2.3:8470"]}
    assert package.loaded == [location]


def test_credentials_that_cannot_be_loaded(monkeypatch):
    install(monkeypatch, FakePackage(RuntimeError("Service host/port is not set.")))
    message(
        errors.ClusterManagerError,
        KubernetesClusterResolver,
        "RuntimeError: Service host/port is not set.",
        "is WITHIN_CLUSTER",
        "executable_location='OFF_CLUSTER'",
    )


# --- the real client, against a server on loopback ----------------------------------------------------


def api_server(method, path):
    """Two pods of one job, in all namespaces or in one; 403 for others."""
    url = urllib.parse.urlsplit(path)
    if url.path not in ("/api/v1/pods", "/api/v1/namespaces/team/pods"):
        return 403, {"kind": "Status", "status": "Failure", "message": "forbidden"}
    selector = urllib.parse.parse_qs(url.query)["labelSelector"][0]
    pods = [
        {
            "metadata": {"name": f"mnist-{number}-abcde", "namespace": "team"},
            "status": {"phase": "Running", "podIP": f"10.0.0.{number}", "hostIP": "10.9.9.9"},
        }
        for number in ((1, 0) if selector == "job-name=mnist" else ())
    ]
    return 200, {"kind": "PodList", "apiVersion": "v1", "items": pods}


@pytest.fixture
def real_client(json_server):
    import kubernetes.client  # takes long

    configuration = kubernetes.client.Configuration()
    configuration.host = json_server(api_server)
    with kubernetes.client.ApiClient(configuration) as api_client:
        yield kubernetes.client.CoreV1Api(api_client)


@pytest.mark.parametrize("namespace", [None, "team"])
def test_the_real_client(real_client, namespace):
    found = KubernetesClusterResolver(
        {"worker": ["job-name=mnist"]}, override_client=real_client, namespace=namespace
    )
    assert found.cluster_spec() == {"worker": ["10.0.0.0:8470", "10.0.0.1:8470"]}


def test_the_real_clients_errors(real_client):
    found = KubernetesClusterResolver(override_client=real_client, namespace="other")
    message(errors.ClusterManagerError, found.cluster_spec, "403", "right to list pods.")
    found = KubernetesClusterResolver({"worker": ["job-name=other"]}, override_client=real_client)
    message(errors.ClusterManagerError, found.cluster_spec, "No pod", "'job-name=other'")
