"""The base classes of cluster resolvers, and the two resolvers of known clusters: Simple and Union.

A resolver describes the tasks of a cluster, and says which one this process is. It starts no process and no backend.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, final

from replicax._src.cluster.errors import ClusterTypeError, RepeatedTaskError
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.spec import ClusterSpec
from replicax._src.vocabulary.errors import InvalidArgumentError


class ClusterResolver(abc.ABC):
    """Describes the tasks of a cluster, and says which one this process is.

    A subclass defines all methods and the four attributes, as attributes or properties.

    Attributes:
      task_type: The type of this process: ``chief``, ``worker``, ``ps`` or ``evaluator``; None if it is not known.
      task_id: The index of this process among the tasks of its type, from 0; None if it is not known.
      environment: TensorFlow's name for the place where it runs; empty or None outside of Google.
      rpc_layer: The scheme that ``master`` puts before addresses, such as ``grpc``. Nothing else uses it.
    """

    task_type: str | None
    task_id: int | None
    environment: str | None
    rpc_layer: str | None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the current tasks and their addresses. It may ask a cluster manager."""

    @abc.abstractmethod
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task (this one, unless another is named), with the RPC layer as its scheme.

        Strategies do not need it. TensorFlow 1 did.
        """

    @abc.abstractmethod
    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns the known accelerators of a task by kind: ``{"GPU": 2}``.

        Unlike TensorFlow, it does not look for devices. That would start JAX's backend, after which a process cannot
        join a cluster. ``jax.local_devices()`` lists the devices later.
        """


def membership_of(resolver: ClusterResolver) -> Membership:
    """Returns the current cluster of a resolver and this process's task in it, checked.

    Raises:
      ClusterError: The description of the cluster is wrong; the message says where.
    """
    spec = ClusterSpec(resolver.cluster_spec())
    return Membership.of(spec, resolver.task_type, resolver.task_id)


def master_url(address: str, rpc_layer: str | None) -> str:
    """Returns ``grpc://host:port``, or the plain address without an RPC layer."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def master_of(
    resolver: ClusterResolver, task_type: str | None, task_id: int | None, rpc_layer: str | None
) -> str:
    """Returns the address of a task of the resolver's cluster, by default its own; empty if it is not known."""
    task_type = task_type if task_type is not None else resolver.task_type
    task_id = task_id if task_id is not None else resolver.task_id
    if task_type is None or task_id is None:
        return ""
    address = resolver.cluster_spec().task_address(task_type, task_id)
    return master_url(address, rpc_layer or resolver.rpc_layer)


class AddressedResolver(ClusterResolver):
    """A resolver whose ``master`` is the address of a task in its cluster."""

    environment = ""
    _accelerators: Mapping[str, int] = MappingProxyType({})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of a task, by default this one; empty if it is not known."""
        return master_of(self, task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns the known accelerators of each task. The arguments have no effect."""
        return dict(self._accelerators)


def argument_or_environment(name: str, read: Callable[[Any], Any], kind: Callable[[Any], Any]) -> Any:
    """Returns a property with the value that was set. While that is None, each access reads the value.

    Args:
      name: The name of the property.
      read: Reads the value for an object.
      kind: Converts the value that was set.
    """

    def get(instance: Any) -> Any:
        given = vars(instance).get(name)
        return read(instance) if given is None else kind(given)

    def set_given(instance: Any, value: Any) -> None:
        vars(instance)[name] = value

    return property(get, set_given, doc="The value that was given or set, or else the value that is read.")


