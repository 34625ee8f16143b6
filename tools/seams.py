"""Measures the seams of the house: what a reader feels who goes from file to file. ``make seams`` prints the table.

``--limits`` fails if a row is worse than its ceiling in ``tools/seams.toml``, and names the ceilings that can come down;
``--lower`` writes these. ``--goals`` fails while a row has not reached its goal. ``--json`` prints the rows for programs,
``--circles`` the files of each circle, ``--why ROW`` what a row counted. ``--no-walks`` leaves out the rows that run
programs; nothing but the standard library is needed then. The modules in ``tools/house`` count, and say what they catch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from house import foreign, names, parts, signatures, switches, walks
from house.source import (
    AT_RUN_TIME,
    EVERY_KIND,
    House,
    circles_of_files,
    circles_of_rooms,
    rooms_that_import_each_other,
)

ROOT: Final = Path(__file__).resolve().parents[1]
LIMITS: Final = ROOT / "tools" / "seams.toml"
GLOSSARY: Final = ROOT / "docs" / "reference" / "glossary.md"
ARCHITECTURE: Final = ROOT / "docs" / "architecture.md"
TYPED_FOLDERS: Final = ("strategies", "variables")
# Rows that a walk measures begin with one of these.
OF_WALKS: Final = (
    "folders that a fit",
    "files that a fit",
    "times that",
    "files entered by",
    "attributes of Keras",
    "containers of hooks",
    "import hooks",
)


@final
@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
      name: The quantity.
      count: How much of it there is.
      what: What was counted, for those who want to know why.
    """

    name: str
    count: int
    what: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Limit:
    """What a row may come to.

    Attributes:
      ceiling: More than this fails.
      goal: Where the row is going; None if it is only kept from growing.
      is_slack: The ceiling leaves room on purpose, so it needs not follow the count down.
    """

    ceiling: int
    goal: int | None = None
    is_slack: bool = False


def limits(path: Path = LIMITS) -> dict[str, Limit]:
    table = tomllib.loads(path.read_text())
    return {
        name: Limit(row["ceiling"], row.get("goal"), row.get("slack", False)) for name, row in table.items()
    }


def rows(house: House, *, with_walks: bool) -> list[Row]:
    """All rows, measured now."""
    measured = walks.measured(house) if with_walks else {}
    return [
        *rows_of_source(house),
        *rows_of_pages(),
        *(Row(name, count, what) for name, (count, what) in measured.items()),
    ]


def counted(name: str, found: Iterable[object] | Sized) -> Row:
    """The row for a collection of what was found."""
    members = tuple(sorted(map(str, found)))  # type: ignore[arg-type]
    return Row(name, len(members), members)


