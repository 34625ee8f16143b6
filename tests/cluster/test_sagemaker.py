"""SageMaker: TensorFlow's sagemaker_cluster_resolver_test, and variables that are partial or malformed."""

import pytest

from checks import message
from replicax import errors
from replicax._src.cluster.resolver import membership_of
from replicax.cluster_resolver import SageMakerClusterResolver

TWO = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}


def resolver(*args, hosts=TWO["SM_HOSTS"], current="algo-2", **kwargs):
    return SageMakerClusterResolver(*args, **kwargs, environ={"SM_HOSTS": hosts, "SM_CURRENT_HOST": current})


def test_cluster_and_task():
    found = resolver()
    assert found.cluster_spec() == {"worker": ["algo-1:2223", "algo-2:2223"]}
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert (found.rpc_layer, found.environment, found.num_accelerators()) == (None, None, {})
    assert membership_of(found).address == "algo-2:2223"
    assert resolver(4000).cluster_spec() == {"worker": ["algo-1:4000", "algo-2:4000"]}


def test_hosts_are_sorted():
    assert resolver(hosts='["algo-2", "algo-1"]').task_id == 1


def test_master():
    assert resolver(current="algo-1").master() == "algo-1:2223"
    assert resolver().master("worker", 1) == "algo-2:2223"
    assert resolver(current="algo-1", rpc_layer="grpc").master() == "grpc://algo-1:2223"
    assert resolver(hosts="", current="").master() == ""
    assert resolver(hosts='["algo-1"]', current="").master() == ""
    assert resolver(hosts='["algo-1"]', current="algo-1").master() == ""


def test_overrides():
    found = resolver(task_type="worker", task_id=0)
    assert found.master() == "algo-1:2223"
    assert (found.task_type, found.task_id) == ("worker", 0)
    found.task_type, found.task_id, found.rpc_layer = "worker", 1, "test"
    assert found.master() == "test://algo-2:2223"
    assert (found.task_type, found.task_id, found.rpc_layer) == ("worker", 1, "test")


def test_it_is_read_at_every_access(monkeypatch):
    found = SageMakerClusterResolver()
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    assert found.task_id == 1
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-1")
    assert found.task_id == 0


def test_without_a_cluster():
    found = resolver(hosts="", current="")
    assert (found.task_type, found.task_id) == (None, None)
    assert membership_of(found).num_workers == 1


@pytest.mark.parametrize("name", TWO)
def test_a_variable_is_missing(name):
    found = SageMakerClusterResolver(environ={key: value for key, value in TWO.items() if key != name})
    for read in (found.cluster_spec, found.master, lambda: found.task_id, lambda: found.task_type):
        message(errors.ClusterEnvironmentError, read, "Not a SageMaker Environment", f"{name} not set")


@pytest.mark.parametrize("hosts", ["algo-1,algo-2", "{}", "3", "[1, 2]", '["algo-1", ""]'])
def test_hosts_that_are_no_list(hosts):
    message(
        errors.ClusterEnvironmentError,
        resolver(hosts=hosts).cluster_spec,
        f"SM_HOSTS={hosts!r} must be a JSON list of host names",
        '["algo-1", "algo-2"]',
    )


@pytest.mark.parametrize("current", ["algo-3", ""])
def test_a_host_that_is_not_among_them(current):
    message(
        errors.ClusterEnvironmentError,
        resolver(current=current).cluster_spec,
        f"SM_CURRENT_HOST={current!r} is not one of SM_HOSTS=",
        '["algo-1","algo-2"]',
    )
