"""Compiles cross-replica code, including its ``run`` and ``reduce`` calls, for the devices of its strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from replicax._src.devices.topology import Topology, is_replica_mesh
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.spmd import ProgramState, StatePrograms
from replicax._src.lowering.surviving_program import SurvivingProgram
from replicax._src.scope import context
from replicax._src.scope.any_placement import Placement
from replicax._src.scope.any_strategy import AnyStrategy
from replicax._src.tracing import key
from replicax._src.tracing.arguments import ClosureCheck
from replicax._src.tracing.bindings import Binding, SyncPolicy
from replicax._src.tracing.capture import current_capture
from replicax._src.tracing.outer_trace import tracer_as_argument
from replicax._src.tracing.passes import trace_cross_replica
from replicax._src.tracing.program import Variant, has_callback
from replicax._src.user.listening import listener
from replicax._src.values.distributed import DistributedValues, PerReplica, is_value
from replicax._src.variables.placement import VariablePlacement
from replicax._src.vocabulary.errors import MixedStrategiesError

Arrays = Sequence[jax.Array]


class _OtherStrategy(BaseException):
    """The function belongs to another strategy than assumed and must be traced again."""

    def __init__(self, strategy: AnyStrategy):
        self.strategy = strategy


class RunsWithPlacement(BaseException):
    """No program can take the variables of the function or of its strategy, so their placement must run it.

    It is a BaseException, so that a user's ``except Exception`` does not catch it.
    """

    def __init__(self, run_here: Callable[..., Any]):
        self.run_here = run_here


class _Home:
    """The strategy whose devices run a function's program. The trace finds it."""

    def __init__(self, strategy: AnyStrategy | None = None):
        self.strategy = strategy

    def use(self, strategy: AnyStrategy) -> None:
        """Notes that ``strategy`` runs something in the function or owns one of its variables."""
        run_here = strategy.variable_placement.run_here
        if run_here is not None:
            raise RunsWithPlacement(run_here)
        if self.strategy is None:
            self.strategy = strategy
        elif self.strategy is not strategy and not strategy.is_default:
            if self.strategy.is_default:
                raise _OtherStrategy(strategy)
            raise MixedStrategiesError(
                f"Mixing different tf.distribute.Strategy objects in one rx.function: {self.strategy!r} is not "
                f"{strategy!r}. Use one rx.function for each."
            )

    def binding_of(self, variable: Any) -> Binding:
        self.use(context.owner_of(variable) or context.get_strategy())
        assert self.strategy is not None
        return self.strategy.bindings.binding_of(variable)


@dataclass(frozen=True)
class TracedCode:
    """A traced cross-replica function.

    Attributes:
      variant: The trace.
      strategy: The strategy on whose devices it runs.
      kinds: The kind of each returned array: "row" (a PerReplica, device r holds row r), "whole" (a replicated value)
        or "plain" (an array).
      name: The name of the function for messages.
      makers: The maker of each such array, if ``run`` made it.
      checks: The functions that take the last arrays, one each, before anything is stored.
    """

    variant: Variant
    strategy: AnyStrategy | _NoStrategy
    kinds: Sequence[str]
    name: str
    makers: Sequence[Any] = ()
    checks: Sequence[Callable[[jax.Array], None]] = ()


def mesh_of(arrays: Sequence[Any]) -> Mesh | None:
    """Returns the mesh of the strategy whose values are among ``arrays``; None if there is none.

    Raises:
      TraceError: One is a tracer, because JAX traces the caller.
    """
    for array in arrays:
        if isinstance(array, jax_compat.Tracer):
            raise tracer_as_argument("A function of rx.function")
        sharding = array.sharding if isinstance(array, jax.Array) else None
        mesh = sharding.mesh if isinstance(sharding, jax.sharding.NamedSharding) else None
        if isinstance(mesh, Mesh) and is_replica_mesh(mesh):
            return mesh
    return None


@dataclass(frozen=True)
class _NoStrategy:
    """The devices of code that only computes with a strategy's values."""

    topology: Topology
    variable_placement: Placement


