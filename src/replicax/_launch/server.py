"""``replicax server``: runs a worker or a parameter server until it is told to end."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
from typing import Any, Final, NoReturn

from replicax._launch.option_values import count, positive, seconds
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.spec import ClusterSpec
from replicax._src.cluster.tf_config import TFConfigClusterResolver
from replicax._src.untrusted.strict_json import TextError, read_json
from replicax._src.vocabulary.errors import ReplicaxError

_LONGEST_END_S: Final = 10.0
_DESCRIPTION: Final = """\
Runs a worker or a parameter server of the cluster that TF_CONFIG or the options describe. It needs none of your code: the
coordinator, the program that creates a ParameterServerStrategy, sends it what to compute. It ends at SIGTERM or Ctrl-C, or
when the coordinator says so.
"""
_EPILOG: Final = """\
environment:
  TF_CONFIG               the cluster and which task this is, unless the options say it
  REPLICAX_TOKEN          a secret that all tasks of a cluster share; see the guide to parameter servers for TLS
  REPLICAX_CACHE_DIR      where compiled programs are kept (~/.cache/replicax/programs); "off": nowhere
  PJRT_NPROC              threads to compute with (the cores of the host, shared by the tasks on it)
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command ``server``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "server",
        help="run a worker or a parameter server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--job", choices=("worker", "ps"), help="its type (default: the task in TF_CONFIG)")
    parser.add_argument(
        "--index", type=count, metavar="I", help="its index, from 0 (default: the task in TF_CONFIG)"
    )
    parser.add_argument(
        "--cluster",
        metavar="JSON",
        help='all tasks: {"chief": ["host:port"], "worker": ["host:port", …], "ps": ["host:port", …]} (default: the cluster in TF_CONFIG)',
    )
    parser.add_argument("--devices", type=positive, metavar="N", help="give it N virtual CPU devices")
    parser.add_argument(
        "--on-coordinator-loss",
        choices=("wait", "exit"),
        default="wait",
        help="when the coordinator is gone, wait for the next one or exit (wait)",
    )
    parser.add_argument(
        "--silence-timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="consider the coordinator gone after S seconds without a message (60)",
    )
    parser.add_argument(
        "--wait-timeout",
        type=seconds,
        default=math.inf,
        metavar="S",
        help="exit after S seconds without a coordinator (inf)",
    )
    parser.add_argument(
        "--snapshot-dir",
        metavar="DIR",
        help="where a parameter server saves its values, to restore them when it is restarted",
    )
    parser.add_argument(
        "--snapshot-interval",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds between two saves (60)",
    )
    parser.add_argument(
        "--log-bytes",
        type=positive,
        default=256 << 20,
        metavar="BYTES",
        help="with --replication 2, memory for updates that the other server lacks (256 MB)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Runs the task. Returns the exit code if it could not be started, and ends this process otherwise."""
    parser: argparse.ArgumentParser = options.parser
    try:
        cluster, job, index = _which(options)
    except ClusterError as error:
        parser.error(str(error))
    if job is None or index is None or not cluster:
        parser.error("which task? Set TF_CONFIG, or give --cluster, --job and --index")
    from replicax._ps.task.server_def import ServerDef, ServerOptions
    from replicax._ps.task.task import Server
    from replicax._src.devices.jax_backend import set_local_devices
    from replicax._src.devices.task_process import prepare_process

    try:
        definition = ServerDef(cluster, job, index)
        how = ServerOptions(
            on_coordinator_loss=options.on_coordinator_loss,
            silence_timeout_s=options.silence_timeout,
            wait_timeout_s=options.wait_timeout,
            snapshot_dir=options.snapshot_dir,
            snapshot_interval_s=options.snapshot_interval,
            log_bytes=options.log_bytes,
        )
        if options.devices is not None:
            set_local_devices(options.devices)
        prepare_process(definition.cluster, definition.task)
        server = Server(definition, config=how)
    except ReplicaxError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGINT, _interrupt)
    print(f"{definition.task} listens at {definition.address}", flush=True)
    try:
        server.join()
    except KeyboardInterrupt:
        _end(130)
    except SystemExit:  # SIGTERM, or no coordinator is there: an orderly end
        pass
    _end(0)


def _which(options: argparse.Namespace) -> tuple[ClusterSpec, str | None, int | None]:
    """Returns the cluster and the task, from the options and otherwise from TF_CONFIG."""
    resolver = TFConfigClusterResolver(options.job, options.index)
    if options.cluster is None:
        return resolver.cluster_spec(), resolver.task_type, resolver.task_id
    try:
        described = read_json(options.cluster)
    except TextError as error:
        raise ClusterError(f"--cluster {options.cluster!r} is not JSON: {error}.") from None
    return ClusterSpec(described, source="--cluster"), resolver.task_type, resolver.task_id


def _interrupt(number: int, frame: object) -> NoReturn:
    """Handles Ctrl-C: ends the server, or this process if the server does not end."""
    del number, frame
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    last = threading.Timer(_LONGEST_END_S, os._exit, (130,))
    last.daemon = True
    last.start()
    raise KeyboardInterrupt


def _end(code: int) -> NoReturn:
    """Ends this process at once. An ordinary exit would wait for the threads of a running program."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
