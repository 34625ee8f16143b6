"""The errors of cluster descriptions. ``docs/reference/errors.md`` has an entry for each class."""

from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError


class ClusterError(InvalidArgumentError):
    """A description of a cluster that no strategy accepts."""


class ClusterTypeError(ClusterError, TypeError):
    """The argument does not describe a cluster."""


class AddressError(ClusterError):
    """An address of a cluster is not ``host:port``, or occurs twice."""


class TaskError(ClusterError):
    """This process's task, or a requested task, is not in the cluster."""


class RepeatedTaskError(ClusterError, KeyError):
    """Two resolvers of a union name the same task. It is a KeyError too, as in TensorFlow."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError.__str__ would quote the message


class ClusterEnvironmentError(ClusterError, RuntimeError):
    """Environment variables that describe a cluster are missing or malformed."""


class ClusterManagerError(ReplicaxError, RuntimeError):
    """Kubernetes or Compute Engine could not list the cluster."""
