"""The variables that torchrun sets: complete, partial and malformed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import message
from replicax import errors
from replicax._src.cluster.resolver import membership_of
from replicax.cluster_resolver import UNKNOWN_ADDRESS, TorchrunClusterResolver

# torchrun --nnodes 2 --nproc-per-node 2, rank 3, shortened.
RECORDED = {
    "LOCAL_RANK": "1",
    "RANK": "3",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
}


def resolver(**changed):
    return TorchrunClusterResolver(environ={**RECORDED, **changed})


def test_recorded():
    found = resolver()
    assert (found.task_type, found.task_id, found.local_rank, found.environment) == ("worker", 3, 1, "")
    me = membership_of(found)
    assert (me.num_workers, me.id_in_cluster, me.is_chief) == (4, 3, False)
    assert me.addresses == ("node0:25404", UNKNOWN_ADDRESS, UNKNOWN_ADDRESS, UNKNOWN_ADDRESS)
    assert found.master("worker", 0, "grpc") == "grpc://node0:25404"
    assert found.num_accelerators() == {}


def test_it_is_read_once(monkeypatch):
    for name, value in RECORDED.items():
        monkeypatch.setenv(name, value)
    found = TorchrunClusterResolver()
    monkeypatch.setenv("RANK", "0")
    assert found.task_id == 3


def test_without_a_local_rank_as_kubeflow_does():
    assert resolver(LOCAL_RANK="").local_rank is None


def test_addresses_of_version_6():
    assert resolver(MASTER_ADDR="fd00::1").cluster_spec().task_address("worker", 0) == "[fd00::1]:25404"
    assert resolver(MASTER_ADDR="[fd00::1]").cluster_spec().task_address("worker", 0) == "[fd00::1]:25404"


def test_port_of_the_user():
    assert membership_of(resolver(REPLICAX_PORT="4000")).leader_address == "node0:4000"
    for wrong in ("0", "65536", "http"):
        message(
            errors.ClusterEnvironmentError,
            lambda wrong=wrong: resolver(REPLICAX_PORT=wrong),
            f"REPLICAX_PORT={wrong!r}",
            "from 1 to 65535",
        )


@given(st.integers(1, 65535))
def test_the_leaders_port_is_not_that_of_torchruns_store(store):
    port = int(membership_of(resolver(MASTER_PORT=str(store))).leader_address.rpartition(":")[2])
    assert port != store
    assert 20480 <= port < 28672


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_is_missing(name):
    message(
        errors.ClusterEnvironmentError,
        lambda: resolver(**{name: ""}),
        f"{name} not found in environment.",
        "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        "TF_CONFIG",
    )
    message(
        errors.ClusterEnvironmentError, lambda: TorchrunClusterResolver(environ={}), "there is none of them"
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": "4"}, ["RANK=4", "less than WORLD_SIZE=4"]),
        ({"RANK": "-1"}, ["RANK='-1'", "whole number of at least 0"]),
        ({"RANK": "one"}, ["RANK='one'"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE='0'", "at least 1"]),
        ({"MASTER_PORT": "x"}, ["MASTER_PORT='x'", "from 1 to 65535"]),
        ({"LOCAL_RANK": "x"}, ["LOCAL_RANK='x'"]),
    ],
    ids=repr,
)
def test_malformed(changed, says):
    message(errors.ClusterEnvironmentError, lambda: resolver(**changed), *says)


def test_invalid_host():
    message(
        errors.AddressError,
        lambda: membership_of(resolver(MASTER_ADDR="a b")),
        "'a b' is not a host",
        "torchrun",
    )