def trace_code(
    call: Callable[[list[jax.Array]], Any],
    avals: Sequence[Any],
    name: str,
    strategy: AnyStrategy | None = None,
    argument_mesh: Mesh | None = None,
    *,
    has_checks: bool = False,
    is_for_plan: bool = False,
) -> TracedCode:
    """Traces cross-replica code.

    Args:
      call: Calls the code with a list of tracers of ``avals``.
      name: The name of the function for messages.
      strategy: The strategy that the code belongs to; None to find it.
      argument_mesh: The mesh of the arguments, if they are values of a strategy. Code that uses no strategy runs there,
        or on the mesh of the values that it closes over.
      has_checks: True if results may be checked. The code then returns a pair of its results and the arrays for the
        checks.
      is_for_plan: True if the code will not run; see ``Capture``.

    Raises:
      MixedStrategiesError: The code uses two strategies.
    """
    kinds: list[str] = []
    makers: list[Any] = []
    checks: list[Any] = []

    def traced(tracers: list[jax.Array]) -> Any:
        capture = current_capture()
        assert capture is not None
        capture.checks = [] if has_checks else None
        result = call(tracers)
        if capture.checks is not None:
            checks[:] = [check for check, _ in capture.checks]
            result = result, [found for _, found in capture.checks]
        values = _arrays_in(result)
        kinds[:], makers[:] = map(_kind, values), makers_of(values)
        return result

    home = _Home(strategy)
    while True:
        try:
            variant = trace_cross_replica(
                traced, avals, home.binding_of, on_strategy=home.use, is_for_plan=is_for_plan
            )
            variant.check_no_leaks()
            home_strategy = home.strategy or context.get_strategy()
            mesh = argument_mesh or mesh_of(variant.consts)
            if mesh is not None and home_strategy.is_default:
                topology = Topology.from_mesh(mesh)
                home_strategy = _NoStrategy(topology, VariablePlacement(topology, None))
            listener().lowering(variant.jaxpr, home_strategy.topology, name)
            return TracedCode(variant, home_strategy, kinds, name, makers, checks)
        except _OtherStrategy as other:
            home = _Home(other.strategy)


def _arrays_in(result: Any) -> list[Any]:
    values = jax.tree_util.tree_leaves(result, is_leaf=is_value)
    return [value for value in values if isinstance(value, DistributedValues) or key.is_array(value)]


def makers_of(values: Sequence[Any]) -> list[Any]:
    """Returns the maker of each value, or None if ``run`` did not make it."""
    return [value.maker if isinstance(value, PerReplica) else None for value in values]


def set_makers(values: Sequence[Any], makers: Sequence[Any]) -> None:
    """Sets the maker of each value."""
    for value, maker in zip(values, makers, strict=True):
        if maker is not None:
            value.maker = maker


def _kind(value: Any) -> str:
    if not isinstance(value, DistributedValues):
        return "plain"
    return "row" if isinstance(value, PerReplica) and not value.is_equal else "whole"


