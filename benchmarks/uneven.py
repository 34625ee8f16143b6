"""Compares an uneven step with an even one of the padded size: 33 rows on 2 replicas with 34."""

from __future__ import annotations

from collections.abc import Callable

import models
import replicax as rx
import rounds

SIZES = (64, 256, 256, 10)


def main(num_rounds: int) -> None:
    """Prints µs per step."""
    strategy = rx.MirroredStrategy()
    for uneven_rows, even_rows in ((127, 128), (33, 34), (1, 2)):
        contestants: dict[str, Callable[[int], None]] = {
            f"even, {even_rows} rows": models.through_run(strategy, SIZES, even_rows),
            f"uneven, {uneven_rows} rows": models.through_run(strategy, SIZES, uneven_rows),
        }
        timings = rounds.compare(contestants, rounds=num_rounds)
        rounds.report(f"Uneven step, {uneven_rows} rows on 2 replicas", timings, f"even, {even_rows} rows")
