"""The exception tree. Each error says what it got, what is allowed and what to do.

Callers catch types, never texts. ``docs/reference/errors.md`` has an entry for each class::

    ReplicaxError
    ├── InvalidArgumentError (ValueError)      an argument that no strategy accepts
    │   ├── DeviceError                        devices that do not exist, or repeat
    │   ├── ReductionError                     a value that cannot be reduced or gathered
    │   ├── StructureError                     replicas that return different structures
    │   ├── TopologyError                      hardware that nobody sells, or that nothing is known of
    │   └── VariableError                      a variable that cannot be made or used that way
    ├── ContextError (RuntimeError)            the right call in the wrong place
    │   ├── CrossReplicaContextError           needs cross-replica context
    │   │   └── IterationContextError (ValueError) a distributed dataset iterated in a replica function
    │   ├── ReplicaContextError                needs replica context
    │   ├── MixedStrategiesError               two strategies in one place
    │   ├── TransformationError                jax.pmap, shard_map or shardings in a step, set_mesh around it
    │   │   └── UnknownAxisError (NameError)   a collective over an axis that does not exist here
    │   └── ScopeNestingError                  scopes or global strategies that do not nest
    ├── PerReplicaUseError (ValueError)        a PerReplica used as if it were one array
    ├── DivergenceError (ValueError)           a mirrored value would differ between replicas
    │   └── DivergentCollectiveError           a collective under a condition that differs
    ├── LabelError (ValueError)                labels that no class has
    ├── ReducedLossError (ValueError)          gradients of a reduced loss are summed again
    ├── TracedConditionError (TypeError)       Python ``if`` on a value known only when it runs
    ├── TapeError (RuntimeError)               a GradientTape where it cannot work
    ├── TraceError (RuntimeError)              a tracer used after, or outside, its trace
    ├── UnsupportedError (NotImplementedError) TensorFlow has it, it has no meaning here
    ├── BackendStartedError (RuntimeError)     too late: JAX's backend is running
    ├── KerasBackendError (RuntimeError)       Keras does not run on JAX
    ├── KerasVersionError (RuntimeError)       a part of Keras is not what replicax needs
    ├── KerasLossError (ValueError)            a mean loss where it would be R times too large
    ├── KerasScopeError (ValueError)           a model, or metrics of it, made outside the scope
    ├── DonatedError (RuntimeError)            a value that was given away
    ├── PlanError (RuntimeError)               a plan that cannot be made in this process
    ├── SummaryError (OSError)                 summaries that could not be written
    ├── OneDeviceDifferenceError (AssertionError)  a step differs from the same step on one device
    ├── ReplayDifferenceError (AssertionError)  a replay differs from the run
    ├── JaxVersionError (ImportError)          a JAX without names that replicax uses
    ├── MissingExtraError (ImportError)        an optional dependency is not installed
    └── MissingPartError (ImportError)         a checkout without a part of replicax
"""

from typing import Any


class ReplicaxError(Exception):
    """Every error that replicax raises on purpose."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _name_publicly(cls)


def _name_publicly(cls: type) -> None:
    """Gives an error of replicax its public module, also for users who have not imported ``replicax.errors``."""
    if cls.__module__.startswith("replicax._") and not cls.__name__.startswith("_"):
        cls.__module__ = "replicax.errors"


_name_publicly(ReplicaxError)


class InvalidArgumentError(ReplicaxError, ValueError):
    """An argument that no strategy accepts."""


class DeviceError(InvalidArgumentError):
    """A device does not exist, repeats, or is not of this process."""


class ReductionError(InvalidArgumentError):
    """A value cannot be reduced or gathered in this way."""


class StructureError(InvalidArgumentError):
    """Replicas return different structures, or their collectives do not match."""


class TopologyError(InvalidArgumentError):
    """Hardware that is not sold, or that replicax does not know."""


class VariableError(InvalidArgumentError):
    """A variable cannot be made, read or assigned in this way."""


class ContextError(ReplicaxError, RuntimeError):
    """The right call in the wrong context."""


class CrossReplicaContextError(ContextError):
    """The call needs cross-replica context: outside ``run``, or in ``merge_call``."""


class IterationContextError(CrossReplicaContextError, ValueError):
    """A distributed dataset was iterated in a replica function; a ValueError too, as in TensorFlow."""


class ReplicaContextError(ContextError):
    """The call needs replica context: inside a function given to ``run``."""


class MixedStrategiesError(ContextError):
    """Two strategies were used in one place."""


class TransformationError(ContextError):
    """Code chooses devices itself (``jax.pmap``, ``jax.shard_map``, shardings) where a strategy has chosen them."""


class UnknownAxisError(TransformationError, NameError):
    """A collective of JAX is over an axis that does not exist here; a NameError too, as JAX's own error."""


class ScopeNestingError(ContextError):
    """Scopes or global strategies that do not nest."""


class PerReplicaUseError(ReplicaxError, ValueError):
    """A PerReplica value was used as if it were one array."""


class DivergenceError(ReplicaxError, ValueError):
    """A value that must be the same on all replicas would vary."""