def rows_of_source(house: House) -> list[Row]:
    core = [module for module in house.private if parts.part_of(house, module) == parts.CORE]
    unsaid = [each for each in house.unsaid if not parts.is_part(parts.part_of(house, each.module))]
    typed = signatures.modules_in(house, *TYPED_FOLDERS)
    every, at_run_time = circles_of_files(house, EVERY_KIND), circles_of_files(house, AT_RUN_TIME)
    rooms = circles_of_rooms(house)
    lists = names.lists_of_public_names(house)
    longest = max(house.private, key=house.code_lines, default="")
    return [
        Row("largest circle of files, every kind of import", *largest(every)),
        Row("largest circle of files, at run time", *largest(at_run_time)),
        counted("folders that import each other", rooms_that_import_each_other(house)),
        Row("largest circle of folders", *largest(rooms)),
        *(
            counted(f"imports of {part} by the core", parts.imports_of_part(house, part))
            for part in parts.PARTS
        ),
        counted("parts without a file", parts.without_files(house)),
        counted("public modules that name a part themselves", parts.mentions_by_public_modules(house)),
        counted("imports of a part by another", parts.imports_between_parts(house)),
        *(
            counted(f"names of the core taken by {part}", parts.taken_names(house, part))
            for part in parts.PARTS
        ),
        *(
            counted(f"modules of the core imported by {part}", parts.imported_modules(house, part))
            for part in parts.PARTS
        ),
        *(
            counted(f"modules of the core behind {part}", parts.modules_behind(house, part))
            for part in parts.PARTS
        ),
        *(
            counted(f"members of these names used by {part}", parts.members_of_taken_names(house, part))
            for part in parts.PARTS
        ),
        Row("code lines of the registry", parts.registry_lines(house)),
        counted("statements of the registry that are no table", parts.registry_code(house)),
        counted("modules of the core in the registry", parts.core_in_registry(house)),
        counted("imports by the core whose module the source does not say", unsaid),
        counted("private modules named in data files", house.names_in_data()),
        counted("uses of planning and standing_in outside their files", switches.uses_of_switches(house)),
        counted("ambient values that other files reach", switches.ambient_values(house)),
        counted("attributes of other modules that are assigned", names.assignments_to_modules(house)),
        Row(
            "files that read the frames of their callers",
            foreign.num_users(house, "_getframe", "f_back", "f_locals"),
        ),
        counted("loose files in _src", names.loose_files(house)),
        counted("file names used twice or more", names.repeated_file_names(house)),
        counted("concepts in file names used twice or more", names.repeated_concepts(house)),
        counted("class names used twice or more", names.repeated_class_names(house)),
        Row("files in the largest folder of the core", names.largest_room(house, core)),
        Row(
            "code lines of the longest file",
            house.code_lines(longest) if longest else 0,
            (longest,),
        ),
        Row(f"Any in signatures of {' and '.join(TYPED_FOLDERS)}", signatures.num_any(house, typed)),
        Row(
            f"other empty types in signatures of {' and '.join(TYPED_FOLDERS)}",
            signatures.num_empty(house, typed),
        ),
        Row("Any in signatures of the core", signatures.num_any(house, core)),
        Row("other empty types in signatures of the core", signatures.num_empty(house, core)),
        Row(
            "lists of public names written by hand",
            round(sum(lists.values())),
            tuple(map(str, lists.items())),
        ),
        counted("uses of a lock of another object", names.uses_of_foreign_locks(house)),
        Row("files that count references", foreign.num_users(house, "getrefcount")),
        Row("copies of code objects with other globals", foreign.num_code_copies(house, other_globals=True)),
        Row("copies of code objects with other cells", foreign.num_code_copies(house, other_globals=False)),
        Row("lowering rules of JAX overridden for the whole process", foreign.num_lowering_overrides(house)),
        Row("names from jax._src without their issue", foreign.num_private_names_of_jax(house)),
        Row(
            "names from jax._src of which no issue exists",
            foreign.num_private_names_of_jax(house, with_reason=True),
        ),
    ]


def rows_of_pages() -> list[Row]:
    return [
        Row("words of our own in the glossary", foreign.num_own_words(GLOSSARY)),
        Row("lines of docs/architecture.md", len(ARCHITECTURE.read_text().splitlines())),
        Row("rows of the layer test", len(set(walks.layers().values()))),
    ]


def largest(circles: list[list[str]]) -> tuple[int, tuple[str, ...]]:
    return (len(circles[0]), tuple(circles[0])) if circles else (0, ())


def information(house: House) -> list[Row]:
    """Sizes: no goals, because lines are none."""
    sizes: dict[str, int] = {}
    for module in house.files:
        part = parts.part_of(house, module)
        sizes[part] = sizes.get(part, 0) + house.code_lines(module)
    return [
        Row("files", len(house.files)),
        Row("code lines", sum(sizes.values())),
        *(Row(f"  of {part}", size) for part, size in sorted(sizes.items(), key=lambda item: -item[1])),
    ]


def failures(measured: list[Row], most: dict[str, Limit], *, with_walks: bool) -> list[str]:
    """What a change made worse. A row that nobody measures any more, or that has no ceiling, is worse too."""
    by_name = {row.name: row for row in measured}
    found = [
        f"{name}: {by_name[name].count}, and the ceiling is {limit.ceiling}"
        for name, limit in most.items()
        if name in by_name and by_name[name].count > limit.ceiling
    ]
    found += [
        f"{name}: a row of tools/seams.toml that is not measured"
        for name in most
        if name not in by_name and (with_walks or not name.startswith(OF_WALKS))
    ]
    return found + [
        f"{name}: a row without a ceiling in tools/seams.toml" for name in by_name if name not in most
    ]


