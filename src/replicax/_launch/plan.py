"""``replicax plan``: estimates the first step of a script on other hardware."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from replicax._launch.option_values import positive, seconds
from replicax._launch.standard_streams import INTERRUPTED_EXIT_CODE
from replicax._src.cluster.processes import Process, ProcessTimeoutError
from replicax._src.cluster.progress import VARIABLE as PROGRESS_VARIABLE
from replicax._src.cluster.progress import working
from replicax._src.devices.hardware import GPU_VARIABLE, QUIET_TPU, Hardware, check_extra, hardware_of
from replicax._src.vocabulary.errors import MissingExtraError, ReplicaxError

_DESCRIPTION: Final = """\
Runs a script until its first step (strategy.run, an rx.function, or Keras's fit), compiles that step for the hardware that
you name instead of running it, and reports whether it fits into memory, what the devices exchange, and a lower bound on the
step time. The script runs unchanged, on the devices of this machine. Each replica gets as many rows as it gets here, or its
share of --global-batch. Keras variables of 1 MB and more are not allocated, so the model may be larger than this machine's
memory.
"""
_EPILOG: Final = """\
The script's own output goes to stderr. The exit code is 0 if the step fits, 3 if it does not, 1 if there is no plan,
130 after Ctrl-C.
"""
_NOT_FITTING: Final = 3
_INTERRUPTED: Final = "interrupted"


def add_parser(subparsers: Any) -> None:
    """Adds the command ``plan``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="estimate memory and step time on TPUs or GPUs that are not here",
        usage="replicax plan (script.py | -m module) --topology NAME [options] [arguments of the script]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.set_defaults(limit=600.0, remedy_limit=120.0)
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="run a module, as python -m"
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        help="the Python file and its arguments; write -- before arguments that have the same names as options of replicax plan",
    )
    parser.set_defaults(run=run, parser=parser)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that may stand before or after the script."""
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="v5p:16x16x16 (a TPU slice), h100:16x8 (hosts and GPUs of each), cpu:8 (virtual devices of this machine)",
    )
    parser.add_argument(
        "--global-batch", type=positive, metavar="ROWS", help="rows in the batch of all replicas together"
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="write a picture of how the variables lie over the devices"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--limit", type=seconds, metavar="S", help="stop after S seconds (600)")
    parser.add_argument(
        "--remedy-limit",
        type=seconds,
        metavar="S",
        help="if the step does not fit, spend at most S seconds on compiling changes that would make it fit (120)",
    )


def _with_options_behind(options: argparse.Namespace) -> argparse.Namespace:
    """Returns the options, including those after the script. All other arguments, and everything after --, belong to
    the script.
    """
    if options.module == []:
        options.parser.error("-m needs the name of a module")
    said = options.module or options.script
    said = said[1:] if said[:1] == ["--"] else said
    if not said:
        options.parser.error("say which script: replicax plan script.py --topology v5p:16x16x16")
    script, *given = said
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.error = options.parser.error
    _add_options(parser)
    options, of_script = parser.parse_known_args(given[:end], options)
    options.script, options.arguments = script, [*of_script, *given[end + 1 :]]
    if options.topology is None:
        options.parser.error("say which hardware: --topology v5p:16x16x16, h100:16x8 or cpu:8, say")
    return options


def run(options: argparse.Namespace) -> int:
    """Prints the plan. Returns the exit code."""
    options = _with_options_behind(options)
    try:
        hardware = hardware_of(options.topology)
        check_extra(hardware)  # before the script takes minutes to come to its first program
    except MissingExtraError as error:
        print(f"replicax plan: {error}", file=sys.stderr)
        return 1
    except ReplicaxError as error:
        options.parser.error(str(error))
    if options.module is None and not Path(options.script).is_file():
        as_module = ": a package is run with -m and its name" if Path(options.script).is_dir() else ""
        options.parser.error(f"there is no file {options.script}{as_module}")
    if options.svg is not None:
        _check_picture(Path(options.svg), options.parser)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "plan"
        asked = {
            "topology": hardware.name,
            "global_batch": options.global_batch,
            "remedy_limit_s": options.remedy_limit,
            "result": str(result),
            "is_module": options.module is not None,
        }
        run_script = "from replicax._launch.planned_script import run; run()"
        command = [sys.executable, "-c", run_script, json.dumps(asked), options.script, *options.arguments]
        unfinished = _run_child(
            command,
            _environment(os.environ, hardware),
            options.limit,
            f"{options.script} for {hardware.name}",
        )
        if unfinished:
            of_what = "remedies were" if result.exists() else "it was"
            print(f"replicax plan: {of_what} {unfinished}.", file=sys.stderr)
        is_interrupted = unfinished == _INTERRUPTED
        if not result.exists():
            return INTERRUPTED_EXIT_CODE if is_interrupted else 1
        found = json.loads(result.read_text(encoding="utf-8"))
    print(json.dumps(found["facts"], indent=2) if options.json else found["text"], flush=True)
    if options.svg is not None:
        try:
            Path(options.svg).write_text(found["svg"], encoding="utf-8")
        except OSError as error:
            print(f"replicax plan: the picture could not be written: {error}", file=sys.stderr)
            return 1
    if is_interrupted:
        return INTERRUPTED_EXIT_CODE
    return 0 if found["facts"]["fits"] else _NOT_FITTING


def _check_picture(path: Path, parser: argparse.ArgumentParser) -> None:
    """Checks the path of the picture early, because the picture is written after minutes of planning."""
    if path.is_dir():
        parser.error(f"--svg {path} is a folder: give the name of a file, {path / 'plan.svg'} say")
    if not path.parent.is_dir():
        parser.error(f"--svg {path}: there is no folder {path.parent}. Make it, or give another name")


def _environment(environ: Mapping[str, str], hardware: Hardware) -> dict[str, str]:
    """Returns the environment of the process that plans. JAX starts on the CPU, with the compilers for TPUs and GPUs
    beside it. The command reports the progress.
    """
    new = dict(environ) | QUIET_TPU | {"JAX_PLATFORMS": "cpu", PROGRESS_VARIABLE: "0"}
    new.setdefault("KERAS_BACKEND", "jax")
    if hardware.chip.kind == "gpu":
        new[GPU_VARIABLE] = "1"
    return new


def _run_child(command: list[str], environ: Mapping[str, str], limit_s: float, what: str) -> str:
    """Runs the script until it is planned. Returns the reason if it was stopped, otherwise an empty string."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit ends the child too
    try:
        with Process(command, environment=environ, name="the script", on_line=_say) as child:
            with working(f"planning {what}", None):
                child.wait(limit_s)
        return ""
    except ProcessTimeoutError:
        return f"not finished after {limit_s:g} s (--limit)"
    except KeyboardInterrupt:
        return _INTERRUPTED


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
