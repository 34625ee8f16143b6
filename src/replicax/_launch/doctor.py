"""``replicax doctor``: shows the cluster and the role of this process, and reports what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from replicax._launch.answers import (
    Answer,
    AskOnce,
    Outcome,
    answering,
    ask_all,
    ask_channel,
    ask_task,
    stay,
)
from replicax._launch.doctor_test import run_test
from replicax._launch.option_values import seconds
from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.detect import ResolverChoice, choose_resolver
from replicax._src.cluster.environ import CPU_COLLECTIVES, LIMITS_S, check_cpu_collectives, limit_s
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.routes import routed_address
from replicax._src.cluster.spec import Task
from replicax._src.keras.backend import chosen_backend, wrong_backend
from replicax._src.packaging.extras import EXTRAS, install_packages, missing_packages
from replicax._src.packaging.home import install_command
from replicax._src.packaging.version import __version__

_DESCRIPTION: Final = """\
Shows the versions, Keras's backend, the installed extras, the devices, the cluster that this process belongs to and why,
and whether the other tasks answer. Run it on all hosts at the same time, for example with --wait 60: each answers the others
at its own address, and ends a few seconds after all have answered.

--test runs a real all-reduce and one real training step, on all devices of all processes. In a cluster start it in every
process, as you start your program; on this machine: replicax launch --workers 2 -m replicax doctor --test