class LabelError(ReplicaxError, ValueError):
    """Labels of a sparse categorical loss are outside ``[0, C)``, in a step with ``RunOptions(check_finite=True)``."""


class ReducedLossError(ReplicaxError, ValueError):
    """A loss that is already summed over replicas is differentiated, and its gradients are summed again."""


class NotFiniteError(ReplicaxError, FloatingPointError):
    """A step with ``RunOptions(check_finite=True)`` gave a NaN or an infinity."""


class DivergentCollectiveError(DivergenceError):
    """A collective stands under a condition that varies between replicas; some would wait forever."""


class TracedConditionError(ReplicaxError, TypeError):
    """Python control flow on a value that is known only when the program runs."""


class TapeError(ReplicaxError, RuntimeError):
    """A GradientTape was used where it cannot work."""


class TraceError(ReplicaxError, RuntimeError):
    """A tracer was used outside the trace it belongs to."""


class UnsupportedError(ReplicaxError, NotImplementedError):
    """TensorFlow has this feature, but it has no meaning, or no derivative, here."""


class BackendStartedError(ReplicaxError, RuntimeError):
    """JAX's backend has already started, so its devices can no longer be chosen."""


class KerasBackendError(ReplicaxError, RuntimeError):
    """Keras runs on another backend than JAX."""


class KerasVersionError(ReplicaxError, RuntimeError):
    """A part of the installed Keras is not what replicax needs."""


class KerasLossError(ReplicaxError, ValueError):
    """A Keras loss with a mean reduction would give gradients R times too large."""


class KerasScopeError(ReplicaxError, ValueError):
    """A Keras model, or one of its metrics, was made outside the scope of the strategy that trains it."""


class DonatedError(ReplicaxError, RuntimeError):
    """A value was used after it had been given to a program."""


class OneDeviceDifferenceError(ReplicaxError, AssertionError):
    """A step under a strategy differs from the same step on one device."""


class PlanError(ReplicaxError, RuntimeError):
    """The plan cannot be made, or not in this process."""


class SummaryError(ReplicaxError, OSError):
    """A summary could not be written; the writing thread detects it."""


class JaxVersionError(ReplicaxError, ImportError):
    """The installed version of JAX lacks names that replicax uses."""


class MissingExtraError(ReplicaxError, ImportError):
    """An optional dependency is not installed."""


class MissingPartError(ReplicaxError, ImportError):
    """The checkout lacks the part of replicax that a name, a command or a method needs."""


# --- of parameter servers, workers and scheduled functions; the part has no class of its own ---------------------


class UnavailableError(ReplicaxError, RuntimeError):
    """A parameter server or a worker died, is stopped, or cannot be reached.

    Attributes:
      task: The name of the task: ``"ps 0"``.
      is_silent: True if it did not answer in time. It may only be paused or cut off, and resume later.
    """

    def __init__(self, message: str, task: str = "", *, is_silent: bool = False):
        super().__init__(message)
        self.task = task
        self.is_silent = is_silent


class UnauthenticatedError(ReplicaxError, PermissionError):
    """A task of the cluster got a request without the right token or certificate."""


class RemoteError(ReplicaxError, RuntimeError):
    """A task failed to execute a request; the message has its own error.

    Attributes:
      type: The name of the class of the task's error.
      task: The name of the task: ``"worker 1"``.
    """

    def __init__(self, message: str, type: str = "", task: str = ""):
        super().__init__(message)
        self.type = type
        self.task = task


class MessageError(ReplicaxError, ValueError):
    """Another task sent bytes that are not a message: truncated, too large, or of another version."""


class StaleCoordinatorError(ReplicaxError, RuntimeError):
    """Another coordinator has taken over the tasks of the cluster."""


class SnapshotError(ReplicaxError, RuntimeError):
    """A snapshot could not be written, or none can be read."""


class UnknownProgramError(ReplicaxError, KeyError):
    """A task does not have a program, and it must be sent again.

    Attributes:
      digest: The digest of the program.
    """

    def __init__(self, message: str, digest: str = ""):
        super().__init__(message)
        self.digest = digest

    def __str__(self) -> str:
        return Exception.__str__(self)


class CancelledError(ReplicaxError, RuntimeError):
    """A scheduled function did not run, or ran only in part, because another one failed."""


class ClosureInputError(ReplicaxError, RuntimeError):
    """A dataset or value that a scheduled function takes could not be made on a worker."""


class WaitTimeoutError(ReplicaxError, TimeoutError):
    """A wait for scheduled functions, such as ``join`` or ``fetch``, has exceeded its limit."""


class ClosureAbortedError(ReplicaxError, RuntimeError):
    """A resource of a scheduled function was lost with its worker, and is being made again."""


# --- of rx.testing -----------------------------------------------------------------------------------------


class TaskFailedError(ReplicaxError, AssertionError):
    """A task of a ``LocalCluster`` did not exit with 0."""


class ReplayDifferenceError(ReplicaxError, AssertionError):
    """A replay of groups has computed something else than the run whose logs it got."""