class EnvironmentResolver(ClusterResolver):
    """A resolver that reads environment variables at every access. Values that were given or set have priority.

    Args:
      task_type: Replaces the type that is read.
      task_id: Replaces the index that is read.
      environment: The value of ``environment``.
      environ: The variables; None: ``os.environ``.
    """

    task_type = argument_or_environment("task_type", lambda resolver: resolver._read_task_type(), str)
    task_id = argument_or_environment("task_id", lambda resolver: resolver._read_task_id(), int)

    def __init__(
        self,
        task_type: str | None,
        task_id: int | None,
        environment: str | None,
        environ: Mapping[str, str] | None,
    ) -> None:
        self.environment, self.task_type, self.task_id = environment, task_type, task_id
        self._environ = os.environ if environ is None else environ

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns ``{}``, because the variables do not list accelerators."""
        return {}

    @abc.abstractmethod
    def _read_task_type(self) -> str | None:
        """Returns the type in the variables."""

    @abc.abstractmethod
    def _read_task_id(self) -> int | None:
        """Returns the index in the variables."""


def is_one_task(spec: ClusterSpec) -> bool:
    """Returns True if the cluster has at most one task, so that there is no other task to connect to."""
    return sum(spec.num_tasks(job) for job in spec.jobs) <= 1


@final
class SimpleClusterResolver(ClusterResolver):
    """Holds a known cluster: its answers are the constructor's arguments.

    Args:
      cluster_spec: A ClusterSpec.
      master: The result of ``master()`` without a task.
      task_type: The type of this process.
      task_id: The index of this process.
      environment: See ``ClusterResolver``.
      num_accelerators: The result of ``num_accelerators()``; ``{}`` by default.
      rpc_layer: See ``ClusterResolver``.

    Raises:
      ClusterTypeError: ``cluster_spec`` is not a ClusterSpec, or ``master`` is not a string.

    >>> spec = ClusterSpec({"worker": ["a:2222", "b:2222"]})
    >>> SimpleClusterResolver(spec, task_type="worker", task_id=1).master("worker", 1, rpc_layer="grpc")
    'grpc://b:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str | None = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise ClusterTypeError(
                f"cluster_spec must be a `tf.train.ClusterSpec`, here an rx.cluster_resolver.ClusterSpec; got "
                f"{type(cluster_spec).__name__}. Write ClusterSpec({{'worker': ['host:port', ...]}})."
            )
        if not isinstance(master, str):
            raise ClusterTypeError(
                f"master must be a string, got {master!r}. Leave it out: it is not needed."
            )
        self.task_type = task_type
        self.task_id = task_id
        self.environment = environment
        self.rpc_layer = rpc_layer
        self._cluster_spec = cluster_spec
        self._master = master
        self._num_accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that was given."""
        return self._cluster_spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the named task, or else the ``master`` that was given."""
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns the accelerators that were given. The arguments have no effect."""
        return dict(self._num_accelerators)


@final
class UnionResolver(ClusterResolver):
    """Joins several resolvers: it has the tasks of all, and takes everything else from the first.

    It concatenates the address lists of a job. If a resolver knows only some indices of a job, the tasks keep their
    indices.

    Args:
      *args: The resolvers, at least one.
      **kwargs: ``task_type``, ``task_id`` and ``rpc_layer``, which replace those of the first resolver.

    Raises:
      InvalidArgumentError: There is no resolver, or another keyword.
      ClusterTypeError: An argument is not a resolver.
    """

    task_type = argument_or_environment("task_type", lambda union: union._resolvers[0].task_type, str)
    task_id = argument_or_environment("task_id", lambda union: union._resolvers[0].task_id, int)

    def __init__(self, *args: ClusterResolver, **kwargs: Any) -> None:
        self._rpc_layer: str | None = kwargs.pop("rpc_layer", None)
        self.task_type, self.task_id = kwargs.pop("task_type", None), kwargs.pop("task_id", None)
        if kwargs:
            raise InvalidArgumentError(
                f"Unexpected kwargs provided {kwargs!r}: UnionResolver takes task_type, task_id and rpc_layer."
            )
        if not args:
            raise InvalidArgumentError(
                "At least one ClusterResolver is required: UnionResolver(first, second, ...)."
            )
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise ClusterTypeError(
                    f"All arguments must be a sub-class of `ClusterResolver.` Got {type(resolver).__name__}; wrap a "
                    f"ClusterSpec into a SimpleClusterResolver."
                )
        self._resolvers = args

    @property
    def rpc_layer(self) -> str | None:
        """The scheme before addresses: an argument, a later assignment, or else that of the first resolver."""
        return self._rpc_layer or self._resolvers[0].rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """The ``environment`` of the first resolver."""
        return self._resolvers[0].environment

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of all resolvers.

        Raises:
          RepeatedTaskError: Two resolvers name the same index of a job. It is a KeyError too.
        """
        specs = [ClusterSpec(resolver.cluster_spec()) for resolver in self._resolvers]
        jobs = dict.fromkeys(job for spec in specs for job in spec.jobs)
        source = " and ".join(dict.fromkeys(spec.source for spec in specs if spec.source))
        return ClusterSpec({job: _merged(job, specs) for job in jobs}, source=source)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns the address of the named task, or else the first resolver's ``master()``."""
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return master_url(address, rpc_layer or self._rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Returns the accelerators of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _merged(job: str, specs: list[ClusterSpec]) -> list[str] | dict[int, str]:
    """Joins one job of several specs: concatenates the lists, or joins by index if a spec knows only some indices."""
    parts = [spec.as_dict()[job] for spec in specs if job in spec.jobs]
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts if isinstance(part, list) for address in part]
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        repeated = sorted(merged.keys() & tasks.keys())
        if repeated:
            raise RepeatedTaskError(
                f"Duplicate keys detected when merging two ClusterSpecs: {repeated} of job {job!r}, where one of the "
                f"resolvers knows only some indices. Give each task to one resolver."
            )
        merged.update(tasks)
    return merged
