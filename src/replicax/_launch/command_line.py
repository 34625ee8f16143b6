"""The command ``replicax``: its summary, its commands, and what happens to its output at the end."""

from replicax._launch.standard_streams import (
    INTERRUPTED_EXIT_CODE,
    EndingAtInterrupt,
    exit_code_of_output,
    open_closed_streams,
)

with EndingAtInterrupt():
    import argparse
    import re
    import sys
    from collections.abc import Sequence

    from replicax._launch import doctor, export, launch, migrate, plan, run, server, top
    from replicax._launch.option_values import did_you_mean
    from replicax._src.packaging.version import __version__

# Each has ``add_parser(subparsers)``, whose parser has the defaults ``run``, a function from options to the exit code,
# and ``parser``, itself.
COMMANDS = (launch, run, server, top, plan, export, migrate, doctor)

# What launchers of other libraries are called, and a command that is gone.
_OTHERS_NAMES = {
    "start": ". To run a script in several processes: replicax launch --workers 2 train.py; in one: python train.py",
    "mpi-collectives": " any more: workers on CPUs communicate by gloo, also under mpirun, and need no library",
}

# What they call the number of processes.
_OTHERS_COUNTS = (
    "-n",
    "-np",
    "--np",
    "--nproc",
    "--nproc-per-node",
    "--num-processes",
    "--num-workers",
    "--num-tasks",
)

_SUMMARY = f"""\
replicax {__version__}: tf.distribute's programming model for JAX and Keras 3.

  replicax doctor --test                     check this machine: versions, devices, one real training step
  replicax launch --workers 2 train.py       run train.py in two processes on this machine
  replicax run train.py                      run train.py as one task of a cluster, under srun, mpirun or torchrun
  replicax plan train.py --topology v5e:4x4  tell whether train.py fits hardware that is not here, and how fast it can be
  replicax export training --to FILE         write a checkpoint to safetensors, to files of Keras, or for orbax
  replicax migrate train_tf.py               show what a TensorFlow program becomes
  replicax top                               watch the processes of a job
  replicax server                            run a worker or a parameter server

`replicax COMMAND --help` describes a command and its options.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that ``arguments`` name, those of this process by default; returns the exit code: 130 after a
    Ctrl-C that the command does not handle itself, 141 if nobody reads standard output, 1 if its disk is full.
    """
    open_closed_streams()
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except OSError as error:
        code = exit_code_of_output(error)
        if code is None:
            raise
        return code


def _run(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        print(_SUMMARY, end="")
        return 0
    parser = argparse.ArgumentParser(
        prog="replicax",
        description="tf.distribute's programming model for JAX and Keras 3.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"replicax {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="command")
    for command in COMMANDS:
        command.add_parser(subparsers)
    if not given[0].startswith("-") and given[0] not in subparsers.choices:
        hint = _OTHERS_NAMES.get(given[0]) or did_you_mean(given[0], subparsers.choices)
        parser.error(f"there is no command {given[0]!r}{hint}")
    options, unknown = parser.parse_known_args(given)
    if unknown:
        hint = _hint_on_option(unknown[0], options.parser, subparsers.choices["launch"])
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return options.run(options)


def _hint_on_option(unknown: str, parser: argparse.ArgumentParser, launch: argparse.ArgumentParser) -> str:
    """Returns the end of the message about an option that a command does not have."""
    option = unknown.partition("=")[0].replace("_", "-")
    is_run = parser.prog.endswith(" run")
    if (option in _OTHERS_COUNTS and (is_run or parser is launch)) or (option == "--workers" and is_run):
        return ". To run a script in two processes on this machine: replicax launch --workers 2 train.py"
    if is_run and option in _options_of(launch):
        return ". It is an option of replicax launch"
    return did_you_mean(unknown, _options_of(parser))


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    found = re.findall(r"(?<![\w-])--?[a-z][\w-]*", parser.format_help())
    return [option for option in found if option not in ("-h", "--help")]