@final
class CodeState:
    """The variables of traced code, for programs that evaluate it.

    Attributes:
      state: Loads and stores the variables.
      consts: The arrays that the code closes over, on the devices.
    """

    def __init__(self, code: TracedCode):
        variant, strategy = code.variant, code.strategy
        self._code, self._topology = code, strategy.topology
        bindings = [entry.binding for entry in variant.entries]
        written = [entry.binding for entry in variant.written]
        self.state = ProgramState(bindings, written, strategy.variable_placement, code.name)
        self._donates = not has_callback(variant.jaxpr) and not code.checks
        self._is_training = any(binding.variable.trainable for binding in written)
        self.consts = self._topology.put_whole(variant.consts)
        self._from_loaded = _positions(self.state.bindings, bindings)
        self._to_written = _positions(written, self.state.written.bindings)
        self._summed = [
            i for i, s in enumerate(self.state.written.bindings) if s.sync_policy is SyncPolicy.SUMMED
        ]

    def evaluate(
        self, written: Arrays, read: Arrays, consts: Arrays, args: Arrays
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Evaluates the code once in a trace. Returns the new values of the written variables, and the results."""
        state = [*written, *read]
        loaded = [state[i] for i in self._from_loaded]
        outs = jax_compat.eval_jaxpr(self._code.variant.jaxpr, [*consts, *loaded, *args])
        num_arrays = self._code.variant.num_arrays
        writes = outs[num_arrays:]
        return [writes[i] for i in self._to_written], outs[:num_arrays]

    def compile(
        self, body: Callable[..., tuple[list[jax.Array], list[jax.Array]]], name: str
    ) -> StatePrograms | SurvivingProgram:
        """Compiles a program, when it first runs.

        Args:
          body: Takes the state and the constants as ``evaluate`` does, then the arguments of ``run``. Returns the same
            as ``evaluate``.
        """
        topology = self._topology

        def program(written: Arrays, read: Arrays, consts: Arrays, *args: Any) -> Any:
            writes, outs = body(written, read, consts, *args)
            sums = [jnp.sum(writes[i], axis=0, dtype=writes[i].dtype) for i in self._summed]
            return writes, sums, outs, [jnp.int8(0)] if topology.needs_token else []

        def compile_program(donates: bool) -> Any:
            return topology.compile(
                program,
                name,
                donate_argnums=(0,) if donates else (),
                out_shardings=(
                    [s.placement_on(topology) for s in self.state.written.bindings],
                    [topology.replicated] * len(self._summed),
                    shardings_of(self._code.kinds, topology),
                    [topology.replicated] if topology.needs_token else [],
                ),
            )

        if topology.survivors is not None:
            return SurvivingProgram(program, name, self.state, topology, donates=self._donates)
        return StatePrograms(compile_program, self._donates)

    def run(self, programs: StatePrograms | SurvivingProgram, *args: Any) -> list[jax.Array]:
        """Runs a program from ``compile`` and returns the results."""
        if isinstance(programs, SurvivingProgram):
            return programs(self.consts, *args)
        check = self._check if self._code.checks else None
        if self._is_training:
            StatePrograms.note_training_step()
        compiled, donates = programs.form()
        return self.state.run(compiled, (self.consts, *args), donates, check)

    def _check(self, outs: Arrays) -> None:
        checks = self._code.checks
        for check, found in zip(checks, outs[len(outs) - len(checks) :], strict=True):
            check(found)

    def result_of(self, outs: Arrays) -> Any:
        """Returns the result of the code, with the arrays of a run."""
        variant, remaining = self._code.variant, iter(outs)
        return variant.tree.unflatten([next(remaining) if o.is_array else o.value for o in variant.outputs])


def shardings_of(
    kinds: Sequence[str], topology: Topology, row: jax.sharding.Sharding | None = None
) -> list[jax.sharding.Sharding]:
    """Returns the shardings for arrays of these kinds; see ``TracedCode``. ``row`` replaces the sharding of rows."""
    return [(row or topology.per_replica) if kind == "row" else topology.replicated for kind in kinds]


@final
class LoweredCode:
    """Traced code that is compiled for the devices of its strategy."""

    def __init__(self, code: TracedCode, check_closure: ClosureCheck):
        self._code, self.check_closure = code, check_closure
        self._topology = code.strategy.topology
        self._variables = CodeState(code)
        self.state = self._variables.state
        self._has_makers = any(code.makers)
        self._programs = self._variables.compile(self._variables.evaluate, code.name)
        # Plain results go to the devices that store variables, so that plain code can compute with both.
        self._home = code.strategy.variable_placement.parameter_device

    def described(self, args: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns the program from ``jax.jit``, and its arguments with a description of the state."""
        variables = self._variables
        state = variables.state.described(self._topology)
        assert isinstance(self._programs, StatePrograms), "survivors have no single program to lower"
        return self._programs.form()[0], [*state, variables.consts, list(args)]

    def __call__(self, args: Sequence[Any]) -> Any:
        code = self._code
        outs = self._variables.run(self._programs, on_mesh(args, self._topology))
        if self._home is not None:
            outs = [
                jax.device_put(o, self._home) if kind == "plain" else o
                for o, kind in zip(outs, code.kinds, strict=True)
            ]
        result = self._variables.result_of(outs)[0]
        if self._has_makers:
            arrays = _arrays_in(result)
            set_makers(arrays, code.makers[: len(arrays)])
        return result


def on_mesh(args: Sequence[Any], topology: Topology) -> list[Any]:
    """Returns the arguments of a program over all devices. It replicates JAX arrays from other devices."""
    return [
        topology.put_whole(a)
        if isinstance(a, jax.Array) and a.sharding.device_set != topology.device_set
        else a
        for a in args
    ]


def _positions(order: Sequence[Binding], wanted: Sequence[Binding]) -> list[int]:
    position = {id(binding): i for i, binding in enumerate(order)}
    return [position[id(binding)] for binding in wanted]
