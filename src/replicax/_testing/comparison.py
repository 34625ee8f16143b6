"""``Comparison``: pairs the values of two runs, and chooses the tolerance of each pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.strategies.strategy import Strategy
from replicax._src.tracing.key import is_array
from replicax._src.values.distributed import DistributedValues, PerReplica, is_value
from replicax._testing.comparison_report import Difference, Kind, OneDeviceReport
from replicax._testing.hints import Facts, hint_for
from replicax._testing.measure import (
    Measure,
    Tolerance,
    least_squares,
    magnitude,
    measure,
    noise_of,
    rounding_of,
    wide,
)
from replicax._testing.observation import KeyWords, on_host
from replicax._testing.runs import State, StepOutcome


class Comparison:
    """Compares two runs of one step, entry by entry.

    Args:
      sizes: The number of rows of each replica.
      ours, wanted: The strategy's run and one device's run.
      args: The arguments of the step besides the batch.
    """

    def __init__(
        self,
        strategy: Strategy,
        sizes: Sequence[int],
        ours: StepOutcome,
        wanted: StepOutcome,
        args: Sequence[Any],
        tolerance: Tolerance,
    ):
        self._strategy = strategy
        self._ours, self._wanted = ours, wanted
        self._args = args
        self._tolerance = tolerance
        self._facts = Facts(
            tuple(sizes), ours.per_replica_state, ours.has_randomness, reduced_at=ours.reduced_at
        )
        self._differences: list[Difference] = []
        self._not_compared: list[str] = []
        self._num_compared = 0
        self._noise: dict[
            str, np.ndarray
        ] = {}  # relative noise of gradients that agree, by the names of their variables

    def report(self) -> OneDeviceReport:
        """Compares all values, and returns the report."""
        self._compare_gradients()
        self._facts = replace(self._facts, do_gradients_differ=bool(self._differences))
        self._compare_results()
        self._compare_variables()
        self._differences.sort(key=lambda entry: _ORDER.index(entry.kind))
        return OneDeviceReport(
            type(self._strategy).__name__,
            self._facts.rows,
            self._num_compared,
            tuple(self._differences),
            tuple(self._not_compared),
            self._wanted.remarks,
        )

    def _add(self, kind: Kind, name: str, shape: Sequence[int], found: Measure, **told: bool) -> None:
        """Adds an entry. If it differs, ``told`` helps to choose the hint."""
        self._num_compared += 1
        if not found.is_same:
            self._append(kind, name, shape, found, hint_for(self._facts, found, **told))

    def _append(self, kind: Kind, name: str, shape: Sequence[int], found: Measure, hint: str) -> None:
        self._differences.append(
            Difference(
                kind, name, tuple(shape), found.max_difference, found.relative_difference, found.factor, hint
            )
        )

    # --- what the function returns --------------------------------------------------------------------

    def _compare_results(self) -> None:
        ours, our_tree = jax.tree_util.tree_flatten_with_path(self._ours.result, is_leaf=is_value)
        wanted, tree = jax.tree_util.tree_flatten_with_path(self._wanted.result, is_leaf=is_value)
        if our_tree != tree:
            self._not_compared.append(
                f"what the function returns: {our_tree} on replicas, {tree} on one device."
            )
            return
        before = _values_before(self._wanted.result, self._args)
        for number, ((path, mine), (_, other)) in enumerate(zip(ours, wanted, strict=True)):
            self._compare_result(f"result{jax.tree_util.keystr(path)}", mine, other, before.get(number))

    def _compare_result(self, name: str, mine: Any, other: Any, old: np.ndarray | None) -> None:
        if not isinstance(other, _NUMBERS) or not isinstance(mine, (DistributedValues, *_NUMBERS)):
            return  # None, strings, variables: the program's structure
        components = self._components(mine)
        if isinstance(other, KeyWords):
            self._compare_keys(name, components, np.asarray(other))
            return
        other = np.asarray(other)
        is_scalar = other.ndim == 0 and jnp.issubdtype(other.dtype, jnp.inexact)
        kind: Kind = "loss" if is_scalar else "output"
        choices = _as_one(components, other.shape)
        if not choices:
            self._append_shapes(kind, name, components, other)
            return
        base = 0 if old is None else wide(old)
        wanted = wide(other) - base
        allowance = 0.0 if old is None else rounding_of(old, other.dtype) + self._noise_in(name, wanted)
        found = [measure(choice - base, wanted, self._tolerance, allowance) for choice in choices]
        best = min(found, key=lambda m: (not m.is_same, m.relative_difference))
        self._add(
            kind,
            name,
            other.shape,
            best,
            is_local_mean=self._is_mean_by_rows(components, other),
            is_state=old is not None,
        )

    def _components(self, mine: Any) -> list[np.ndarray]:
        """Returns the values of the replicas. A Python number counts as one value on each."""
        if isinstance(mine, PerReplica):
            return list(map(np.asarray, mine.values))
        is_python = isinstance(mine, (bool, int, float, complex)) and not isinstance(mine, np.generic)
        return [np.asarray(mine)] * (len(self._facts.rows) if is_python else 1)

    def _append_shapes(
        self, kind: Kind, name: str, components: Sequence[np.ndarray], other: np.ndarray
    ) -> None:
        self._num_compared += 1
        shapes = [c.shape for c in components]
        hint = f"The shape is {other.shape} on one device; the replicas' shapes {shapes} do not add up to it."
        self._append(kind, name, other.shape, _NOTHING_ALIKE, hint)

    def _compare_keys(self, name: str, components: Sequence[np.ndarray], other: np.ndarray) -> None:
        """Compares random keys for equality only: keys have no sum or mean."""
        is_one_each = all(c.shape == other.shape for c in components)
        if is_one_each and any(not np.array_equal(c, components[0]) for c in components):
            self._not_compared.append(
                f"{name}: each replica returns random keys of its own, and one device has those of one replica."
            )
            return
        choices = _as_one(components, other.shape)[:1]
        if not choices:
            self._append_shapes("output", name, components, other)
            return
        self._num_compared += 1
        found = measure(choices[0], other, Tolerance(0.0, 0.0))
        if not found.is_same:
            hint = "Other random keys: made from another key, or from the number or the index of rows or replicas?"
            self._append("output", name, other.shape, replace(found, factor=None), hint)

    def _is_mean_by_rows(self, components: list[np.ndarray], other: np.ndarray) -> bool:
        """Returns True if one device's value is the mean of the replicas, weighted by their rows."""
        if len(components) != len(self._facts.rows) or any(c.shape != other.shape for c in components):
            return False
        total = sum(self._facts.rows)
        parts = [c * (n / total) for c, n in zip(components, self._facts.rows, strict=True) if n]
        return measure(sum(parts[1:], parts[0]), other, self._tolerance).is_same

    # --- gradients ------------------------------------------------------------------------------------

    def _compare_gradients(self) -> None:
        num_hidden = max(self._ours.num_hidden, self._wanted.num_hidden)
        if num_hidden:
            self._not_compared.append(
                f"{num_hidden} gradient(s), which are applied in a scan, loop or condition; compare the variables instead."
            )
        ours, wanted = self._ours.gradients, self._wanted.gradients
        if [name for name, *_ in ours] != [name for name, *_ in wanted]:
            self._not_compared.append(
                f"gradients: {len(ours)} are applied on replicas and {len(wanted)} on one device, or others."
            )
            return
        factor = least_squares(
            [(mine, other) for (_, mine, _), (_, other, _) in zip(ours, wanted, strict=True)]
        )
        self._facts = replace(self._facts, gradient_factor=factor)
        largest = max((magnitude(value) for _, value, _ in wanted), default=0.0)
        for (name, mine, weighed), (_, other, _) in zip(ours, wanted, strict=True):
            # A gradient that cancels to 0 is only the rounding error of values as large as the other gradients.
            floor = 16 * float(jnp.finfo(other.dtype).eps) * largest if _is_inexact(other) else 0.0
            found = measure(mine, other, self._tolerance, floor)
            is_mean = measure(weighed, other, self._tolerance, floor).is_same
            if found.is_same:
                noise = noise_of(mine, other)
                self._noise[name] = np.maximum(noise, self._noise[name]) if name in self._noise else noise
            self._add("gradient", name, other.shape, found, is_local_mean=is_mean, is_gradient=True)

    # --- variables ------------------------------------------------------------------------------------

    def _compare_variables(self) -> None:
        keys = list(dict.fromkeys([*self._ours.states, *self._wanted.states]))
        for key in keys:
            mine, other = self._ours.states.get(key), self._wanted.states.get(key)
            known = mine or other
            assert known is not None
            if (mine and mine.new is None) or (other and other.new is None):
                self._not_compared.append(
                    f"variable {known.name!r}: it has one component per replica, and aggregation NONE does not define a "
                    f"common value."
                )
                continue
            self._compare_variable(known, _after(mine, known), _after(other, known))

    def _compare_variable(self, known: State, mine: np.ndarray, other: np.ndarray) -> None:
        old = wide(known.old)
        change, wanted = wide(mine) - old, wide(other) - old
        allowance = rounding_of(known.old, known.old.dtype) + rounding_of(other, other.dtype)
        allowance = allowance + self._noise_in(known.name, wanted)
        is_count = not _is_inexact(known.old)
        tolerance = Tolerance(0.0, self._tolerance.atol) if is_count else self._tolerance
        found = measure(change, wanted, tolerance, allowance)
        is_statistic = known.name in self._facts.statistics
        self._add(
            "variable",
            known.name,
            other.shape,
            found,
            is_state=True,
            is_statistic=is_statistic,
            is_count=is_count,
        )

    def _noise_in(self, name: str, change: np.ndarray) -> Any:
        """Returns the uncertainty of the change of a variable or of its optimizer slots that its gradient's noise
        causes.
        """
        for gradient, noise in self._noise.items():
            is_own = name.endswith(gradient) or gradient.replace("/", "_") in name  # as Keras names bindings
            if is_own and noise.shape == change.shape:
                return 2 * noise * magnitude(change)
        return 0.0


