"""The variables that Kubeflow Trainer's runtime jax-distributed sets: complete, partial and malformed."""

import pytest

from checks import message
from replicax import errors
from replicax._src.cluster.resolver import membership_of
from replicax.cluster_resolver import UNKNOWN_ADDRESS, JaxClusterResolver

# pod 2 of a TrainJob called digits with numNodes: 3 (pkg/runtime/framework/plugins/jax of kubeflow/trainer)
TRAIN_JOB = {
    "JAX_NUM_PROCESSES": "3",
    "JAX_PROCESS_ID": "2",
    "JAX_COORDINATOR_ADDRESS": "digits-node-0-0.digits:29500",
}


def resolver(**changed):
    return JaxClusterResolver(environ={**TRAIN_JOB, **changed})


def test_a_train_job():
    found = resolver()
    assert (found.task_type, found.task_id, found.local_rank) == ("worker", 2, None)
    me = membership_of(found)
    assert (me.num_workers, me.id_in_cluster, me.is_chief) == (3, 2, False)
    assert me.addresses == ("digits-node-0-0.digits:29500", UNKNOWN_ADDRESS, UNKNOWN_ADDRESS)
    assert membership_of(resolver(JAX_PROCESS_ID="0")).is_chief


def test_address_of_version_6():
    me = membership_of(resolver(JAX_COORDINATOR_ADDRESS="[fd00::1]:8476"))
    assert me.leader_address == "[fd00::1]:8476"


@pytest.mark.parametrize("name", TRAIN_JOB)
def test_a_variable_is_missing(name):
    message(
        errors.ClusterEnvironmentError,
        lambda: resolver(**{name: ""}),
        f"{name} not found in environment. a TrainJob sets JAX_PROCESS_ID, JAX_NUM_PROCESSES, JAX_COORDINATOR_ADDRESS",
        "TF_CONFIG",
    )


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"JAX_PROCESS_ID": "3"}, errors.ClusterEnvironmentError, "less than JAX_NUM_PROCESSES=3"),
        ({"JAX_PROCESS_ID": "x"}, errors.ClusterEnvironmentError, "JAX_PROCESS_ID='x'"),
        ({"JAX_NUM_PROCESSES": "0"}, errors.ClusterEnvironmentError, "JAX_NUM_PROCESSES='0'"),
        ({"JAX_COORDINATOR_ADDRESS": "node0"}, errors.AddressError, "JAX_COORDINATOR_ADDRESS"),
    ],
    ids=repr,
)
def test_malformed(changed, error, says):
    message(error, lambda: resolver(**changed), says)
