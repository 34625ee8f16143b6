"""Enums and frozen options that users pass to strategies. They validate themselves."""

from __future__ import annotations

import enum
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex

from replicax._src.vocabulary.errors import InvalidArgumentError


def whole_number(name: str, value: Any, *, least: int, meaning: str = "") -> int:
    """Returns ``value`` as an int.

    Args:
      name: The name of the argument, for the message.
      least: The smallest allowed value.
      meaning: The meaning of special values, for the message.

    Raises:
      InvalidArgumentError: ``value`` is not an integer, or is smaller than ``least``.
    """
    is_whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    if not is_whole or operator.index(value) < least:
        said = f" ({meaning})" if meaning else ""
        raise InvalidArgumentError(f"{name} must be a whole number of at least {least}{said}, got {value!r}.")
    return operator.index(value)


def path_of(given: Any, what: str, example: str) -> str:
    """Returns a user's path as a string.

    Args:
      what: The meaning of the path, for the message.
      example: An example path, for the message.

    Raises:
      InvalidArgumentError: The value is not a path, or is empty, or has a NUL.
    """
    path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "\0" in path:
        no_nul = " without NUL" if isinstance(path, str) and path else ""
        raise InvalidArgumentError(
            f"{what} is a path{no_nul}, such as {example!r}; got {type(given).__name__}: {given!r:.200}."
        )
    return path


class _NamedOption(enum.Enum):
    """An enum that also accepts its names as strings, in any case."""

    @classmethod
    def _missing_(cls, value: object) -> _NamedOption | None:
        if isinstance(value, str):
            return cls.__members__.get(value.upper())
        return None

    @classmethod
    def parse(cls, value: object):
        """Returns the member for ``value``, which is a member or its name.

        Raises:
          InvalidArgumentError: ``value`` is neither.
        """
        try:
            return cls(value)
        except ValueError:
            allowed = ", ".join(cls.__members__)
            raise InvalidArgumentError(
                f"{value!r} is not a valid {cls.__name__}; allowed are {allowed}, or these names as strings."
            ) from None


class ReduceOp(_NamedOption):
    """The operation that combines the values of the replicas: their sum or their mean."""

    SUM = "SUM"
    MEAN = "MEAN"


ReduceName = Literal["SUM", "MEAN", "sum", "mean", "Sum", "Mean"]


def get_loss_reduction() -> ReduceOp:
    """Returns ``ReduceOp.SUM``: optimizers sum the gradients of the replicas.

    Each replica's loss is therefore its share of the mean over the global batch: ``rx.nn.compute_average_loss``.
    TensorFlow returns another value for Estimators only.

    Source: tf.compat.v1.distribute.get_loss_reduction.
    """
    return ReduceOp.SUM


class VariableSynchronization(_NamedOption):
    """The time when the copies of a variable are combined."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(_NamedOption):
    """The rule that combines the values that replicas write to one variable."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


class ShardState(_NamedOption):
    """The state that replicas shard instead of mirroring it: the optimizer's variables (ZeRO 1), or the trainable ones
    too (ZeRO 3).
    """

    OPTIMIZER = "OPTIMIZER"
    ALL = "ALL"


class UnconnectedGradients(_NamedOption):
    """The gradient of a tape for a source that the target does not depend on."""

    NONE = "NONE"
    ZERO = "ZERO"


