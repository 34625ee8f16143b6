"""Which of the values that a model's step returns are results of metrics: after other steps these have changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from replicax._src.keras.overriding import overridden


class _Local(threading.local):
    results: list[tuple[Any, Any]] | None = None


_local = _Local()


@contextlib.contextmanager
def noting() -> Iterator[list[tuple[Any, Any]]]:
    """Inside, the results of metrics are noted: (metric, result)."""
    results: list[tuple[Any, Any]] = []
    with overridden(_local, results=results):
        yield results


def noted(metric: Any, result: Any) -> Any:
    """Notes a result, and returns it."""
    if _local.results is not None:
        _local.results.append((metric, result))
    return result


def metrics_of(logs: Mapping[str, Any], results: list[tuple[Any, Any]]) -> dict[str, Any]:
    """For each of the logs that is the result of a metric, the metric."""
    by_id = {id(result): metric for metric, result in results}
    return {name: by_id[id(value)] for name, value in logs.items() if id(value) in by_id}
