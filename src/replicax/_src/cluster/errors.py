"""What can be wrong with the description of a cluster. ``docs/reference/errors.md`` has an entry for each class."""

from replicax._src.errors import InvalidArgumentError, ReplicaxError


class ClusterError(InvalidArgumentError):
    """The description of a cluster that no strategy accepts."""


class ClusterTypeError(ClusterError, TypeError):
    """Something that describes no cluster was given as one."""


class AddressError(ClusterError):
    """An address of a cluster that is not ``host:port``, or stands there twice."""


class TaskError(ClusterError):
    """This process's task, or a task that was asked for, is not one of the cluster."""


class RepeatedTaskError(ClusterError, KeyError):
    """Two resolvers of a union name the same task; a KeyError too, as in TensorFlow."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError's would put the message into quotes


class ClusterEnvironmentError(ClusterError, RuntimeError):
    """Environment variables that describe a cluster are missing or malformed."""


class ClusterManagerError(ReplicaxError, RuntimeError):
    """Kubernetes or Compute Engine could not say who is in the cluster."""
