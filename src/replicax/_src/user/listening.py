"""The events of the user's code, which the core reports while it traces and runs it: the protocol ``Diagnostics``.

The folder ``diagnostics`` implements it. The core never imports that folder: the registry names it. Without its row
programs run the same, and errors stay as JAX, Keras and Python raise them. A program that has been traced reports
nothing when it runs, unless ``RunOptions(check_same=True)`` asks for it. A check that the user asks for by an option is
an error without the row: it must not pass unseen.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, Protocol, final

from replicax._src.hooks import HOOKS, hook
from replicax._src.vocabulary.errors import MissingPartError

Place = Literal["run", "function", "step", "eager", "fit", "scope"]
"""Where the user's code runs: in a replica function, in other code that is traced, in a step that ``fit`` traces, in a
replica function that runs as Python, elsewhere in a method of a Keras model of a strategy, or in code that is not
replicax's own, such as the block of a scope.
"""
TRACES: Final = ("run", "function", "step")
"""The places where code is traced."""


class ResultWatch(Protocol):
    """Watches the results of one program of ``strategy.run`` for state that replicas no longer share."""

    def check(self, leaves: Sequence[Any]) -> None:
        """Checks the arguments of a call of the program."""
        ...

    def maker_of(self, index: int, shape: tuple[int, ...]) -> Any:
        """Returns what the result at a position, which differs between replicas, carries as its ``maker``."""
        ...


class Diagnostics(Protocol):
    """The events, in the order in which a program meets them. Listeners raise errors to refuse the user's code."""

    def made_strategy(self) -> None:
        """The program made a strategy."""
        ...

    def called_beside_tensorflow(self, call: str, function: Any = None) -> None:
        """A public call was made in a process that has imported TensorFlow. ``function`` is what it is to trace."""
        ...

    def tracing(self, *functions: Any, is_key: bool = True) -> AbstractContextManager[None]:
        """Context around all traces of some functions, each of which is in ``user_code``.

        Args:
          *functions: The functions.
          is_key: True if a program is selected by what the functions are, with their closures and globals.
        """
        ...

    def user_code(self, place: Place) -> AbstractContextManager[None]:
        """Context around code of the user, which may replace its errors."""
        ...

    def failed_trace(self, error: Exception, replica_id: int, rows: Sequence[int] | None) -> str | None:
        """A replica function failed in a trace, or in the passes over it. Returns a note for the error.

        Args:
          replica_id: The replica for which it was traced.
          rows: The number of rows of each replica, if they are not all equal.
        """
        ...

    def captured(self, jaxpr: Any, replications: Sequence[Any], num_replicas: int) -> None:
        """A replica function was traced.

        Args:
          jaxpr: The trace, with the marks of tapes and optimizers.
          replications: The replications of its invars.
        """
        ...

    def resolved(self, jaxpr: Any, replications: Sequence[Any], num_replicas: int) -> str:
        """The marks of two or more replicas were replaced by derivatives and sums.

        Returns:
          The user's line that reduces a loss over the replicas in a differentiated function; "" if there is none.
        """
        ...

    def lowering(self, jaxpr: Any, topology: Any, name: str) -> None:
        """Cross-replica code is about to be compiled for the devices of a topology.

        Args:
          name: The name of its function.
        """
        ...

    def traced_run(
        self,
        fn: Callable[..., Any],
        name: str,
        program: Any,
        paths: Callable[[], Sequence[str]],
        described: Sequence[Any],
        leaves: Sequence[Any],
        *,
        raises: bool,
        reported: set[Any],
    ) -> ResultWatch:
        """``strategy.run`` has a new program.

        Args:
          fn, name: The function, and its name.
          program: The ``ReplicaProgram``.
          paths, described, leaves: The names of its arguments, their descriptions, and the arguments.
          raises: True if state that replicas no longer share is an error.
          reported: The functions for which a warning of it was logged. The listener adds to them.
        """
        ...

    def watch_finite(
        self, program: Any, name: str, arguments: Sequence[str], rows: Sequence[int] | None, labels: Any
    ) -> tuple[Any, Callable[[Any], None] | None]:
        """The user asked for a check of all values. Returns a program with one more result, and the check of it.

        Args:
          program: The ``ReplicaProgram``.
          name: The name of its function.
          arguments: The names of the arrays that it takes.
          rows: The number of rows of each replica, if they are not all equal.
          labels: The ``LabelWatch`` of its trace.
        """
        ...

    def failed_in_scope(self, error: BaseException) -> Exception | None:
        """The block of a scope failed. Returns the error to raise instead."""
        ...

    def missing_name(self, module: str, name: str) -> Exception:
        """The user asked for a name that a public module lacks. Returns the error to raise."""
        ...

    def missing_attribute(self, owner: Any, name: str, text: str) -> str | None:
        """The user asked for a name that an object of replicax lacks. Returns what to write.

        Args:
          owner: The object, or its class.
          text: The source text for the object, such as ``variable``.
        """
        ...

    def converted(self, what: str) -> Exception | None:
        """Code took a value for each replica as one array. Returns the error to raise, if it knows a better one.

        Args:
          what: What happened, such as "A PerReplica was used".
        """
        ...


@final
class _Silent:
    """The listener if nobody listens. It refuses the checks that an option asks for."""

    def made_strategy(self) -> None:
        pass

    def called_beside_tensorflow(self, call: str, function: Any = None) -> None:
        pass

    def tracing(self, *functions: Any, is_key: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    def user_code(self, place: Place) -> AbstractContextManager[None]:
        return nullcontext()

    def failed_trace(self, error: Exception, replica_id: int, rows: Sequence[int] | None) -> str | None:
        return None

    def captured(self, jaxpr: Any, replications: Sequence[Any], num_replicas: int) -> None:
        pass

    def resolved(self, jaxpr: Any, replications: Sequence[Any], num_replicas: int) -> str:
        return ""

    def lowering(self, jaxpr: Any, topology: Any, name: str) -> None:
        pass

    def traced_run(self, *program: Any, raises: bool, **options: Any) -> ResultWatch:
        if raises:
            raise _missing("check_same")
        return self

    def check(self, leaves: Sequence[Any]) -> None:
        pass

    def maker_of(self, index: int, shape: tuple[int, ...]) -> Any:
        return None

    def watch_finite(self, program: Any, *arguments: Any, **options: Any) -> tuple[Any, None]:
        raise _missing("check_finite")

    def failed_in_scope(self, error: BaseException) -> Exception | None:
        return None

    def missing_name(self, module: str, name: str) -> Exception:
        return AttributeError(
            f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module]
        )

    def missing_attribute(self, owner: Any, name: str, text: str) -> str | None:
        return None

    def converted(self, what: str) -> Exception | None:
        return None


def _missing(option: str) -> MissingPartError:
    return MissingPartError(
        f"RunOptions({option}=True) asks for a check of diagnostics, and the registry, src/replicax/_src/parts.py, has no row "
        "'diagnostics'. Restore the row, or leave the option out."
    )


@functools.cache
def listener() -> Diagnostics:
    """Returns the listener of this process."""
    return hook("diagnostics").LISTENER if "diagnostics" in HOOKS else _Silent()


def check_beside_tensorflow(call: str) -> None:
    """Raises if a public call is made where TensorFlow traces or records. It costs nothing without TensorFlow."""
    if "tensorflow" in sys.modules:
        listener().called_beside_tensorflow(call)
