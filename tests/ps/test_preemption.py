"""A coordinator that gets SIGTERM: its scheduled functions complete, are saved, and count once."""

import os
import signal
import time

import pytest

import replicax as rx
from in_memory_servers import in_memory_strategy
from replicax.coordinator import ClusterCoordinator

pytestmark = pytest.mark.timeout(120)
PATIENCE_S = 60


def test_scheduled_functions_are_part_of_the_checkpoint(tmp_path):
    def run_of_the_job(told_at):
        with in_memory_strategy(workers=2, ps=1) as strategy, ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                count = rx.Variable(0.0)
            add = rx.function(lambda: count.assign_add(1.0))
            handler = rx.experimental.PreemptionCheckpointHandler(
                strategy.cluster_resolver, rx.Checkpoint(count=count), tmp_path
            )
            watcher = rx.experimental.PreemptionWatcher()  # it hears after the handler, which was there first

            def schedule():
                for _ in range(10):
                    coordinator.schedule(add)

            with handler, watcher:
                assert float(count.numpy()) == 10 * handler.total_run_calls
                for step in range(handler.total_run_calls, 8):
                    if step == told_at:
                        os.kill(os.getpid(), signal.SIGTERM)
                        deadline = time.monotonic() + PATIENCE_S
                        while watcher.preemption_message is None:
                            assert time.monotonic() < deadline
                            time.sleep(0.001)
                    handler.run(schedule)
                coordinator.join()
                return float(count.numpy())

    for told_at in (3, 5):
        with pytest.raises(SystemExit):
            run_of_the_job(told_at)
    assert run_of_the_job(None) == 80
