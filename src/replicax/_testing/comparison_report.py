"""The report of a comparison with one device: its entries, and a table of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from replicax._src.drawing.text import aligned
from replicax._src.vocabulary.errors import OneDeviceDifferenceError

Kind = Literal["loss", "gradient", "variable", "output"]


def shown_factor(factor: float) -> str:
    """Formats a factor: ``2.0 ×``, ``0.3333 ×``."""
    return f"{factor:.1f} ×" if round(factor, 3).is_integer() and factor else f"{factor:.4g} ×"


@dataclass(frozen=True)
class Difference:
    """One value that differs between the replicas of a strategy and one device.

    Attributes:
      kind: "loss" (a scalar that the function returns), "output" (anything else that it returns), "gradient" (as an
        optimizer applies it), or "variable" (after the step).
      name: The name of the variable, or the path of the value in the function's result.
      shape: The shape of one device's value.
      max_difference: The largest absolute difference of an element; inf if only one of both is nan.
      relative_difference: ``max_difference`` divided by the largest magnitude on one device (for a variable: of its
        change).
      factor: The strategy's value divided by one device's value (for a variable: of the change), by least squares; None
        if no single number fits all elements.
      hint: The likely mistake.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    max_difference: float
    relative_difference: float
    factor: float | None
    hint: str


@dataclass(frozen=True)
class OneDeviceReport:
    """The comparison of a step under a strategy with the same step on one device. ``print`` it.

    Attributes:
      strategy: The name of the strategy.
      rows: The number of rows of each replica.
      num_compared: The number of losses, outputs, gradients and variables that were compared.
      differences: The values that differ by more than rounding.
      not_compared: The values that could not be compared, with the reasons.
      remarks: Mistakes that are the same on one device: labels outside the range of their classes.
    """

    strategy: str
    rows: tuple[int, ...]
    num_compared: int
    differences: tuple[Difference, ...]
    not_compared: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing differs. It is also True if nothing was compared; see ``num_compared``."""
        return not self.differences

    def raise_if_different(self) -> None:
        """Raises if a value differs. Meant for tests.

        Raises:
          OneDeviceDifferenceError: A value differs. The message has the table. It is an ``AssertionError``.
        """
        if not self.ok:
            raise OneDeviceDifferenceError(str(self))

    def __str__(self) -> str:
        return "\n".join(
            [*self._head(), *self._table(), *self._hints(), *self._not_compared(), *self._remarks()]
        )

    def _head(self) -> list[str]:
        rows = " + ".join(map(str, self.rows))
        step = f"{self.strategy}, {sum(self.rows)} row(s) over {len(self.rows)} replica(s) ({rows}), against one device:"
        if self.ok:
            if not self.num_compared:
                return [
                    step,
                    "nothing was compared: the step returns no array, applies no gradient and assigns no variable.",
                ]
            return [step, f"all {self.num_compared} losses, outputs, gradients and variables agree."]
        return [step, f"{len(self.differences)} of {self.num_compared} values differ.", ""]

    def _table(self) -> list[str]:
        if self.ok:
            return []
        numbers = {hint: f"[{number}]" for number, hint in enumerate(self._distinct_hints(), 1)}
        lines = [("kind", "name", "shape", "difference", "factor", "")]
        for entry in self.differences:
            factor = "-" if entry.factor is None else shown_factor(entry.factor)
            relative = f"{entry.relative_difference:.1e}"
            shape = str(tuple(entry.shape))
            lines.append((entry.kind, entry.name, shape, relative, factor, numbers.get(entry.hint, "")))
        return list(aligned(lines))

    def _hints(self) -> list[str]:
        hints = self._distinct_hints()
        return ["", *(f"[{number}] {hint}" for number, hint in enumerate(hints, 1))] if hints else []

    def _distinct_hints(self) -> list[str]:
        return list(dict.fromkeys(entry.hint for entry in self.differences if entry.hint))

    def _remarks(self) -> list[str]:
        return ["", *(f"Note: {text}" for text in self.remarks)] if self.remarks else []

    def _not_compared(self) -> list[str]:
        return ["", *(f"Not compared: {text}" for text in self.not_compared)] if self.not_compared else []
