"""What a comparison with one device says: entries, and a table of them for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from replicax._src.drawing.text import aligned
from replicax._src.errors import OneDeviceDifferenceError

Kind = Literal["loss", "gradient", "variable", "output"]


def shown_factor(factor: float) -> str:
    """``2.0 ×``, ``0.3333 ×``."""
    return f"{factor:.1f} ×" if round(factor, 3).is_integer() and factor else f"{factor:.4g} ×"


@dataclass(frozen=True)
class Difference:
    """One value that differs between the replicas of a strategy and one device.

    Attributes:
      kind: "loss" (a scalar that the function returns), "output" (anything else that it returns), "gradient" (as an
        optimizer applies it), or "variable" (after the step).
      name: Of the variable, or where the value stands in what the function returns.
      shape: Of one device's value.
      max_difference: The largest absolute difference of an element; inf where only one of both is nan.
      relative_difference: That, divided by the largest magnitude on one device (of a variable: of its change).
      factor: What one device's value (a variable's change) must be multiplied with to give the strategy's, by least
        squares; None if no one number does it for all elements.
      hint: What the mistake may be.
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
    """How one step under a strategy compares with the same step on one device. ``print`` it.

    Attributes:
      strategy: Its name.
      rows: How many rows of the batch each replica got.
      num_compared: How many losses, outputs, gradients and variables were compared.
      differences: Those that differ by more than rounding.
      not_compared: What could not be compared, and why.
    """

    strategy: str
    rows: tuple[int, ...]
    num_compared: int
    differences: tuple[Difference, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs; also true where nothing was compared, see ``num_compared``."""
        return not self.differences

    def raise_if_different(self) -> None:
        """Raises if anything differs: for tests.

        Raises:
          OneDeviceDifferenceError: With the table. It is an ``AssertionError``.
        """
        if not self.ok:
            raise OneDeviceDifferenceError(str(self))

    def __str__(self) -> str:
        return "\n".join([*self._head(), *self._table(), *self._hints(), *self._not_compared()])

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

    def _not_compared(self) -> list[str]:
        return ["", *(f"Not compared: {text}" for text in self.not_compared)] if self.not_compared else []
