"""The lines about a job as a whole, from its status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicax._src.status.group_table import group_lines_of
from replicax._src.status.status import (
    fit_metrics_of,
    progress_of,
    staleness_of,
    summary_of,
    survivors_of,
    title_of,
)


def summary_lines(status: Mapping[str, Any]) -> list[str]:
    """Returns the lines about the job, from a status with rates."""
    progress, counts, metrics, survivors, staleness = (
        "  ".join(f"{name} {value}" for name, value in pairs)
        for pairs in (
            *(progress_of(status), summary_of(status), fit_metrics_of(status)),
            *(survivors_of(status), staleness_of(status)),
        )
    )
    lines = ["  ".join(title_of(status)), progress, counts, metrics, survivors]
    return [
        *filter(None, lines),
        *([f"staleness: {staleness}"] if staleness else []),
        *group_lines_of(status),
    ]
