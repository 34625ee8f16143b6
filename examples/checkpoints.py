"""A loop in TensorFlow's style that resumes from its checkpoints. Run it again, also with other devices.

python examples/checkpoints.py                # epochs 1 and 2
python examples/checkpoints.py --epochs 4     # goes on with epoch 3
python examples/checkpoints.py --epochs 6 --devices 3
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import replicax as rx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--directory", default="training")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--devices", type=int, default=2)
arguments = parser.parse_args()
rx.config.set_local_devices(arguments.devices)

import keras
import numpy as np

strategy = rx.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    epoch = rx.Variable(0, trainable=False)

features = np.random.RandomState(0).randn(512, 8).astype("float32")
labels = features.sum(axis=1, keepdims=True)
dataset = rx.data.from_arrays((features, labels)).shuffle(seed=0).batch(48)
dataset = strategy.experimental_distribute_dataset(dataset)

checkpoint = rx.Checkpoint(model=model, optimizer=optimizer, epoch=epoch)
manager = rx.CheckpointManager(
    checkpoint, arguments.directory, max_to_keep=2, keep_best=1, best_fn=lambda m: m["loss"], best_mode="min"
)
restored = manager.restore_or_initialize()
print(f"restored {os.path.basename(restored)}" if restored else "begins anew", flush=True)


def train_step(inputs):
    features, labels = inputs
    with rx.GradientTape() as tape:
        errors = (model(features, training=True) - labels)[:, 0] ** 2
        loss = rx.nn.compute_average_loss(errors)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


@rx.function
def distributed_train_step(inputs):
    return strategy.reduce(rx.ReduceOp.SUM, strategy.run(train_step, args=(inputs,)), axis=None)


while int(epoch) < arguments.epochs:
    losses = [float(distributed_train_step(inputs)) for inputs in dataset]
    epoch.assign_add(1)
    path = manager.save(
        metrics={"loss": np.mean(losses)}
    )  # returns when the copy is taken; a thread writes it
    print(f"epoch {int(epoch)}  loss {np.mean(losses):.4f}  {os.path.basename(path)}", flush=True)
manager.close()
print("kept", ", ".join(map(os.path.basename, manager.checkpoints)))
