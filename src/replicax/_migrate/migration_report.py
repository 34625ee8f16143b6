"""The report of a migration: Markdown, or JSON if the file's name ends with ``.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from replicax._migrate.marks import RULES
from replicax._migrate.packages import packages_of
from replicax._migrate.source_files import File

_INT64: Final = (
    "int64 is int32 in JAX. Numbers that do not fit into arguments and batches are an error; "
    "JAX_ENABLE_X64=1 keeps 64 bits."
)

_MOVING: Final = (
    "An evaluation in strategy.run reads moving statistics of BatchNormalization, which are averaged over the replicas "
    "here. In TensorFlow each replica reads its own, so the numbers of the evaluation differ; training does not."
)


def facts(files: Sequence[File]) -> dict[str, Any]:
    """Returns the report as plain values."""
    return {
        "files": len(files),
        "files_changed": sum(file.new != file.old for file in files),
        "names_changed": sum(len(file.changes) for file in files),
        "notes": _notes(files),
        "packages": packages_of(code for file in files for code in file.codes()),
        "marks": dict(Counter(mark.rule for file in files for mark in file.marks).most_common()),
        "failures": [{"file": str(file.path), "why": file.failure} for file in files if file.failure],
        "to_look_at": [
            {
                "place": file.place(mark.line),
                "rule": mark.rule,
                "what": mark.what,
                "why": RULES.get(mark.rule, ""),
                "write": mark.write,
                "is_new": mark.is_new,
            }
            for file in files
            for mark in file.marks
        ],
        "changes": [
            {"place": file.place(change.line), "old": change.old, "new": change.new}
            for file in files
            for change in file.changes
        ],
    }


def _notes(files: Sequence[File]) -> list[str]:
    """Returns what holds for the whole program, and needs no edit."""
    has_int64 = any("int64" in change.old for file in files for change in file.changes)
    is_marked = any(mark.rule == "int64" for file in files for mark in file.marks)
    return [
        *[_INT64] * (has_int64 and not is_marked),
        *[_MOVING] * any(file.reads_statistics and bool(file.changes) for file in files),
    ]


def write_report(path: Path, files: Sequence[File], install_command: Callable[..., str]) -> None:
    """Writes the report.

    Args:
      install_command: Returns the command that installs packages.
    """
    found = facts(files)
    is_json = path.suffix == ".json"
    text = json.dumps(found, indent=2) + "\n" if is_json else _markdown(found, install_command)
    path.write_text(text, encoding="utf-8")


def _markdown(found: dict[str, Any], install_command: Callable[..., str]) -> str:
    lines = [
        "# What `replicax migrate` did",
        "",
        f"{found['files_changed']} of {found['files']} files changed, {found['names_changed']} names. "
        f"{len(found['to_look_at'])} places to look at, {len(found['failures'])} files left alone.",
    ]
    lines += [line for note in found["notes"] for line in ("", note)]
    if found["packages"]:
        lines += ["", f"The program needs `{install_command(*found['packages'])}` besides replicax."]
    if found["failures"]:
        lines += ["", "## Left alone", ""]
        lines += [f"- `{failure['file']}`: {failure['why']}" for failure in found["failures"]]
    if found["to_look_at"]:
        lines += ["", "## To look at"]
        for rule in found["marks"]:
            entries = [entry for entry in found["to_look_at"] if entry["rule"] == rule]
            lines += ["", f"### {rule}", "", RULES.get(rule, ""), ""]
            lines += [
                f"- `{e['place']}`: {'. '.join(filter(None, (e['what'], e['write'])))}." for e in entries
            ]
    if found["changes"]:
        lines += ["", "## Changed", "", "| where | before | after |", "|---|---|---|"]
        lines += [f"| `{c['place']}` | `{c['old']}` | {_code(c['new'])} |" for c in found["changes"]]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else "(removed)"
