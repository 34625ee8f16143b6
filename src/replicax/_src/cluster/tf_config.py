"""``TFConfigClusterResolver``: the cluster that the environment variable TF_CONFIG describes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, final

from replicax._src.cluster.errors import ClusterEnvironmentError, ClusterError
from replicax._src.cluster.resolver import (
    EnvironmentResolver,
    argument_or_environment,
    is_one_task,
    master_of,
)
from replicax._src.cluster.spec import ClusterSpec, Task
from replicax._src.untrusted.strict_json import TextError, read_json

VARIABLE = "TF_CONFIG"

_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def read_tf_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the content of TF_CONFIG; an empty dict if it is not set or blank.

    Raises:
      ClusterEnvironmentError: It is not JSON, is not an object, or has a key twice.
    """
    text = environ.get(VARIABLE, "")
    if not text.strip():
        return {}
    try:
        config = read_json(text, object_pairs_hook=_without_repeats)
    except TextError as error:
        raise ClusterEnvironmentError(_not_json(text, error)) from None
    if not isinstance(config, dict):
        raise ClusterEnvironmentError(
            f'TF_CONFIG must be a JSON object with "cluster" and "task", got {_part(config)}. Write {_EXAMPLE}.'
        )
    return config


@final
class TFConfigClusterResolver(EnvironmentResolver):
    """The cluster of TF_CONFIG. Every access reads the variable.

    TF_CONFIG is ``{"cluster": {job: [addresses]}, "task": {"type": job, "index": number}}``. All processes have the
    same cluster, and each has its own task. If TF_CONFIG is missing or ``{}``, this process is a single worker.

    Args:
      task_type: Replaces the task's type in TF_CONFIG.
      task_id: Replaces the task's index, which may be a string of digits.
      rpc_layer: Replaces ``"rpc_layer"``.
      environment: The value of ``environment``.
      environ: Replaces ``os.environ``.

    The methods and properties raise a ClusterEnvironmentError if TF_CONFIG is malformed.

    >>> config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    >>> resolver = TFConfigClusterResolver(environ={"TF_CONFIG": config})
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 1, 'b:1')
    """

    rpc_layer = argument_or_environment(
        "rpc_layer", lambda resolver: read_tf_config(resolver._environ).get("rpc_layer"), str
    )

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(task_type, task_id, environment, environ)
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster of TF_CONFIG, which is empty if it has none."""
        return ClusterSpec(_object(read_tf_config(self._environ), "cluster"), source=VARIABLE)

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns TF_CONFIG's ``"session_master"`` if it has one; otherwise a task's address, or empty for a single
        task.
        """
        session_master = read_tf_config(self._environ).get("session_master")
        if session_master is not None:
            return session_master
        return "" if is_one_task(self.cluster_spec()) else master_of(self, task_type, task_id, rpc_layer)

    def _read_task_type(self) -> str | None:
        return _of_task(self._environ, "type", _is_name, str, "the name of a job")

    def _read_task_id(self) -> int | None:
        return _of_task(self._environ, "index", _is_index, int, "a whole number from 0")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object of TF_CONFIG, and refuses repeated keys, of which JSON would keep only the last."""
    counts = Counter(key for key, _ in pairs)
    for key, count in counts.items():
        if count > 1:
            values = ", ".join(f'"{key}": {_part(value)}' for other, value in pairs if other == key)
            raise ClusterEnvironmentError(
                f'"{key}" occurs {count} times in one object of TF_CONFIG: {values}. Write it once, with all tasks of a job '
                f"in one list."
            )
    return dict(pairs)


def says_this_process_is(task: Task) -> bool:
    """Returns True if ``TF_CONFIG`` is there, and says that this process is that task."""
    try:
        resolver = TFConfigClusterResolver()
        return (resolver.task_type, resolver.task_id) == (task.type, task.index)
    except ClusterError:
        return False


def _object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ClusterEnvironmentError(
            f'"{key}" in TF_CONFIG must be a JSON object, got {_part(value)}. Write {_EXAMPLE}.'
        )
    return value or {}


def _of_task(
    environ: Mapping[str, str],
    key: str,
    is_right: Callable[[Any], bool],
    kind: Callable[[Any], Any],
    must_be: str,
) -> Any:
    """Returns a property of this process's task in TF_CONFIG; None if it is missing."""
    task = _object(read_tf_config(environ), "task")
    value = task.get(key)
    if value is not None and not is_right(value):
        raise ClusterEnvironmentError(
            f'"{key}" of "task" in TF_CONFIG must be {must_be}, got {_part(value)} in {_part(task)}. Write {_EXAMPLE}, '
            "and number the tasks of each job from 0, in the order of their addresses."
        )
    return None if value is None else kind(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _is_index(value: Any) -> bool:
    if isinstance(value, str):
        return value.isascii() and value.strip().isdecimal()
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _part(value: Any) -> str:
    """Returns a part of TF_CONFIG as JSON, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _not_json(text: str, error_of_text: TextError) -> str:
    error = error_of_text.__cause__
    if not isinstance(error, json.JSONDecodeError):
        return f"TF_CONFIG cannot be read: {error_of_text}. Write {_EXAMPLE}."
    start, end = max(0, error.pos - 30), error.pos + 30
    here = f"{'…' if start else ''}{text[start : error.pos]}⟨here⟩{text[error.pos : end]}{'…' if end < len(text) else ''}"
    hint = "JSON has double quotes: set it to json.dumps(config), not to str(config)" if "'" in text else ""
    return (
        f"TF_CONFIG is not JSON: {error.msg} at line {error.lineno}, column {error.colno}: {here} . "
        f"{hint or 'Let json.dumps(config) write it'}, and quote it in a shell: TF_CONFIG='{_EXAMPLE}'."
    )
