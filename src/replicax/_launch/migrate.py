"""``replicax migrate``: rewrites TensorFlow programs for replicax."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from replicax._src.hooks import hook
from replicax._src.packaging.extras import EXTRAS, install_packages, missing_extra, missing_packages
from replicax._src.packaging.home import install_command, page
from replicax._src.vocabulary.errors import MissingPartError

if TYPE_CHECKING:
    from replicax._migrate.source_files import File

_DESCRIPTION: Final = """\
Rewrites programs that use TensorFlow's tf.distribute: scripts, packages (give the directory) and notebooks. Names change by
the table of the page "Migrating from TensorFlow". Comments and layout stay. Functions that run in a tf.data pipeline stay
TensorFlow's. What the command cannot know, it marks with a comment `# replicax migrate: ...` above the line. When you have
looked at one, delete it, or write `# replicax migrate: ok` in its place. Running the command again changes nothing. The last
line says which packages the new program needs besides replicax.
"""
_EPILOG: Final = f"""\
The exit code is 0 if nothing is left to do, 3 if there are marks to look at, 1 if a file was left alone. Needs libcst
({install_packages(EXTRAS["migrate"])}).
"""
_TO_LOOK_AT: Final = 3
_PAGE: Final = page("Migrating from TensorFlow", "migrating_from_tensorflow.md")


def add_parser(subparsers: Any) -> None:
    """Adds the command ``migrate``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "migrate",
        help="rewrite a TensorFlow program for replicax",
        usage="replicax migrate PATH... [--diff | --in-place | --output DIR] [--report FILE]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a Python file, a notebook, or a directory of them",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--diff", action="store_true", help="print what would change, and write nothing (default)"
    )
    how.add_argument("--in-place", action="store_true", help="change the files")
    how.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write all files to DIR, changed or not; the originals stay",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write what changed and what to look at: Markdown, or FILE.json",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Rewrites the files. Returns the exit code."""
    if missing_packages("migrate"):
        print(f"replicax migrate: {missing_extra('replicax migrate', 'migrate')}", file=sys.stderr)
        return 1
    try:
        hook("names_of_tensorflow")  # the table of the part, which says if the part is missing
    except MissingPartError as error:
        print(f"replicax migrate: {error}", file=sys.stderr)
        return 1
    from replicax._migrate.migration_report import write_report
    from replicax._migrate.source_files import find_files, migrate, write

    _check_output(options)
    try:
        files = find_files(options.paths)
        migrate(files)
        if options.in_place:
            write((file.path, file.new) for file in files if file.new != file.old)
        elif options.output is not None:
            write((options.output / _name_in_output(file, options.paths), file.new) for file in files)
        else:
            sys.stdout.writelines(line for file in files for line in file.diff())
            sys.stdout.flush()
        if options.report is not None:
            write_report(options.report, files, install_command)
    except (OSError, ValueError) as error:
        print(f"replicax migrate: {error}", file=sys.stderr)
        return 1
    for line in _summary(files, is_written=options.in_place or options.output is not None):
        print(line, file=sys.stderr)
    if any(file.failure for file in files):
        return 1
    return _TO_LOOK_AT if any(file.marks for file in files) else 0


def _check_output(options: argparse.Namespace) -> None:
    """Refuses an output inside the input, because the next run would read it."""
    if options.output is None:
        return
    for path in options.paths:
        if path.is_dir() and options.output.resolve().is_relative_to(path.resolve()):
            options.parser.error(f"--output {options.output} is inside of {path}: give a directory beside it")
    if options.output.exists() and not options.output.is_dir():
        options.parser.error(f"--output {options.output} is a file: give a directory")


def _name_in_output(file: File, paths: Sequence[Path]) -> Path:
    """Returns the path of a file in the output. Files keep their places; each of several directories gets its own."""
    name = file.path.relative_to(file.root)
    roots = {path for path in paths if path.is_dir()}
    return Path(file.root.resolve().name) / name if file.root in roots and len(paths) > 1 else name


def _summary(files: Sequence[File], *, is_written: bool) -> list[str]:
    from replicax._migrate.migration_report import facts

    found = facts(files)
    lines = [f"{failure['file']}: {failure['why']}" for failure in found["failures"]]
    verb = "changed" if is_written else "would change"
    lines.append(
        f"{found['files_changed']} of {found['files']} files {verb}: {found['names_changed']} names."
    )
    if found["marks"]:
        by_rule = ", ".join(f"{count} {rule}" for rule, count in found["marks"].items())
        num_places = len(found["to_look_at"])
        lines.append(f"{num_places} place{'s' * (num_places != 1)} to look at: {by_rule}. See {_PAGE}.")
    lines += found["notes"]
    if found["packages"]:
        lines.append(f"Besides replicax, the program needs: {install_command(*found['packages'])}")
    return [f"replicax migrate: {line}" for line in lines]