The exit code is 0 if nothing is wrong, and 1 otherwise. Notes do not change it.
"""
_PACKAGES: Final = ("jax", "jaxlib", "keras", "numpy", "grain", "tensorstore", "pyarrow", "xxhash")
_NOT_ASKED: Final = Answer(Outcome.UNCHECKED, "was not asked")


def add_parser(subparsers: Any) -> None:
    """Adds the command ``doctor``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="check this machine and the cluster: versions, devices, what is wrong",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=None,
        metavar="S",
        help="wait up to S seconds for the other tasks to answer (0); not with --test, which has --test-timeout",
    )
    parser.add_argument("--no-devices", action="store_true", help="do not start JAX to look at the devices")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--test",
        action="store_true",
        help="run an all-reduce and a training step, check the numbers and print times",
    )
    parser.add_argument(
        "--test-timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="give up the test after S seconds (120)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Prints the findings. Returns the exit code."""
    if options.test and options.wait is not None:
        options.parser.error(
            "--wait is for the check of the other tasks' addresses, which --test leaves out because its training step needs all "
            "tasks. Set its time limit with --test-timeout."
        )
    report = _Report(is_json=options.json)
    report.add("versions", _versions())
    report.add("keras", _keras(report))
    report.add("extras", [(extra, _extra_described(extra)) for extra in EXTRAS])
    try:
        choice = choose_resolver(os.environ)
    except ClusterError as error:
        report.wrong.append(str(error))
        return report.end()
    membership = choice.membership
    report.add("cluster", _described(choice))
    _check_environment(membership, os.environ, report.wrong)
    if (
        not options.no_devices and not options.test
    ):  # the test's process needs the devices, which this process would hold
        report.add("devices", _devices(report.wrong))
    if options.test:
        report.add("test", _tested(options.test_timeout, report))
    elif len(_tasks(membership)) > 1:
        report.add("tasks", _addresses(membership, options.wait, os.environ, report.wrong))
    return report.end()


class _Report:
    """Collects the findings as sections of rows. Prints each section at once, or all as one JSON object at the end.

    Attributes:
      wrong: The findings that do not work.
      notes: The findings that may not work, depending on the program.
    """

    def __init__(self, *, is_json: bool):
        self._is_json = is_json
        self._sections: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.notes: list[str] = []

    def add(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        found: dict[str, Any] = {}
        for name, value in rows:
            if name == "not":  # the reason why another resolver was passed over
                found.setdefault(name, []).append(value)
            else:
                found[name] = value
        self._sections[title] = found
        if not self._is_json:
            _section(title, rows)

    def end(self) -> int:
        """Prints the remaining findings. Returns the exit code."""
        if self._is_json:
            found = {**self._sections, "notes": self.notes, "wrong": self.wrong, "ok": not self.wrong}
            print(json.dumps(found, indent=2))
        else:
            for text in self.notes:
                print(f"\nnote: {text}")
            for text in self.wrong:
                print(f"\nwrong: {text}")
            if not self.wrong:
                print("\nnothing is wrong")
        return 1 if self.wrong else 0


def _section(title: str, rows: Sequence[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in rows), default=0)
    print(f"{title}")
    for name, value in rows:
        print(f"  {name:<{width}}  {value}", flush=True)


def _versions() -> list[tuple[str, str]]:
    rows = [
        ("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("replicax", __version__),
    ]
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            rows.append((name, importlib.metadata.version(name)))
    return rows


def _keras(report: _Report) -> list[tuple[str, str]]:
    (package,) = EXTRAS["keras"]
    if not package.is_installed:
        return [("backend", "Keras is not installed; only programs that use Keras need it")]
    backend = chosen_backend(os.environ)
    if not backend.is_jax:
        report.notes.append(str(wrong_backend(backend, "a program with replicax and Keras")))
    return [("backend", f"{backend.name} ({backend.source})")]


def _extra_described(extra: str) -> str:
    missing = missing_packages(extra)
    if missing:
        return f"not installed: {install_packages(missing)}"
    return ", ".join(f"{package.name} {package.version or ''}".rstrip() for package in EXTRAS[extra])


def _tested(timeout_s: float, report: _Report) -> list[tuple[str, str]]:
    rows, wrong = run_test(timeout_s)
    if wrong is not None:
        report.wrong.append(wrong)
    return rows


def _described(choice: ResolverChoice) -> list[tuple[str, str]]:
    membership = choice.membership
    has_sums = "ps" not in membership.spec.jobs and membership.task.type in ("chief", "worker")
    task = "one worker on its own" if not membership.spec else f"{membership.task}{_part_played(membership)}"
    return [
        ("resolver", f"{choice.name} ({type(choice.resolver).__name__})"),
        ("why", choice.reason),
        *(("not", f"{candidate.name}: {candidate.why}") for candidate in choice.passed_over),
        ("this task", task),
        ("workers", str(sum(task.type in ("chief", "worker") for task in _tasks(membership)))),
        *([("sums", _sums_described())] if has_sums and membership.num_workers > 1 else []),
    ]


def _sums_described() -> str:
    """Says how the arrays of workers with CPU devices travel."""
    from replicax._src.collectives.host_sums.shared_memory import why_not_shared  # imports NumPy

    why = why_not_shared()
    if why is None:
        return "on CPUs in memory that the workers of a host share, over connections between hosts"
    return f"on CPUs over connections: this system shares no memory between processes ({why})"


def _part_played(membership: Membership) -> str:
    if membership.is_evaluator:
        return ", which evaluates on its own"
    return ", which is the chief" if membership.is_chief else ""


def _tasks(membership: Membership) -> tuple[Task, ...]:
    """Returns all tasks of the cluster, and this task even if it is not in the spec."""
    order = ("chief", "worker", "ps", "evaluator")
    tasks = sorted(membership.spec.tasks, key=lambda task: order.index(task.type))
    return tuple(tasks) if membership.task in tasks else (*tasks, membership.task)


def _check_environment(membership: Membership, environ: Mapping[str, str], wrong: list[str]) -> None:
    """Adds the faults for which a strategy would refuse the environment to ``wrong``."""
    checks: list[Callable[[], Any]] = [lambda name=name: limit_s(environ, name) for name in LIMITS_S]
    is_worker = membership.task.type in ("chief", "worker")
    if is_worker and membership.num_workers > 1:
        checks.append(lambda: check_cpu_collectives(environ.get(CPU_COLLECTIVES)))
    for check in checks:
        try:
            check()
        except ClusterError as error:
            wrong.append(str(error))


def _devices(wrong: list[str]) -> list[tuple[str, str]]:
    try:
        import jax
    except ImportError as error:
        wrong.append(f"JAX cannot be imported: {error}. Run: {install_command('jax')}")
        return [("jax", "cannot be imported")]
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        wrong.append(f"JAX does not start: {error}")
        return [("jax", "does not start")]
    kinds = {device.device_kind for device in devices}
    return [(devices[0].platform, f"{len(devices)} ({', '.join(sorted(kinds))})")]


def _asking(membership: Membership, credentials: Credentials) -> AskOnce:
    """Returns the function that asks a task of this cluster."""
    if "ps" not in membership.spec.jobs:
        return functools.partial(ask_channel, security=credentials.security())
    return functools.partial(ask_task, credentials=credentials)


def _addresses(
    membership: Membership, wait_s: float | None, environ: Mapping[str, str], wrong: list[str]
) -> list[tuple[str, str]]:
    """Listens at this task's address, and asks the addresses of the other tasks."""
    own = membership.task
    addresses = {task: membership.address_of(task) for task in _tasks(membership)}
    try:
        others = {task: routed_address(to, environ) for task, to in addresses.items() if task != own}
    except ClusterError as error:
        wrong.append(str(error))
        others = {}
    deadline = time.monotonic() + (wait_s or 0)
    try:
        credentials = Credentials.from_environment(environ)
    except ClusterError as error:
        wrong.append(str(error))
        credentials = Credentials()
    ask = _asking(membership, credentials)
    with answering(addresses[own], credentials.security(), ask) as of_own:
        found = ask_all(others, deadline, ask)
        if of_own.outcome is Outcome.ANSWERS:
            stay(found, deadline)
    if of_own.outcome is Outcome.WRONG:
        wrong.append(
            f"this task, {own}, cannot listen at its own address {addresses[own]}: {of_own.text}. The address must belong to "
            "this machine, and the port must be free."
        )
    rows = []
    for task, address in addresses.items():
        answer = found.get(task, _NOT_ASKED)
        text = ", ".join(filter(None, ["this task", of_own.text])) if task == own else answer.text
        rows.append((f"{task}", f"{address:<24} {text}"))
        is_missing = wait_s is not None and answer.outcome is Outcome.SILENT
        if answer.outcome is Outcome.WRONG or is_missing:
            wrong.append(f"{task} at {address} {answer.text}.")
    return rows
