"""The library for collectives between processes: gloo on CPUs, always, and a warning where another one was wanted."""

import logging

import pytest

from checks import message
from replicax import errors
from replicax._src.cluster.environ import check_cpu_collectives
from replicax._src.strategies.multi_worker_mirrored import _say_what_communicates
from replicax._src.vocabulary.options import CommunicationImplementation


@pytest.mark.parametrize("requested", ["gloo", None, "", "megascale"])
def test_every_request_but_mpi_is_accepted(requested):
    check_cpu_collectives(requested)


def test_mpi_is_refused_with_what_to_do():
    says = message(errors.ClusterEnvironmentError, lambda: check_cpu_collectives("mpi"))
    assert says.startswith(
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION is mpi, and replicax no longer has collectives by MPI."
    )
    assert "Unset it, or set it to gloo" in says


@pytest.mark.parametrize(
    ("wanted", "platform", "says"),
    [
        ("AUTO", "cpu", None),
        ("AUTO", "gpu", None),
        ("RING", "cpu", None),
        ("NCCL", "gpu", None),
        ("NCCL", "cpu", "NCCL is for GPUs: on CPU the workers use gloo."),
        ("NCCL", "tpu", "NCCL is for GPUs: on TPU the workers use XLA."),
        ("RING", "tpu", "RING is gloo's, on CPUs: here the workers use XLA."),
        ("RING", "gpu", "RING is gloo's, on CPUs: here the workers use NCCL, which chooses"),
    ],
)
def test_implementation_that_the_hardware_lacks(wanted, platform, says, caplog):
    with caplog.at_level(logging.WARNING, "replicax"):
        _say_what_communicates(CommunicationImplementation(wanted), platform)
    assert len(caplog.messages) == (says is not None)
    assert (says or "") in "".join(caplog.messages)
