"""Guesses the mistake behind a difference from its factor."""

from __future__ import annotations

from dataclasses import dataclass

from replicax._testing.measure import Measure

_ADVICE = "Divide by the global batch size: rx.nn.compute_average_loss(per_example_loss)."


@dataclass(frozen=True)
class Facts:
    """The facts that hints are based on.

    Attributes:
      rows: The number of rows of each replica.
      statistics: The names of variables that each replica computed from its own rows (moving statistics).
      has_randomness: True if the step draws random numbers.
      do_gradients_differ: True if some applied gradients differ.
      gradient_factor: The factor of all gradients together, by least squares.
      reduced_at: The line that reduces a loss over replicas in a differentiated function; "" if there is none.
    """

    rows: tuple[int, ...]
    statistics: tuple[str, ...] = ()
    has_randomness: bool = False
    do_gradients_differ: bool = False
    gradient_factor: float | None = None
    reduced_at: str = ""

    @property
    def num_replicas(self) -> int:
        return len(self.rows)

    @property
    def is_uneven(self) -> bool:
        return min(self.rows) != max(self.rows)


def hint_for(
    facts: Facts,
    found: Measure,
    *,
    is_local_mean: bool = False,
    is_gradient: bool = False,
    is_state: bool = False,
    is_statistic: bool = False,
    is_count: bool = False,
) -> str:
    """Returns the likely mistake in words.

    Args:
      is_local_mean: True if the mean of the replicas' values, weighted by rows, is one device's value.
      is_gradient: True for a gradient as an optimizer applies it.
      is_state: True for the change of a variable or of functional state.
      is_statistic: True for one of ``facts.statistics``.
      is_count: True for an integer.
    """
    if found.has_new_nan:
        return _nan(facts)
    if is_local_mean and facts.is_uneven:
        return (
            f"Each replica took the mean over its own rows {facts.rows}, whose numbers differ. The replicas' means neither "
            f"add up nor average to the mean of the batch. {_ADVICE}"
        )
    known = _count(facts, found.factor) if is_count else _known_factor(facts, found.factor, is_state)
    if known:
        return known
    if is_state and facts.do_gradients_differ and not is_statistic:
        return "Follows from the gradients above."
    design = _by_design(facts)
    if design:
        return design + (_roughly(facts) if is_gradient else "")
    if found.factor is not None:
        return f"{found.factor:.4g} × one device's value, in all elements: a constant factor in the loss or the reduction?"
    if facts.is_uneven:
        return (
            f"No common factor, and the batch is uneven {facts.rows}: a mean over each replica's own rows somewhere? "
            f"{_ADVICE} Try a batch whose rows {facts.num_replicas} divides, too."
        )
    return (
        "No common factor: the function computes something else from a replica's rows than from all rows (a norm, a "
        "maximum, a mean inside a nonlinear function). Combine it with rx.get_replica_context().all_reduce."
    )


def _nan(facts: Facts) -> str:
    empty = [r for r, rows in enumerate(facts.rows) if rows == 0]
    if not empty:
        return "nan or inf where one device has a number."
    return (
        f"nan where one device has a number: {sum(facts.rows)} row(s) over {facts.num_replicas} replicas leave replicas "
        f"{empty} without rows, and the mean of nothing is nan. {_ADVICE}"
    )


def _is_near(value: float | None, wanted: float, width: float = 1e-3) -> bool:
    return value is not None and abs(value - wanted) <= width * abs(wanted)


def _known_factor(facts: Facts, factor: float | None, is_state: bool) -> str:
    num = facts.num_replicas
    if num == 1 or factor is None:
        return ""
    if _is_near(factor, num) and facts.reduced_at:
        return (
            f"{num:.1f} ×: the loss is reduced over replicas at {facts.reduced_at}, inside the differentiated function, and its "
            f"gradients are summed again? Differentiate the replica's own share of the loss and reduce the loss outside, or take "
            f"the mean of the gradients."
        )
    if _is_near(factor, num):
        return f"{num:.1f} ×: a mean loss summed over {num} replicas? {_ADVICE}"
    if _is_near(factor, 1 / num):
        return (
            f"{1 / num:.3g} ×, which is 1/{num}: divided by {num} twice? Gradients are summed over replicas, and a loss "
            f"over the global batch size must not be averaged again: use ReduceOp.SUM where MEAN is, and no division by "
            f"num_replicas_in_sync."
        )
    if is_state and (_is_near(factor, num**2) or _is_near(factor, num**-2)):
        return f"{factor:.4g} ×, the square of {num} or of 1/{num}: a second moment of gradients that are that wrong."
    for size in sorted(set(facts.rows) - {0}):
        if _is_near(factor, sum(facts.rows) / size):
            return (
                f"{factor:.4g} ×, which is {sum(facts.rows)}/{size}: divided by the {size} rows of one replica instead "
                f"of the {sum(facts.rows)} of the batch? {_ADVICE}"
            )
    return ""


def _count(facts: Facts, factor: float | None) -> str:
    if facts.num_replicas > 1 and _is_near(factor, facts.num_replicas):
        return (
            f"{facts.num_replicas:.1f} ×: counted once on each replica? Count in cross-replica code, or make the variable "
            f"with aggregation=ONLY_FIRST_REPLICA."
        )
    return ""


def _by_design(facts: Facts) -> str:
    parts = []
    if facts.statistics:
        names = ", ".join(facts.statistics[:3]) + (", …" if len(facts.statistics) > 3 else "")
        parts.append(
            f"Batch normalisation (or another layer with moving statistics: {names}) uses the statistics of each "
            f"replica's own rows"
        )
    if facts.has_randomness:
        parts.append("Random numbers (dropout, noise) are drawn on each replica for its own rows")
    if not parts:
        return ""
    return (
        "; ".join(parts)
        + ": per replica by design, in TensorFlow too, so this difference need not be a mistake. To check "
        "the rest, run the layers without them (training=False)."
    )


def _roughly(facts: Facts) -> str:
    """Returns a hint from all gradients together if statistics blur the single ones. Random numbers blur them too
    much.
    """
    num = facts.num_replicas
    if facts.has_randomness or num == 1:
        return ""
    for wanted, what in (
        (num, f"a mean loss summed over {num} replicas"),
        (1 / num, f"divided by {num} twice"),
    ):
        if _is_near(facts.gradient_factor, wanted, 0.15):
            return f" But all gradients together are about {wanted:.3g} × as large: {what}, besides?"
    return ""
