"""Trains a Keras model in the workers of Ray Train, saves after each epoch, and resumes if a worker or a node is lost.

    python examples/cluster/ray_train.py --workers 2 --storage /shared/runs

In a Ray job, or on a machine from which a Ray cluster is reached. All nodes need replicax, Keras and the storage.
"""

import argparse
import os


def train(config):
    """The training function: what each worker runs. It trains alone without Ray."""
    import keras
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()  # before anything uses JAX
    features = np.random.default_rng(0).normal(size=(1001, 8)).astype(np.float32)
    labels = (features.sum(axis=1) > 0).astype(np.int32)

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
        model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    # It saves at the end of each epoch and when a node is taken away, and restores when `fit` starts.
    saving = rx.keras.callbacks.CheckpointCallback(config["checkpoints"])
    history = model.fit(features, labels, batch_size=64, epochs=3, verbose=0, callbacks=[saving])
    return [round(loss, 4) for loss in history.history["loss"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a Keras model in the workers of Ray Train.")
    parser.add_argument("--workers", type=int, default=2, help="default: 2")
    parser.add_argument("--storage", required=True, help="a folder that all nodes share")
    parser.add_argument("--name", default="example", help="a name for the run: another one begins anew")
    options = parser.parse_args()

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    import replicax as rx

    trainer = JaxTrainer(
        train,
        train_loop_config={"checkpoints": os.path.join(options.storage, options.name, "checkpoints")},
        jax_config=rx.ray.ReplicaxConfig(),
        scaling_config=ScalingConfig(num_workers=options.workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name=options.name, storage_path=options.storage, failure_config=FailureConfig(max_failures=3)
        ),
    )
    print("losses:", rx.ray.fit(trainer).return_value)


if __name__ == "__main__":
    main()