def lowered(measured: list[Row], most: dict[str, Limit]) -> dict[str, Limit]:
    """The limits with the ceilings as low as the counts are now."""
    counts = {row.name: row.count for row in measured}
    return {
        name: Limit(counts[name], limit.goal)
        if not limit.is_slack and counts.get(name, limit.ceiling) < limit.ceiling
        else limit
        for name, limit in most.items()
    }


def written(most: dict[str, Limit], header: str) -> str:
    """The text of ``tools/seams.toml``."""
    lines = []
    for name, limit in most.items():
        fields = [f"ceiling = {limit.ceiling}"]
        fields += [f"goal = {limit.goal}"] if limit.goal is not None else []
        fields += ["slack = true"] if limit.is_slack else []
        lines.append(f"{json.dumps(name)} = {{ {', '.join(fields)} }}")
    return header + "\n".join(lines) + "\n"


def header_of(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("#") or not line.strip())


def show(measured: list[Row], most: dict[str, Limit], write: Callable[[str], object] = print) -> None:
    width = max(len(row.name) for row in measured)
    write(f"| {'what a reader feels':{width}} |    now | ceiling | goal |")
    write(f"|{'-' * (width + 2)}|-------:|--------:|-----:|")
    for row in measured:
        limit = most.get(row.name)
        ceiling = "" if limit is None else limit.ceiling
        goal = "" if limit is None or limit.goal is None else limit.goal
        write(f"| {row.name:{width}} | {row.count:6} | {ceiling:7} | {goal:4} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what a reader feels who goes from file to file.")
    parser.add_argument(
        "--limits", action="store_true", help="fail if a row is over its ceiling in tools/seams.toml"
    )
    parser.add_argument("--goals", action="store_true", help="fail if a row has not reached its goal")
    parser.add_argument("--lower", action="store_true", help="write the ceilings that can come down")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--circles", action="store_true", help="print the files of each circle")
    parser.add_argument("--why", metavar="ROW", help="print what the rows with this in their names counted")
    parser.add_argument("--no-walks", action="store_true", help="leave out the rows that run programs")
    arguments = parser.parse_args()
    house = House(ROOT / "src")
    if arguments.circles:
        for kinds in (EVERY_KIND, AT_RUN_TIME):
            for circle in circles_of_files(house, kinds):
                print(f"{len(circle)} files ({', '.join(sorted(kinds))})", *circle, sep="\n  ")
        return
    measured, most = rows(house, with_walks=not arguments.no_walks), limits()
    if arguments.why:
        for row in measured:
            if arguments.why in row.name:
                print(f"{row.name}: {row.count}", *row.what, sep="\n  ")
    elif arguments.json:
        print(json.dumps({row.name.strip(): row.count for row in [*measured, *information(house)]}, indent=1))
    elif arguments.lower:
        LIMITS.write_text(written(lowered(measured, most), header_of(LIMITS.read_text())))
    elif arguments.goals:
        missed = [
            row
            for row in measured
            if (limit := most.get(row.name)) and limit.goal is not None and row.count > limit.goal
        ]
        show(missed or measured, most)
        sys.exit(bool(missed))
    elif arguments.limits:
        sys.exit(check(measured, most, with_walks=not arguments.no_walks))
    else:
        show([*measured, *information(house)], most)


def check(measured: list[Row], most: dict[str, Limit], *, with_walks: bool) -> int:
    """Prints the rows that are over their ceilings, and the ceilings that can come down. Returns the exit status."""
    low = lowered(measured, most)
    for name, limit in most.items():
        if low[name] != limit:
            print(f"seams: {name}: the ceiling can come down from {limit.ceiling} to {low[name].ceiling}")
    if low != most:
        print("seams: python tools/seams.py --lower writes them")
    goals = [(row.count, most[row.name].goal) for row in measured if row.name in most]
    num_goals = sum(goal is not None for _, goal in goals)
    num_reached = sum(goal is not None and count <= goal for count, goal in goals)
    worse = failures(measured, most, with_walks=with_walks)
    for each in worse:
        print(f"seams: {each}", file=sys.stderr)
    if worse:
        print("seams: python tools/seams.py --why ROW prints what a row counted", file=sys.stderr)
    print(
        f"seams: {len(worse)} of {len(measured)} rows are worse; {num_reached} of {num_goals} goals are reached"
    )
    return bool(worse)


if __name__ == "__main__":
    main()
