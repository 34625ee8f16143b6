"""Counts with parameter servers on Ray, while an actor is killed and a node is lost. Prints what it counted."""

import logging
import os
import signal
import sys
import time

import jax.numpy as jnp
import ray

import ray_cluster
import replicax as rx

NUM_CLOSURES = 300


def actor(name):
    return ray.get(ray.get_actor(f"count-{name}").__ray_call__.remote(where), timeout=60)


def where(task):
    return os.getpid(), ray.get_runtime_context().get_node_id()


def is_on_another_node(name, node):
    try:
        return actor(name)[1] != node
    except ray.exceptions.RayActorError:  # it is being started again
        return False


def count(coordinator, counter, num_closures, happen=lambda: None, between_s=0.0):
    def add():
        counter.assign_add(1.0)

    for number in range(num_closures):
        coordinator.schedule(add)
        time.sleep(between_s)
        if number == num_closures // 3:
            happen()
    coordinator.join()
    print("COUNTED", float(counter.numpy()), flush=True)


def waited_for(what, is_so, timeout_s=180.0):
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.5)
    print("SEEN", what, flush=True)


def replicated():
    with rx.ray.parameter_servers(workers=2, ps=2, name="count", max_restarts=5) as resolver:
        with rx.ParameterServerStrategy(resolver, replication=2) as strategy:
            coordinator = rx.coordinator.ClusterCoordinator(strategy)
            with strategy.scope():
                counter = rx.Variable(jnp.zeros(()))
            count(coordinator, counter, NUM_CLOSURES)
            told = coordinator.statistics

            before = told()["workers"]["worker 1"]["connections"]
            count(coordinator, counter, NUM_CLOSURES, lambda: os.kill(actor("worker-1")[0], signal.SIGKILL))
            waited_for("worker 1 again", lambda: told()["workers"]["worker 1"]["connections"] > before)

            node = actor("ps-0")[1]
            assert actor("ps-1")[1] != node
            lose = lambda: print(ray_cluster.ask(os.environ["RX_RAY_HOLDER"], "lose", node))  # noqa: E731
            count(coordinator, counter, NUM_CLOSURES, lose)
            # An actor ends only when it misses its node, and counts as a copy until then.
            waited_for(
                "two copies again",
                lambda: is_on_another_node("ps-0", node) and not told()["replication"]["unprotected"],
            )
            os.kill(actor("ps-1")[0], signal.SIGKILL)  # the copy on the new node is all that is left
            count(coordinator, counter, NUM_CLOSURES)
            coordinator.close()


def from_snapshots(folder):
    arguments = ("--snapshot-dir", folder, "--snapshot-interval", "1")
    with rx.ray.parameter_servers(workers=1, ps=1, name="count", server_arguments=arguments) as resolver:
        with rx.ParameterServerStrategy(resolver) as strategy:
            coordinator = rx.coordinator.ClusterCoordinator(strategy)
            with strategy.scope():
                counter = rx.Variable(jnp.zeros(()))
            count(coordinator, counter, NUM_CLOSURES)
            time.sleep(3)  # until a snapshot has all of them
            node = actor("ps-0")[1]
            ray_cluster.ask(os.environ["RX_RAY_HOLDER"], "lose", node)
            # An actor ends only when it misses its node, and answers until then: at full speed it would apply everything.
            count(coordinator, counter, NUM_CLOSURES, between_s=0.02)
            waited_for("ps 0 on another node", lambda: is_on_another_node("ps-0", node))
            coordinator.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    ray.init()
    if sys.argv[1] == "replicated":
        replicated()
    else:
        from_snapshots(sys.argv[2])
