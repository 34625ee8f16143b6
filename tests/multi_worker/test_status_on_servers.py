"""The status of real servers, in separate processes."""

import json
import time
import urllib.request

import numpy as np
import pytest

import replicax as rx
from replicax.testing import server_cluster

LIMIT_S = 60.0


@pytest.mark.long
@pytest.mark.timeout(250)
def test_activity_of_real_tasks_is_shown():
    with (
        server_cluster(workers=2, ps=1) as cluster,
        rx.ParameterServerStrategy() as strategy,
        rx.coordinator.ClusterCoordinator(strategy, status_address="127.0.0.1:0") as coordinator,
    ):
        with strategy.scope():
            table = rx.Variable(np.zeros(1000, np.float32))

        def step():
            table.assign_add(0.5 * table.value[::-1] + 1.0)  # a server alone cannot: its rows change places

        def told():
            with urllib.request.urlopen(f"{coordinator.status_url}status.json", timeout=10) as answer:
                status = json.load(answer)
            return status, {task["task"]: task for task in status["tasks"]}

        def work_until(is_so):
            until = time.monotonic() + LIMIT_S
            while not is_so(*told()):
                assert time.monotonic() < until, told()
                for _ in range(20):
                    coordinator.schedule(step)
                coordinator.join(LIMIT_S)

        def is_all_known(status, tasks):
            rates = [tasks["ps 0"]["updates_per_s"], tasks["ps 0"]["received_bytes_per_s"]]
            rates += [tasks[f"worker {n}"]["sent_bytes_per_s"] for n in range(2)]
            return all(rate and rate > 0 for rate in rates) and status["closures"]["finished_per_s"] > 0

        work_until(is_all_known)
        status, tasks = told()
        assert status["staleness"]["num"] > 0
        assert tasks["ps 0"]["held_bytes"] == 4000
        # An update carries 4 kB of operands from a worker to the parameter server.
        assert tasks["ps 0"]["received_bytes"] >= 4000 * tasks["ps 0"]["updates"]
        sent = sum(tasks[f"worker {n}"]["sent_bytes"] for n in range(2))
        assert sent >= 3000 * tasks["ps 0"]["updates"]  # told by heartbeats, which are not of one moment
        pids = {name: task["pid"] for name, task in tasks.items()}
        assert len(set(pids.values())) == 4
        assert all(task["resident_bytes"] > 20 << 20 for task in tasks.values())
        cluster.tasks["worker", 1].kill()
        cluster.restart("worker", 1)
        work_until(lambda status, tasks: tasks["worker 1"]["restarts"] == 1 and tasks["worker 1"]["pid"])
        assert told()[1]["worker 1"]["pid"] not in pids.values()