_NUMBERS = (np.ndarray, np.generic, bool, int, float, complex)
_ORDER: list[Kind] = ["loss", "gradient", "output", "variable"]
_NOTHING_ALIKE = Measure(False, False, np.inf, np.inf, None)


def _after(state: State | None, known: State) -> np.ndarray:
    return known.old if state is None or state.new is None else state.new


def _is_inexact(array: np.ndarray) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _as_one(components: Sequence[np.ndarray], shape: tuple[int, ...]) -> list[np.ndarray]:
    """Returns the values of ``shape`` that the replicas' values may represent: a common value, sum, mean, or rows."""
    values = [wide(c) for c in components]
    if all(c.shape == shape for c in components):
        total = sum(values[1:], values[0])
        is_equal = all(np.array_equal(v, values[0], equal_nan=True) for v in values)
        return [*([values[0]] if is_equal else []), total, total / len(values)]
    if shape and all(c.ndim == len(shape) and c.shape[1:] == shape[1:] for c in components):
        rows = np.concatenate(values)
        return [rows] if rows.shape == shape else []
    return []


def _values_before(result: Any, args: Sequence[Any]) -> dict[int, np.ndarray]:
    """Returns earlier values by leaf number of ``result``, for the parts of ``result`` that match one of ``args``.

    Such a part is functional state, which enters as an argument and returns as a result.
    """
    parts = list(result) if isinstance(result, (tuple, list)) and type(result) in (tuple, list) else [result]
    before: dict[int, np.ndarray] = {}
    start = 0
    hosted = jax.tree_util.tree_map(
        lambda leaf: on_host(leaf) if is_array(leaf) else leaf, args, is_leaf=is_value
    )
    unused = [jax.tree_util.tree_flatten(arg, is_leaf=is_value) for arg in hosted]
    for part in parts:
        leaves, tree = jax.tree_util.tree_flatten(part, is_leaf=is_value)
        for candidate in unused:
            if candidate[1] == tree and leaves and all(map(_is_same_kind, candidate[0], leaves)):
                before.update((start + i, leaf) for i, leaf in enumerate(candidate[0]))
                unused.remove(candidate)
                break
        start += len(leaves)
    return before


def _is_same_kind(a: Any, b: Any) -> bool:
    arrays = (np.ndarray, np.generic)
    return isinstance(a, arrays) and isinstance(b, arrays) and a.shape == b.shape and a.dtype == b.dtype
