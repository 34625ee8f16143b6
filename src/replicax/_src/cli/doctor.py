"""``replicax doctor``: what this process would be in which cluster, why, and what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from replicax._src.cli.answers import (
    Answer,
    AskOnce,
    Outcome,
    answering,
    ask_all,
    ask_channel,
    ask_task,
    stay,
)
from replicax._src.cli.arguments import seconds
from replicax._src.cluster.detect import ResolverChoice, choose_resolver
from replicax._src.cluster.environ import LIMITS_S, limit_s
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.mpi import CHOICE as COLLECTIVES
from replicax._src.cluster.mpi import check_mpi
from replicax._src.cluster.routes import routed_address
from replicax._src.cluster.spec import Task
from replicax._src.ps.credentials import Credentials

_DESCRIPTION: Final = """\
Says which cluster this process would be part of and why, which task it would be, what it has, and whether the other
tasks' addresses answer. Run it on all hosts at the same time, with --wait 60 say: each answers the others, at its own
address, and ends some seconds after all have answered. The exit code is 1 if something is wrong.
"""
_PACKAGES: Final = ("replicax", "jax", "jaxlib", "keras", "numpy", "grain", "orbax-checkpoint", "pyarrow")
_NOT_ASKED: Final = Answer(Outcome.UNCHECKED, "was not asked")


def add_parser(subparsers: Any) -> None:
    """Adds the command ``doctor``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="say which cluster this is, and what is wrong with it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=None,
        metavar="S",
        help="how long the other tasks may take to answer, in seconds (0); it takes as long where some addresses are not "
        "known, so that others may still come",
    )
    parser.add_argument("--no-devices", action="store_true", help="do not start JAX to look at the devices")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Prints what it finds; returns the exit code."""
    wrong: list[str] = []
    _section("versions", _versions())
    try:
        choice = choose_resolver(os.environ)
    except ClusterError as error:
        print(f"\nwrong: {error}")
        return 1
    membership = choice.membership
    _section("cluster", _described(choice))
    _check_environment(membership, os.environ, wrong)
    if not options.no_devices:
        _section("devices", _devices(wrong))
    if len(_tasks(membership)) > 1:
        _section("tasks", _addresses(membership, options.wait, os.environ, wrong))
    for text in wrong:
        print(f"\nwrong: {text}")
    if not wrong:
        print("\nnothing is wrong")
    return 1 if wrong else 0


def _section(title: str, rows: Sequence[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in rows), default=0)
    print(f"{title}")
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def _versions() -> list[tuple[str, str]]:
    rows = [("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")]
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            rows.append((name, importlib.metadata.version(name)))
    return rows


def _described(choice: ResolverChoice) -> list[tuple[str, str]]:
    membership = choice.membership
    task = "one worker on its own" if not membership.spec else f"{membership.task}{_part_played(membership)}"
    return [
        ("resolver", f"{choice.name} ({type(choice.resolver).__name__})"),
        ("why", choice.reason),
        *(("not", f"{candidate.name}: {candidate.why}") for candidate in choice.passed_over),
        ("this task", task),
        ("workers", str(sum(task.type in ("chief", "worker") for task in _tasks(membership)))),
    ]


def _part_played(membership: Membership) -> str:
    if membership.is_evaluator:
        return ", which evaluates on its own"
    return ", which is the chief" if membership.is_chief else ""


def _tasks(membership: Membership) -> tuple[Task, ...]:
    """All tasks of the cluster, whatever they are for; this one, if it is not in the spec."""
    spec = membership.spec
    jobs = [job for job in ("chief", "worker", "ps", "evaluator") if job in spec.jobs]
    tasks = tuple(Task(job, index) for job in jobs for index in spec.task_indices(job))
    return tasks if membership.task in tasks else (*tasks, membership.task)


def _check_environment(membership: Membership, environ: Mapping[str, str], wrong: list[str]) -> None:
    """What a strategy would refuse."""
    checks: list[Callable[[], Any]] = [lambda name=name: limit_s(environ, name) for name in LIMITS_S]
    is_worker = membership.task.type in ("chief", "worker")
    if is_worker and membership.num_workers > 1 and environ.get(COLLECTIVES) == "mpi":
        checks.append(lambda: check_mpi(environ, membership.num_workers))
    for check in checks:
        try:
            check()
        except ClusterError as error:
            wrong.append(str(error))


def _devices(wrong: list[str]) -> list[tuple[str, str]]:
    import jax

    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        wrong.append(f"JAX does not start: {error}")
        return [("jax", "does not start")]
    kinds = {device.device_kind for device in devices}
    return [(devices[0].platform, f"{len(devices)} ({', '.join(sorted(kinds))})")]


def _asking(membership: Membership, environ: Mapping[str, str], wrong: list[str]) -> AskOnce:
    """How the tasks of the cluster are asked."""
    if "ps" not in membership.spec.jobs:
        return ask_channel
    try:
        return functools.partial(ask_task, credentials=Credentials.of_environment(environ))
    except ClusterError as error:
        wrong.append(str(error))
        return ask_channel


def _addresses(
    membership: Membership, wait_s: float | None, environ: Mapping[str, str], wrong: list[str]
) -> list[tuple[str, str]]:
    """Listens at this task's address, and asks those of the others."""
    own = membership.task
    addresses = {task: membership.address_of(task) for task in _tasks(membership)}
    try:
        others = {task: routed_address(to, environ) for task, to in addresses.items() if task != own}
    except ClusterError as error:
        wrong.append(str(error))
        others = {}
    deadline = time.monotonic() + (wait_s or 0)
    ask = _asking(membership, environ, wrong)
    with answering(addresses[own], ask) as of_own:
        found = ask_all(others, deadline, ask)
        if of_own.outcome is Outcome.ANSWERS:
            stay(found, deadline)
    if of_own.outcome is Outcome.WRONG:
        wrong.append(
            f"this task, {own}, cannot listen at its own address {addresses[own]}: {of_own.text}. The address must be of "
            "this machine, and the port free."
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
