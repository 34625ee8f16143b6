"""``Strategy``: the interface of every strategy. The named strategies are compositions of its parts.

This file has its parts, properties and scope. Its methods that run and reduce are in ``run_methods.py``, those for data
in ``data_methods.py``, and the names of TensorFlow 1 in ``older_methods.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self

from replicax._src.cluster.chief import has_role, note_role
from replicax._src.cluster.counters import counters
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.resolver import ClusterResolver
from replicax._src.collectives import cross_device
from replicax._src.collectives.cross_device import CrossDeviceOps, NcclAllReduce
from replicax._src.collectives.in_replica import Communicator
from replicax._src.devices.named_devices import device_name
from replicax._src.devices.topology import Topology
from replicax._src.hooks import hook
from replicax._src.jax_internals.jax_compat import Device
from replicax._src.scope import context
from replicax._src.scope.any_placement import Placement
from replicax._src.scope.any_strategy import FunctionRunner, StrategyParts, StrategyView
from replicax._src.status.job import serve_status
from replicax._src.strategies.data_methods import DataMethods
from replicax._src.strategies.extended import StrategyExtended
from replicax._src.strategies.mistakes import (
    no_strategies_of_users,
    no_such_attribute,
)
from replicax._src.strategies.older_methods import OlderMethods
from replicax._src.strategies.run_methods import RunMethods
from replicax._src.strategies.run_steps import StepsRunner
from replicax._src.strategies.running import ReplicaRunner
from replicax._src.tracing.bindings import BindingTable
from replicax._src.user.listening import listener
from replicax._src.user.user_code import user_line
from replicax._src.variables.layout_map import LayoutMap
from replicax._src.variables.layouts import VariableLayouts
from replicax._src.variables.placement import VariablePlacement
from replicax._src.variables.state_shards import StateShards
from replicax._src.vocabulary.errors import (
    ContextError,
    InvalidArgumentError,
    UnsupportedError,
)
from replicax._src.vocabulary.options import (
    CommunicationOptions,
    ReduceOp,
    ShardState,
)


class Strategy(RunMethods, OlderMethods, DataMethods):
    """A policy for where state lives and computation runs.

    Write the program once; the strategy decides where it runs. Make variables, models and optimizers in ``scope()``,
    distribute data with ``experimental_distribute_dataset``, run steps with ``run``, and combine values with
    ``reduce``.

    Do not make a ``Strategy`` itself: use ``MirroredStrategy``, ``OneDeviceStrategy``, ``CentralStorageStrategy``, or
    the default strategy, ``rx.get_strategy()``.

    Source: tf.distribute.Strategy.
    """

    is_default = False
    partitions_by_spmd = False

    def __init__(
        self,
        make_topology: Callable[[], Topology],
        *,
        parameter_device: Device | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        cluster_resolver: ClusterResolver | None = None,
        is_chief: bool = True,
        communication_options: CommunicationOptions | None = None,
        make_parts: Callable[[Any], StrategyParts] | None = None,
        shard_state: ShardState | str | None = None,
        shard_size: int | None = None,
        layout_map: LayoutMap | None = None,
        own_worker: Membership | None = None,
        serves_status: bool = True,
    ):
        """For the named strategies, which compose their parts here.

        Args:
          make_topology: Called at the first use, because making a strategy must not start JAX's backend.
          parameter_device: The device that holds all variables; by default each replica holds a copy.
          cross_device_ops, communication_options: How values are reduced between programs.
          cluster_resolver, is_chief: The tasks of the job, and whether this process writes checkpoints.
          make_parts: Makes other parts than a topology and a placement on its devices; it gets the strategy.
          shard_state, shard_size, layout_map: How variables are divided over replicas and over a replica's devices.
          own_worker: This worker, if each worker runs the program separately.
          serves_status: False if another object of this process serves its status.
        """
        if isinstance(make_topology, StrategyExtended):  # as a subclass in TensorFlow does
            raise no_strategies_of_users(type(self).__name__)
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise InvalidArgumentError(
                f"cross_device_ops must be an rx.CrossDeviceOps, such as rx.ReductionToOneDevice(), got "
                f"{cross_device_ops!r}."
            )
        self._make_topology, self._make_parts = make_topology, make_parts
        self._parameter_device = parameter_device
        self._cluster_resolver, self._is_chief = cluster_resolver, is_chief
        note_role(cluster_resolver, is_chief)
        if not self.is_default:
            counters.strategy = type(self).__name__
            listener().made_strategy()
        if serves_status and not self.is_default:
            serve_status()
        self._communication_options = communication_options
        self._shard_state, self._shard_size = shard_state, shard_size
        self._layout_map = layout_map
        self._ops = cross_device_ops or NcclAllReduce()
        self._steps_runner = StepsRunner(self)
        self._own_worker = own_worker
        self._extended = StrategyExtended(self, None if own_worker is None else own_worker.task)

    # --- parts, for the rest of replicax --------------------------------------------------------------

    @functools.cached_property
    def _own_parts(self) -> StrategyParts:
        if self._make_parts is not None:
            return self._make_parts(self)
        topology = self._make_topology()
        layouts, shards = None, self.shards_on(topology)
        if shards is not None or self._layout_map is not None or topology.num_logical_devices > 1:
            layouts = VariableLayouts(topology, shards, self._layout_map)
        return self._parts_of(topology, VariablePlacement(topology, self._parameter_device, layouts))

    def view_on(self, topology: Topology, shards: StateShards | None) -> StrategyView:
        """Returns the view for a plan: this strategy on ``topology``, with as many devices for each replica.
        ``shards`` says how its state is sharded there.
        """
        own = self._own_parts.variable_placement.layouts
        layouts = own and own.on(topology, shards)
        if own is None and shards is not None:
            layouts = VariableLayouts(topology, shards)
        return StrategyView(self, self._parts_of(topology, VariablePlacement(topology, None, layouts)))

    def _parts_of(self, topology: Topology, placement: VariablePlacement) -> StrategyParts:
        bindings = BindingTable(topology.num_replicas, placement.layouts)
        return StrategyParts(topology, placement, bindings, ReplicaRunner(self, topology))

    def shards_on(self, topology: Topology) -> StateShards | None:
        """Returns the sharding of state over the strategy's or a plan's replicas; None if it is not sharded."""
        return StateShards.of(self._shard_state, self._shard_size, topology.num_replicas)

    @property
    def parts(self) -> StrategyParts:
        """The parts of the strategy, or of the view whose scope this is."""
        view = context.view_of(self)
        return self._own_parts if view is None else view.parts

    @property
    def topology(self) -> Topology:
        """The replicas' devices."""
        return self.parts.topology

    @property
    def variable_placement(self) -> Placement:
        """The placement of variables."""
        return self.parts.variable_placement

    @property
    def bindings(self) -> BindingTable:
        """The bindings of the variables that this strategy's programs use."""
        return self.parts.bindings

    @property
    def runner(self) -> FunctionRunner:
        """The runner of functions on the replicas."""
        return self.parts.runner

    @property
    def steps_runner(self) -> StepsRunner:
        """The runner of several steps in one call."""
        return self._steps_runner

    @property
    def user_ops(self) -> CrossDeviceOps | None:
        """The user's cross-device operations; None for the built-in all-reduce."""
        return None if type(self._ops) in cross_device.ALL_REDUCES else self._ops

    def reduce_in_replica(
        self, communicator: Communicator, op: ReduceOp, value: Any, options: CommunicationOptions | None
    ) -> Any:
        """Implements ``all_reduce`` of a replica function, through this strategy's cross-device operations."""
        options = options or self._communication_options
        return cross_device.reduce_in_replica(self._ops, communicator, op, value, options)

    # --- properties -----------------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas R, over which gradients are summed."""
        return self.topology.num_replicas

    @property
    def num_logical_devices(self) -> int:
        """The number of devices per replica: 1 unless ``devices_per_replica``, or a device assignment, says more."""
        return self._own_parts.topology.num_logical_devices

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that described the cluster; None on one machine."""
        return self._cluster_resolver

    @property
    def is_chief(self) -> bool:
        """True if this process writes checkpoints and summaries, which only one process writes. If failures are
        tolerated, this is the live process with the lowest number.
        """
        return has_role(self._is_chief)

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for libraries."""
        return self._extended

    # --- scope ---------------------------------------------------------------------------------------

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Returns a context in which the strategy is current and owns new variables.

        ``with strategy.scope():`` may be entered again, and nested in itself. It applies to this thread. Import Keras
        before it.

        Raises:
          MixedStrategiesError: The call is inside another strategy's scope.
          CrossReplicaContextError: The call is inside a replica function.
          KerasScopeError: Keras was imported in the block. It is raised at the end of the block.
        """
        context.check_may_enter(self)
        return context.Scope(self, user_line())

    def __enter__(self) -> Self:
        raise ContextError(
            "A strategy itself is not a context. Write `with strategy.scope():`, and make variables, models and optimizers in "
            "its block."
        )

    def __exit__(self, *exc_info: object) -> None:
        raise AssertionError("__enter__ raises")

    # --- Python ---------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            # Python calls this for an unknown name, or after a property raised an AttributeError. It only raises.
            if name.startswith("_") or name in dir(type(self)):
                return object.__getattribute__(self, name)
            raise no_such_attribute(self, name)

    def __copy__(self) -> Strategy:
        raise UnsupportedError("Must only deepcopy DistributionStrategy: a strategy cannot be copied.")

    def __deepcopy__(self, memo: Any) -> Strategy:
        return self  # a strategy is tied to its devices, and references must keep the same object

    def __repr__(self) -> str:
        topology = self.topology
        if topology.survivors is not None:
            here = topology.local_replicas
            return (
                f"<{type(self).__name__}(fault_tolerance=True) on {device_name(topology.devices[0])}, for "
                f"replica{'s' * (len(here) > 1)} {', '.join(map(str, here))} of {topology.num_replicas}>"
            )
        names = ", ".join("+".join(map(device_name, of_replica)) for of_replica in topology.grid)
        return f"<{type(self).__name__} on {names}>"

    def _repr_html_(self) -> str:
        return hook("pictures").table_of(type(self).__name__, self.topology, self.variable_placement)


for _methods in (RunMethods, OlderMethods, DataMethods):
    for _method in vars(_methods).values():
        if isinstance(_method, FunctionType):
            # Python's errors about wrong calls, and pickles, name the public class.
            _method.__module__, _method.__qualname__ = __name__, f"Strategy.{_method.__name__}"
