"""Runs a program as the workers of a cluster, each on a node that Ray chooses, with TF_CONFIG set for each.

``python examples/cluster/on_ray.py --workers 2 -- examples/digits.py --strategy auto``, in a Ray job or on a
machine where Ray runs. The script must exist on every node, under that path.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def main() -> None:
    options = parse_options()
    import ray

    ray.init()
    print(f"{options.workers} workers on {len(ray.nodes())} node(s)", flush=True)
    codes = run_on_ray(options.workers, options.cpus_per_worker, options.gpus_per_worker, options.command)
    for index, code in enumerate(codes):
        print(f"worker {index} ended with exit code {code}")
    sys.exit(next((code for code in codes if code), 0))


def run_on_ray(num_workers: int, num_cpus: float, num_gpus: float, command: Sequence[str]) -> list[int]:
    """Runs ``python command...`` as every worker; returns their exit codes."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs: dict[str, float] = {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})
    places = placement_group([needs] * num_workers, strategy="SPREAD")  # all at once, or none
    ray.get(places.ready())
    tasks: list[Any] = [
        ray.remote(Task)
        .options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=index),
        )
        .remote()
        for index in range(num_workers)
    ]
    try:
        addresses = ray.get([task.address.remote(None) for task in tasks])
        runs = [
            task.run.remote(command, tf_config)
            for task, tf_config in zip(tasks, tf_configs(addresses), strict=True)
        ]
        return ray.get(runs)
    finally:
        remove_placement_group(places)


class Task:
    """One worker. Ray makes it an actor, which stays on one node."""

    def __init__(self) -> None:
        self._reserved: socket.socket | None = None

    def address(self, host: str | None) -> str:
        """``host:port`` of this worker, with a free port; of this node if no host is given."""
        if host is None:
            import ray

            host = ray.util.get_node_ip_address()
        self._reserved = socket.socket()
        self._reserved.bind((host, 0))
        return f"{host}:{self._reserved.getsockname()[1]}"

    def run(self, command: Sequence[str], tf_config: str) -> int:
        """Runs the program in a separate process: JAX must not have started in it. Returns its exit code."""
        if self._reserved is not None:
            self._reserved.close()  # from now on the port is the program's
        environment = {**os.environ, "TF_CONFIG": tf_config}
        return subprocess.run([sys.executable, *command], env=environment, check=False).returncode


def tf_configs(addresses: Sequence[str]) -> list[str]:
    """TF_CONFIG of each worker."""
    cluster = {"worker": list(addresses)}
    return [
        json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        for index in range(len(addresses))
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs a Python program as several workers on a Ray cluster.")
    parser.add_argument("--workers", type=int, default=2, help="default: 2")
    parser.add_argument("--cpus-per-worker", type=float, default=1, help="default: 1")
    parser.add_argument("--gpus-per-worker", type=float, default=0, help="default: 0")
    parser.add_argument(
        "command", nargs="+", metavar="script", help="the script, and its arguments, after --"
    )
    options = parser.parse_args()
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    return options


if __name__ == "__main__":
    main()
