"""Predicts which users click on which items: embeddings on parameter servers, which transfer only the rows of
a batch.

The data are generated. As in real data, a few ids are frequent and most are rare. A click depends on a number
for each user and each item, which the model has to find. Run it as the chief of a cluster whose other tasks
are `replicax server`, for example on this machine:

    replicax launch --workers 2 --ps 2 examples/click_through_rate.py
"""

import argparse
import os
import time

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import replicax as rx

DIM = 16


class Clicks:
    """Batches of ([batch_size, 2] ids of users and items, [batch_size, 1] whether they clicked), without end.

    The preferences are the same for every seed; the seed only selects the rows.
    """

    def __init__(self, num_ids: int, batch_size: int, seed: int):
        self.num_ids, self.batch_size, self.seed = num_ids, batch_size, seed

    def __iter__(self):
        tastes = np.random.RandomState(0).randn(self.num_ids, 2).astype(np.float32)
        random = np.random.RandomState(1 + self.seed)
        while True:
            drawn = random.zipf(1.3, size=(self.batch_size, 2)) % self.num_ids
            logits = 2.0 * (tastes[drawn[:, 0], 0] + tastes[drawn[:, 1], 1])
            clicked = random.rand(self.batch_size) < 1 / (1 + np.exp(-logits))
            yield drawn.astype(np.int32), clicked[:, None].astype(np.float32)


def rows_sent(coordinator):
    return sum(ps["statistics"]["rows_sent"] for ps in coordinator.statistics()["ps"].values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ids", type=int, default=200_000, help="rows of each table (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of an epoch (default: %(default)s)")
    args = parser.parse_args()

    # A table is split into shards of at least 1 MiB, one for each parameter server.
    cluster = rx.cluster_resolver.TFConfigClusterResolver()
    strategy = rx.ParameterServerStrategy(
        cluster,
        variable_partitioner=rx.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=1 << 20, max_shards=cluster.cluster_spec().num_tasks("ps")
        ),
    )
    coordinator = rx.coordinator.ClusterCoordinator(strategy)

    with strategy.scope():
        ids = keras.Input((2,), dtype="int32")
        user = keras.layers.Embedding(args.ids, DIM, name="users")(ids[:, 0])
        item = keras.layers.Embedding(args.ids, DIM, name="items")(ids[:, 1])
        hidden = keras.layers.Dense(32, activation="relu")(keras.layers.Concatenate()([user, item]))
        model = keras.Model(ids, keras.layers.Dense(1)(hidden))
        optimizer = keras.optimizers.Adagrad(0.1)
        auc = keras.metrics.AUC(from_logits=True)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    @rx.function
    def train(iterator):
        def replica_fn(batch):
            ids, clicked = batch
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss(loss_of(clicked, model(ids, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        return strategy.run(replica_fn, args=(next(iterator),))

    @rx.function
    def evaluate(iterator):
        def replica_fn(batch):
            ids, clicked = batch
            auc.update_state(clicked, model(ids, training=False))

        strategy.run(replica_fn, args=(next(iterator),))

    num_ids, batch_size = args.ids, args.batch_size

    def training_data(context):
        return Clicks(num_ids, batch_size, seed=1 + context.input_pipeline_id)

    def test_data(context):
        return Clicks(num_ids, batch_size, seed=1001 + context.input_pipeline_id)

    training = iter(coordinator.create_per_worker_dataset(training_data))
    test = iter(coordinator.create_per_worker_dataset(test_data))

    num_rows = sum(v.shape[0] for v in model.trainable_variables if v.shape[0] == args.ids)
    print(f"{num_rows:,} rows of embeddings on {len(coordinator.statistics()['ps'])} parameter servers")
    for epoch in range(args.epochs):
        losses = [coordinator.schedule(train, args=(training,)) for _ in range(args.steps)]
        coordinator.join()
        auc.reset_state()
        for _ in range(10):
            coordinator.schedule(evaluate, args=(test,))
        coordinator.join()
        print(
            f"epoch {epoch + 1}/{args.epochs}   loss {np.mean(coordinator.fetch(losses)):.4f}   "
            f"AUC {float(auc.result()):.4f}"
        )
    time.sleep(2)  # parameter servers say once a second what they have done
    num_steps = args.epochs * (args.steps + 10)
    print(f"{rows_sent(coordinator) / num_steps:,.0f} rows of {num_rows:,} travelled in a step")


if __name__ == "__main__":
    main()
