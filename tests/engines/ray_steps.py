"""A training in steps that saves every five, for Ray Train and for one process: prints the bits of the weights.

The faults of a run come from its configuration: {"kill": 7, "lose": 12, "drain": 17, "raise": 3} are the steps before
which worker 1 is killed, loses its node, has its node taken away, or raises, in the first, second, … start.
"""

import json
import os
import pathlib
import signal
import sys
import time
import zlib

NUM_STEPS, BATCH_SIZE = 24, 32


def train(config):
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    rng = np.random.default_rng(0)
    features = rng.standard_normal((BATCH_SIZE * NUM_STEPS, 8)).astype(np.float32)
    labels = features @ rng.standard_normal(8).astype(np.float32)
    dataset = rx.data.from_arrays((features, labels)).batch(BATCH_SIZE)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        weights = rx.Variable(jnp.zeros(8))
    checkpoint = rx.Checkpoint(weights=weights, iterator=iterator)
    manager = rx.CheckpointManager(checkpoint, config["checkpoints"], max_to_keep=2)
    handler = rx.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, manager)
    first = handler.total_run_calls

    def update(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((x @ weights - y) ** 2)
        gradient = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        weights.assign_sub(config.get("learning_rate", 0.05) * gradient)
        return loss

    def step(batch):
        return strategy.reduce("SUM", strategy.run(update, args=(batch,)), axis=None)

    start = int(os.environ.get("REPLICAX_RESTART_COUNT", "0"))
    faults = list(config.get("faults", {}).items())
    fault, fault_at = faults[start] if start < len(faults) else ("", -1)
    for number in range(first, NUM_STEPS):
        if rank == 1 and number == fault_at:
            note(config, start, first, fault)
            happen(fault)
        if fault == "drain" and number >= fault_at:
            time.sleep(2)  # until the signal comes
        loss = handler.run(step, next(iterator))
        rx.summary.scalar("loss", loss)
        if number % 5 == 4:
            checkpoint.checkpointed_runs = handler.total_run_calls
            manager.save(checkpoint_number=number + 1)
            if config.get("reports"):
                import replicax.ray

                replicax.ray.report({"step": number + 1, "loss": float(loss)}, manager)
    if rank == 1:
        note(config, start, first, "end")
    bits = zlib.crc32(np.asarray(weights.value).tobytes())
    return {"bits": bits, "first": first, "devices": strategy.num_replicas_in_sync, "start": start}


def note(config, start, first, what):
    with open(pathlib.Path(config["checkpoints"]).parent / "starts", "a") as file:
        print(json.dumps({"start": start, "first": first, "then": what, "pid": os.getpid()}), file=file)


def happen(fault):
    if fault == "raise":
        raise ArithmeticError("a mistake of worker 1")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    import ray

    import ray_cluster

    node = ray.get_runtime_context().get_node_id()
    arguments = (node,) if fault == "lose" else (node, 60)
    print(ray_cluster.ask(os.environ["RX_RAY_HOLDER"], fault, *arguments))
    if fault == "lose":
        time.sleep(60)  # until the process ends with its node


def main(config):
    if "RAY_ADDRESS" not in os.environ:
        print("RESULT", json.dumps(train(config)))
        return
    if "learning_rates" in config:
        search(config)
        return
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    import replicax as rx

    storage = str(pathlib.Path(config["checkpoints"]).parent)
    trainer = DataParallelTrainer(
        train,
        train_loop_config=config,
        backend_config=rx.ray.ReplicaxConfig(devices_per_worker=config.get("devices")),
        scaling_config=ScalingConfig(
            num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD"
        ),
        run_config=RunConfig(
            name="run",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=config.get("max_failures", 0)),
            worker_runtime_env={"env_vars": {"RX_RAY_HOLDER": os.environ["RX_RAY_HOLDER"]}},
        ),
    )
    try:
        result = rx.ray.fit(trainer)
    except ArithmeticError as error:
        print("RAISED", repr(error), "from", type(error.__cause__).__name__)
        return
    checkpoint = None if result.checkpoint is None else result.checkpoint.path
    print("RESULT", json.dumps({**result.return_value, "checkpoint": checkpoint, "metrics": result.metrics}))


def search(config):
    """Searches a learning rate with Ray Tune: each trial trains in a worker of its own."""
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer
    from ray.tune.integration.ray_train import TuneReportCallback

    import replicax as rx

    storage = pathlib.Path(config["checkpoints"]).parent

    def trial(chosen):
        name = tune.get_context().get_trial_id()
        given = {"checkpoints": str(storage / name / "checkpoints"), "reports": True, **chosen}
        trainer = JaxTrainer(
            train,
            train_loop_config=given,
            jax_config=rx.ray.ReplicaxConfig(devices_per_worker=2),
            scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name=name, storage_path=str(storage), callbacks=[TuneReportCallback()]),
        )
        print("DEVICES", rx.ray.fit(trainer).return_value["devices"])

    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.1}),
        param_space={"learning_rate": tune.grid_search(config["learning_rates"])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
        run_config=tune.RunConfig(name="search", storage_path=str(storage)),
    )
    results = tuner.fit()
    assert not results.errors
    for each in [*results, results.get_best_result()]:
        told = (each.config["learning_rate"], each.metrics["loss"], each.metrics["checkpoint_path"])
        print("RESULT", json.dumps(told))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
