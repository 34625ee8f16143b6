"""``InProcessRunner``: runs functions for workers in this process, on the servers' variables."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

import jax

from replicax._ps.strategy.remote_closures import PreparedClosure
from replicax._ps.strategy.strategy_form import StrategyForm
from replicax._ps.worker.runner import ClosureCall, Runner
from replicax._src.program_kit.errors import DeviceError, UnknownProgramError
from replicax._src.program_kit.own_process import export_platform


@final
class InProcessRunner:
    """Runs functions one at a time, as a worker does. Threads may share it.

    Args:
      form: The form of the strategy.
    """

    def __init__(self, form: StrategyForm):
        self._form, self._session = form, form.session
        self._runner = Runner(form.session.servers, pulls_ahead=False)
        self._num_calls = 0
        self._running = threading.RLock()

    def run(self, prepare: Callable[[], PreparedClosure]) -> Any:
        """Runs the call that ``prepare`` returns, and returns its result.

        Raises:
          DeviceError: This process has fewer devices than the function uses.
          ContextError: The function uses an input of workers that this process does not have.
        """
        with self._running:
            return self._run(prepare())

    def _run(self, prepared: PreparedClosure) -> Any:
        traced, session = prepared.traced, self._session
        _check_devices(traced.name, traced.first.num_replicas)
        number, self._num_calls = self._num_calls, self._num_calls + 1
        programs = traced.programs_for([export_platform()])
        call = ClosureCall(
            (session.client, number),
            number,
            (session.epoch, number),
            programs,
            prepared.arguments,
            [self._form.own_value(prepared.name, source.resource) for source in prepared.sources],
        )
        try:
            result = self._runner.run(call)
        except UnknownProgramError:  # it never ran here, or was dropped since
            for digest in programs.values():
                self._runner.add_program(traced.program(digest))
            for name, array in traced.constants.items():
                self._runner.add_constant(name, array)
            result = self._runner.run(call)
        if traced.first.updates:
            session.renew()
        return prepared.assemble([jax.numpy.asarray(array) for array in result.results])


def _check_devices(name: str, num_replicas: int) -> None:
    have = jax.local_device_count()
    if have < num_replicas:
        raise DeviceError(
            f"{name} was called outside of a scheduled function, so it runs in this process, like on a "
            f"worker on {num_replicas} devices (devices_per_worker), but there are {have} here. Give it "
            "to ClusterCoordinator.schedule; to try it here call "
            f"rx.config.set_local_devices({num_replicas}) at the start of the program."
        )
