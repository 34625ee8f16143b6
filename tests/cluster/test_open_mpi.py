"""The variables that Open MPI's mpirun sets, of versions 4 and 5: complete, partial and malformed."""

import pytest

from checks import message
from replicax import errors
from replicax._src.cluster.resolver import membership_of
from replicax.cluster_resolver import UNKNOWN_ADDRESS, OpenMPIClusterResolver

# mpirun -n 4 on two nodes, rank 3, shortened.
VERSION_4 = {
    "OMPI_MCA_orte_hnp_uri": "195559424.0;tcp://198.177.146.70:53997;tcp://10.10.10.4:53997",
    "OMPI_MCA_orte_local_daemon_uri": "195559424.1;tcp://198.177.146.71:33559",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "4",
}
VERSION_5 = {
    "PRTE_LAUNCHED": "1",
    "PMIX_NAMESPACE": "prterun-node-07-12345@1",
    "PMIX_RANK": "3",
    "PMIX_SERVER_URI41": "prterun-node-07-12345@0.1;tcp4://127.0.0.1:46542",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


def resolver(environ, **changed):
    return OpenMPIClusterResolver(environ={**environ, **changed})


def leader(environ, **changed):
    return membership_of(resolver(environ, **changed)).leader_address


@pytest.mark.parametrize(
    ("environ", "address"),
    [(VERSION_4, "198.177.146.70:27264"), (VERSION_5, "node-07:24633")],
    ids=["4", "5"],
)
def test_recorded(environ, address):
    found = resolver(environ)
    assert (found.task_type, found.task_id, found.local_rank, found.environment) == ("worker", 3, 1, "")
    me = membership_of(found)
    assert (me.num_workers, me.id_in_cluster, me.is_chief) == (4, 3, False)
    assert me.addresses == (address, UNKNOWN_ADDRESS, UNKNOWN_ADDRESS, UNKNOWN_ADDRESS)
    assert found.master("worker", 0, "grpc") == f"grpc://{address}"
    assert found.num_accelerators() == {}


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911", "10.96.0.1:25760"),
        ("1314521088.0;tcp6://[fe80::b9b:5cf0,2620::3000:2]:43370", "[fe80::b9b:5cf0]:21920"),
        ("723386368.0;usock;tcp://192.168.0.103:56672", "192.168.0.103:25056"),
    ],
)
def test_uris_of_version_4(uri, address):
    assert leader(VERSION_4, OMPI_MCA_orte_hnp_uri=uri) == address


def test_one_host_needs_no_network():
    assert leader(VERSION_5, OMPI_COMM_WORLD_LOCAL_SIZE="4").startswith("localhost:")
    assert leader({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) == "localhost:20480"


def test_leader_may_be_given():
    assert leader(VERSION_4, MASTER_ADDR="node9").startswith("node9:")
    assert leader(VERSION_4, MASTER_ADDR="node9", REPLICAX_PORT="4000") == "node9:4000"
    assert leader(VERSION_5, PMIX_NAMESPACE="", MASTER_ADDR="node9", REPLICAX_PORT="4000") == "node9:4000"


@pytest.mark.parametrize(
    ("environ", "name"), [(VERSION_4, "OMPI_MCA_orte_hnp_uri"), (VERSION_5, "PMIX_NAMESPACE")]
)
@pytest.mark.parametrize("value", ["", "367984641", "nonsense"])
def test_the_leader_is_not_known(environ, name, value):
    message(
        errors.ClusterEnvironmentError,
        lambda: resolver(environ, **{name: value}),
        "the host of rank 0 is not known",
        f"{name}={value!r}",
        "mpirun -x MASTER_ADDR=",
        "TF_CONFIG",
    )


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"])
def test_a_variable_is_missing(name):
    message(
        errors.ClusterEnvironmentError,
        lambda: resolver(VERSION_5, **{name: ""}),
        f"{name} not found in environment.",
        "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE",
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"OMPI_COMM_WORLD_RANK": "4"}, ["OMPI_COMM_WORLD_RANK=4", "less than OMPI_COMM_WORLD_SIZE=4"]),
        ({"OMPI_COMM_WORLD_RANK": "x"}, ["OMPI_COMM_WORLD_RANK='x'"]),
        ({"OMPI_COMM_WORLD_SIZE": "0"}, ["OMPI_COMM_WORLD_SIZE='0'"]),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "x"}, ["OMPI_COMM_WORLD_LOCAL_RANK='x'"]),
    ],
    ids=repr,
)
def test_malformed(changed, says):
    message(errors.ClusterEnvironmentError, lambda: resolver(VERSION_4, **changed), *says)
