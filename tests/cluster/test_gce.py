"""Compute Engine: TensorFlow's gce_cluster_resolver_test with a fake service, and Google's client."""

import sys
from types import SimpleNamespace

import pytest
from google.auth.credentials import AnonymousCredentials
from googleapiclient import discovery

from checks import message
from replicax import errors
from replicax._src.cluster.resolver import membership_of
from replicax.cluster_resolver import GCEClusterResolver, UnionResolver

GROUP = {"project": "test-project", "zone": "us-east1-d", "instance_group": "test-instance-group"}
THREE = {"instance1": "10.1.2.3", "instance2": "10.2.3.4", "instance3": "10.3.4.5"}


class Request(SimpleNamespace):
    def execute(self):
        return self.response


class FakeService:
    """``compute``, ``v1``: instanceGroups().listInstances in pages of two, and instances().get."""

    def __init__(self, instances):
        self.addresses = instances

    def instanceGroups(self):
        return self

    def instances(self):
        return self

    def listInstances(self, *, project, zone, instanceGroup, body, orderBy):
        assert (project, zone, instanceGroup) == tuple(GROUP.values())
        assert (body, orderBy) == ({"instanceState": "RUNNING"}, "name")
        return self.page(sorted(self.addresses))

    def page(self, names):
        items = [{"instance": f"https://gce.example.com/res/{name}"} for name in names[:2]]
        return Request(response={"items": items} if items else {}, rest=names[2:])

    def listInstances_next(self, *, previous_request, previous_response):
        return self.page(previous_request.rest) if previous_request.rest else None

    def get(self, *, project, zone, instance):
        return Request(response={"networkInterfaces": [{"networkIP": self.addresses[instance]}]})


def resolver(instances, port=8470, **kwargs):
    return GCEClusterResolver(**GROUP, port=port, credentials=None, service=FakeService(instances), **kwargs)


# --- TensorFlow's -------------------------------------------------------------------------------------


def test_one_instance():
    found = resolver({"gce-instance-1": "10.123.45.67"})
    assert found.cluster_spec() == {"worker": ["10.123.45.67:8470"]}
    assert found.cluster_spec().source == "Compute Engine"
    assert found.master() == "grpc://10.123.45.67:8470"
    assert (found.environment, found.num_accelerators()) == ("", {})


def test_several_instances():
    assert resolver(THREE).cluster_spec() == {"worker": ["10.1.2.3:8470", "10.2.3.4:8470", "10.3.4.5:8470"]}
    assert resolver(THREE).master("worker", 2, "test") == "test://10.3.4.5:8470"
    assert membership_of(resolver(THREE, task_id=2)).address == "10.3.4.5:8470"


def test_overrides():
    found = resolver(THREE, task_type="testworker")
    found.task_id, found.rpc_layer = 1, "test"
    assert (found.task_type, found.task_id, found.rpc_layer) == ("testworker", 1, "test")
    assert found.master() == "test://10.2.3.4:8470"
    assert resolver(THREE, task_type="", task_id=1).master(task_type="", task_id=0) == "grpc://10.1.2.3:8470"
    assert resolver(THREE, 2222, task_type="custom").cluster_spec().jobs == ["custom"]


def test_the_type_cannot_be_changed():
    found = resolver(THREE, task_type="testworker")

    def change():
        found.task_type = "foobar"

    message(
        errors.UnsupportedError,
        change,
        "You cannot reset the task_type of the GCEClusterResolver after it has been created",
        "task_type='foobar'",
    )
    assert issubclass(errors.UnsupportedError, RuntimeError)  # TensorFlow's


def test_union():
    more = {"instance4": "10.4.5.6", "instance5": "10.5.6.7"}
    ps = {"ps1": "10.100.1.2", "ps2": "10.100.2.3"}
    union = UnionResolver(resolver(THREE), resolver(more), resolver(ps, 2222, task_type="ps"))
    assert union.cluster_spec() == {
        "worker": [f"{address}:8470" for address in (*THREE.values(), *more.values())],
        "ps": ["10.100.1.2:2222", "10.100.2.3:2222"],
    }


# --- what goes wrong ----------------------------------------------------------------------------------


def test_nothing_runs():
    message(
        errors.ClusterManagerError,
        resolver({}).cluster_spec,
        "No instance is running in instance group 'test-instance-group', zone 'us-east1-d', project 'test-project'",
    )


def test_an_answer_that_is_an_error():
    class Refusing(FakeService):
        def get(self, **kwargs):
            raise PermissionError("compute.instances.get")

    found = GCEClusterResolver(**GROUP, port=1, service=Refusing(THREE))
    message(
        errors.ClusterManagerError,
        found.cluster_spec,
        "PermissionError: compute.instances.get",
        "'test-instance-group'",
        "the service account may read instances",
    )


def test_without_the_packages(monkeypatch):
    for name in ("googleapiclient", "googleapiclient.discovery"):
        monkeypatch.setitem(sys.modules, name, None)
    message(
        errors.MissingExtraError,
        lambda: GCEClusterResolver(**GROUP, port=1),
        "GCEClusterResolver needs google-api-python-client, which is not installed.",
        "pip install google-api-python-client (the extra gce)",
    )


def install(monkeypatch, default):
    """Fakes of Google's packages that remember the credentials that they got."""
    built = []
    discovery = SimpleNamespace(
        build=lambda *args, **kwargs: built.append((args, kwargs)) or FakeService(THREE)
    )
    for name, module in {
        "googleapiclient": SimpleNamespace(),
        "googleapiclient.discovery": discovery,
        "google": SimpleNamespace(),
        "google.auth": SimpleNamespace(default=default),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return built


def test_credentials(monkeypatch):
    built = install(monkeypatch, lambda scopes: (f"default for {scopes[0].rpartition('/')[2]}", "project"))
    GCEClusterResolver(**GROUP, port=1)
    found = GCEClusterResolver(**GROUP, port=1, credentials="mine")
    assert [kwargs["credentials"] for _, kwargs in built] == ["default for compute.readonly", "mine"]
    assert built[0][0] == ("compute", "v1")
    assert len(found.cluster_spec().job_tasks("worker")) == 3


def test_credentials_that_are_not_there(monkeypatch):
    def default(scopes):
        raise LookupError("Your default credentials were not found.")

    install(monkeypatch, default)
    message(
        errors.ClusterManagerError,
        lambda: GCEClusterResolver(**GROUP, port=1),
        "Your default credentials were not found.",
        "credentials=",
    )


# --- Google's client, against a server on loopback ----------------------------------------------------


def compute_engine(method, path):
    """A group of two instances; 404 for others."""
    if method == "GET":
        address = {"a": "10.0.0.2", "b": "10.0.0.1"}[path.partition("?")[0].rpartition("/")[2]]
        return 200, {"networkInterfaces": [{"networkIP": address}]}
    if "/instanceGroups/test-instance-group/listInstances" in path:
        return 200, {"items": [{"instance": f"https://x/instances/{name}"} for name in "ab"]}
    return 404, {"error": {"code": 404, "message": "no such group"}}


@pytest.fixture
def real_service(json_server):
    with discovery.build(
        "compute",
        "v1",
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": f"{json_server(compute_engine)}/compute/v1/"},
    ) as service:
        yield service


def test_the_real_client(real_service):
    found = GCEClusterResolver(**GROUP, port=8470, service=real_service)
    assert found.cluster_spec() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    wrong = GCEClusterResolver(**{**GROUP, "instance_group": "other"}, port=8470, service=real_service)
    message(errors.ClusterManagerError, wrong.cluster_spec, "HttpError", "no such group", "'other'")