class CommunicationImplementation(_NamedOption):
    """The library that carries collectives between processes."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class RunOptions:
    """Options of ``Strategy.run``.

    Attributes:
      experimental_enable_dynamic_batch_size: Accepted for compatibility with TensorFlow: per-replica shapes may always
        differ here.
      experimental_bucketizing_dynamic_shape: Accepted for compatibility with TensorFlow. Must be False: a program is
        compiled for each pattern of shapes.
      experimental_xla_options: A mapping of XLA compiler options for the compiler.
      eager: Run the function itself, in the calling thread, with real values: for prints, breakpoints and Python
        ``if``. This is slow. One replica gets the rows of all, and ``num_replicas_in_sync`` is 1 inside, so losses,
        gradients and weights are those of a compiled step. Batch statistics, random numbers and
        ``replica_id_in_sync_group`` (0) are those of one replica. The components of a per-replica value are
        concatenated along axis 0, in replica order, with any numbers of rows. Equal scalars are passed unchanged, and
        of random keys the first replica's is passed; other values raise ``UnsupportedError``. Each array of the result
        is a ``PerReplica`` with one component, that of the global batch.
      donate_args: Donate the arrays of the ``PerReplica`` and ``Mirrored`` values in these positional arguments to the
        program, which then needs no second copy of them. They are deleted afterwards.
      check_same: Raise ``DivergenceError`` for state that was the same on all replicas, differs when the function
        returns it, and is passed to the function again. Otherwise this is a warning, once.
      check_finite: Raise ``NotFiniteError`` if a result, or the new value of a variable, is not finite. The error names
        the first computation that gave a NaN or an infinity, with its line and replica. Raise ``LabelError`` if a
        Keras loss gets a label outside the range of its classes. Variables keep their previous values. Each call waits
        for its results and takes about twice as long; ``donate_args`` has no effect.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Mapping[str, Any] | None = None
    eager: bool = False
    donate_args: tuple[int, ...] = ()
    check_same: bool = False
    check_finite: bool = False

    def __post_init__(self) -> None:
        if self.eager and (self.check_finite or self.check_same):
            name = "check_finite" if self.check_finite else "check_same"
            raise InvalidArgumentError(
                f"RunOptions(eager=True, {name}=True): {name} looks at a compiled program. Leave one of them out; an eager function can "
                "look at its values itself."
            )
        if self.experimental_bucketizing_dynamic_shape:
            raise InvalidArgumentError(
                "RunOptions(experimental_bucketizing_dynamic_shape=True): replicax compiles one program for "
                "each pattern of shapes and does not pad to powers of two. Leave it False."
            )
        options = self.experimental_xla_options
        if options is not None and not isinstance(options, Mapping):
            raise InvalidArgumentError(
                f"RunOptions(experimental_xla_options=…) must be a mapping from the names of XLA compiler "
                f"options to values, got {type(options).__name__}."
            )
        positions = (self.donate_args,) if isinstance(self.donate_args, int) else tuple(self.donate_args)
        if any(isinstance(position, bool) or not isinstance(position, int) for position in positions):
            raise InvalidArgumentError(
                f"RunOptions(donate_args=…) takes positions in args, such as (0,), got {self.donate_args!r}."
            )
        object.__setattr__(self, "donate_args", positions)


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of collectives.

    Attributes:
      bytes_per_pack: Arrays of one dtype are joined into buffers of at most this many bytes before they are reduced;
        larger arrays are reduced separately, and are not cut. 0 lets replicax choose: on CPUs buffers of 4 MiB, and
        between processes arrays of 2 MiB and more separately (in one process, of 256 KiB).
      timeout_seconds: The time that a task may take to reach a program, or an agreement, in which others wait for it;
        then the wait fails. None means 600. A collective that all have reached has no limit.
      implementation: AUTO, RING (gloo, on CPUs) or NCCL (on GPUs). Each kind of hardware has one of them, which AUTO
        selects; asking for the other logs a warning, and changes nothing. In one process XLA chooses, and this option
        has no effect.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = field(default=CommunicationImplementation.AUTO)

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise InvalidArgumentError(f"bytes_per_pack must be at least 0, got {self.bytes_per_pack}.")
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise InvalidArgumentError(f"timeout_seconds must be positive, got {self.timeout_seconds}.")
        object.__setattr__(self, "implementation", CommunicationImplementation.parse(self.implementation))


@dataclass(frozen=True)
class FaultToleranceOptions:
    """Options of training that goes on when workers die, for ``MultiWorkerMirroredStrategy(fault_tolerance=...)``.

    The replacement of a dead worker enters where the program restores: in ``fit`` with a ``CheckpointCallback``, or in
    ``manager.restore_or_initialize()`` of a loop that calls ``manager.save()`` after each step.

    Attributes:
      min_workers: The fewest live workers with which the training goes on, at most the number of tasks. With fewer, all
        live workers raise a ``ClusterFailureError``, and the launcher restarts the job.
    """

    min_workers: int = 1

    def __post_init__(self) -> None:
        least = whole_number("min_workers", self.min_workers, least=1)
        object.__setattr__(self, "min_workers", least)

    @classmethod
    def of(cls, value: FaultToleranceOptions | bool) -> FaultToleranceOptions | None:
        """Returns the options for the value of the argument ``fault_tolerance``; None for False.

        Raises:
          InvalidArgumentError: ``value`` is neither a bool nor such options.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, bool):
            return cls() if value else None
        raise InvalidArgumentError(
            f"fault_tolerance must be True, False or an rx.FaultToleranceOptions, got {value!r}."
        )


def collective_hints(bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:
    """``CommunicationOptions`` under TensorFlow's oldest name for them, ``CollectiveHints``."""
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


@dataclass(frozen=True)
class ValueContext:
    """The information for the function of ``experimental_distribute_values_from_function``.

    Attributes:
      replica_id_in_sync_group: The index of the replica, from 0.
      num_replicas_in_sync: R.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
