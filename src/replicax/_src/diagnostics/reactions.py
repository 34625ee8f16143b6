"""The listener of the core: which file reacts to which event of ``user/listening.py``.

The files are imported when their event occurs, because the launcher asks for missing names without JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, final

from replicax._src.diagnostics import missing_names
from replicax._src.user.listening import TRACES, Diagnostics, Place, ResultWatch


@final
class _Reactions:
    """See ``Diagnostics``."""

    def made_strategy(self) -> None:
        missing_names.note_uncaught(_note_kept_value)

    def called_beside_tensorflow(self, call: str, function: Any = None) -> None:
        from replicax._src.diagnostics import tensorflow_code

        tensorflow_code.check_not_in_tensorflow(call)
        tensorflow_code.check_no_function_of_tensorflow(call, function)

    def tracing(self, *functions: Any, is_key: bool = True) -> AbstractContextManager[None]:
        from replicax._src.diagnostics import side_effects

        return side_effects.reported(*functions, is_key=is_key)

    @contextlib.contextmanager
    def user_code(self, place: Place) -> Iterator[None]:
        from replicax._src.diagnostics import explanations, side_effects

        with explanations.explained(place):
            if place in TRACES:
                with side_effects.noting_lines():
                    yield
            else:
                yield

    def failed_trace(self, error: Exception, replica_id: int, rows: Sequence[int] | None) -> str | None:
        from replicax._src.diagnostics import explanations

        return explanations.note_on(error, replica_id, rows)

    def captured(self, jaxpr: Any, replications: Sequence[Any], num_replicas: int) -> None:
        from replicax._src.diagnostics import chosen_devices, local_means

        chosen_devices.check_no_mesh_around()
        chosen_devices.check_replica_chooses_none(jaxpr)
        if num_replicas > 1:
            local_means.warn_of_local_means(jaxpr, replications, num_replicas)

    def resolved(self, jaxpr: Any, replications: Sequence[Any], num_replicas: int) -> str:
        from replicax._src.diagnostics import gradient_scale

        return gradient_scale.check_gradient_scale(jaxpr, replications, num_replicas)

    def lowering(self, jaxpr: Any, topology: Any, name: str) -> None:
        from replicax._src.diagnostics import chosen_devices

        chosen_devices.check_same_devices(jaxpr, topology, name)

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
        from replicax._src.diagnostics import drift, undistributed

        watch = drift.DriftWatch(
            fn, name, program, paths, described, leaves, raises=raises, reported=reported
        )
        undistributed.warn_of_whole_batch(name, program, paths(), described, leaves)
        return watch

    def watch_finite(
        self, program: Any, name: str, arguments: Sequence[str], rows: Sequence[int] | None, labels: Any
    ) -> tuple[Any, Callable[[Any], None] | None]:
        from replicax._src.diagnostics import finite

        return finite.watched(program, name, arguments, rows, labels)

    def failed_in_scope(self, error: BaseException) -> Exception | None:
        from replicax._src.diagnostics import explanations

        missing_names.add_note(error)
        return explanations.explanation_of(error, "scope")

    def missing_name(self, module: str, name: str) -> Exception:
        return missing_names.in_module(module, name)

    def missing_attribute(self, owner: Any, name: str, text: str) -> str | None:
        return missing_names.in_object(owner, name, text)

    def converted(self, what: str) -> Exception | None:
        from replicax._src.diagnostics import tensorflow_code

        is_converted = tensorflow_code.is_converted_by_tf_function()
        return tensorflow_code.in_tf_function(what) if is_converted else None


def _note_kept_value(error: BaseException) -> None:
    from replicax._src.diagnostics import side_effects

    side_effects.add_note(error)


LISTENER: Final[Diagnostics] = _Reactions()
