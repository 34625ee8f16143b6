"""Makes per-worker datasets and values: each iterator of a dataset becomes one resource on each worker."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Literal, final

import jax
import numpy as np

from replicax._ps.coordinator.job_loop import JobLoop
from replicax._ps.coordinator.per_worker import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
)
from replicax._ps.coordinator.worker_resource import Resource
from replicax._ps.programs.iterator_inputs import ElementSpec
from replicax._ps.transport import structures
from replicax._ps.worker import resources
from replicax._src.program_kit.captures import name_of
from replicax._src.program_kit.data import python_function_of
from replicax._src.program_kit.errors import ClosureInputError, WaitTimeoutError

_SPEC_S = 600.0

_resource_numbers = itertools.count()  # shared by all coordinators, so that names are unique


def per_worker_dataset(loop: JobLoop, dataset_fn: Any) -> PerWorkerDataset:
    """Has each worker make a dataset of its own; see ``ClusterCoordinator.create_per_worker_dataset``."""
    # A graph of TensorFlow cannot contain a distributed dataset of replicax.
    dataset_fn = python_function_of(dataset_fn)
    recipe = _Recipe(loop, "dataset", resources.dump(dataset_fn), name_of(dataset_fn))
    dataset = PerWorkerDataset(recipe.spec, lambda: _iterator(recipe))
    weakref.finalize(dataset, recipe.drop_unused).atexit = False
    return dataset


def per_worker_values(loop: JobLoop, fn: Callable[[], Any]) -> PerWorkerValues:
    """Has each worker make a value of its own; see ``ClusterCoordinator.create_per_worker_value``."""
    recipe = _Recipe(loop, "value", resources.dump(fn), name_of(fn))
    values = PerWorkerValues(recipe.unused[0], recipe.spec)
    weakref.finalize(values, recipe.drop_unused).atexit = False
    return values


@final
class _Recipe:
    """Makes a resource on each worker, one for each iterator.

    Attributes:
      unused: The names of resources that have no iterator yet.
    """

    def __init__(self, loop: JobLoop, kind: Literal["dataset", "value"], pickle: np.ndarray, function: str):
        self._loop, self._pickle, self._function = loop, pickle, function
        self._kind: Literal["dataset", "value"] = kind
        self._known: ElementSpec | None = None
        self._last: str | None = None  # None once its iterator was dropped
        self.unused: list[str] = [self._make()]

    def take(self) -> str:
        """Returns the name of a resource that has no iterator yet."""
        try:
            return self.unused.pop()
        except IndexError:
            return self._make()

    def spec(self) -> ElementSpec:
        """Returns the element spec. Waits for the first worker that has made a resource."""
        if self._known is None:
            said = self._said()
            leaves = tuple(
                jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in said["leaves"]
            )
            tree = jax.tree.structure(structures.rebuilt(said["tree"], leaves))
            self._known = ElementSpec(tree, leaves, said.get("cut"))
        return self._known

    def _said(self) -> Any:
        """Returns what a worker says of the last resource; another one if that was dropped meanwhile."""
        while True:
            name = self._last
            if name is None:
                self.unused.append(name := self._make())
            try:
                return self._waited(name)
            except ClosureInputError:
                if self._last == name:
                    raise

    def _waited(self, name: str) -> Any:
        try:
            return self._loop.spec(name, _SPEC_S)
        except WaitTimeoutError:
            workers = self._loop.statistics()["workers"].values()
            num_connected = sum(each["connected"] for each in workers)
            raise WaitTimeoutError(
                f"No worker has made {self._kind} {name!r} within {_SPEC_S:g} s; {num_connected} workers are "
                "connected. Look at their logs, and at coordinator.statistics()."
            ) from None

    def drop(self, name: str) -> None:
        """Lets workers release a resource. Garbage collection calls it, so it takes no lock."""
        if name == self._last:
            self._last = None
        self._loop.drop(name)

    def drop_unused(self) -> None:
        """Lets workers release all resources that have no iterator."""
        for name in self.unused:
            self._loop.drop(name)

    def _make(self) -> str:
        name = f"{self._kind} {next(_resource_numbers)}"
        self._loop.add(Resource(name, self._kind, self._pickle, self._function))
        self._last = name
        return name


def _iterator(recipe: _Recipe) -> PerWorkerIterator:
    name = recipe.take()
    iterator = PerWorkerIterator(name, recipe.spec)
    weakref.finalize(iterator, recipe.drop, name).atexit = False
    return iterator
