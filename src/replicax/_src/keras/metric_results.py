"""Finds the values returned by a model's step that are results of metrics. Later steps change these."""

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
    """Collects the results of metrics, as (metric, result), until the block ends."""
    results: list[tuple[Any, Any]] = []
    with overridden(_local, results=results):
        yield results


def noted(metric: Any, result: Any) -> Any:
    """Records a result and returns it."""
    if _local.results is not None:
        _local.results.append((metric, result))
    return result


def metrics_of(logs: Mapping[str, Any], results: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Returns the metric of each log that is the result of a metric."""
    by_id = {id(result): metric for metric, result in results}
    return {name: by_id[id(value)] for name, value in logs.items() if id(value) in by_id}
