"""The table of cases: the class of a case, and the decorator that adds one for each strategy and parameter."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

STRATEGIES = {
    "D": "the default strategy",
    "S1": "OneDeviceStrategy",
    "S2": "MirroredStrategy, 2 replicas",
    "S3": "MirroredStrategy, 3 replicas",
    "S4": "MirroredStrategy, 4 replicas",
    "C2": "CentralStorageStrategy, 2 compute devices",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program under one strategy.

    ``spec`` has the case numbers of the table in the specification of tf.distribute's behaviour (0: a section of it
    without a number). ``alone``: TensorFlow needs a separate process for it.
    """

    id: str
    spec: tuple[int, ...]
    on: str
    body: Callable[..., Any]
    params: dict[str, Any]
    alone: bool
    rtol: float

    def run(self, side: Any) -> Any:
        return self.body(side, **self.params)


CASES: dict[str, Case] = {}


def case(
    *spec: int, on: str = "S2", alone: bool = False, rtol: float = 1e-6, **params: Iterable[Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers ``body(side, **one of each params)`` under every strategy named in ``on``.

    ``rtol`` is 1e-6 if a value takes a few float32 operations, whose order may differ; loops of several steps give a
    larger one.
    """

    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        topic = body.__module__.rpartition(".")[2]
        for values in itertools.product(*params.values()):
            label = "[" + ",".join(_label(value) for value in values) + "]" if values else ""
            for code in on.split():
                name = f"{topic}.{body.__name__}{label}@{code}"
                if name in CASES or code not in STRATEGIES:
                    raise ValueError(f"case {name}: registered twice, or unknown strategy")
                chosen = dict(zip(params, values, strict=True))
                CASES[name] = Case(name, spec or (0,), code, body, chosen, alone, rtol)
        return body

    return register


def _label(value: Any) -> str:
    return str(value).replace(" ", "").replace(",", ";")
