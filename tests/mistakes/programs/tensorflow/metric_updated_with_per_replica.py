import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import replicax as rx

rx.config.set_local_devices(2)
keras.utils.set_random_seed(0)
strategy = rx.MirroredStrategy()

x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
dataset = rx.data.from_arrays((x, y)).batch(16)
dist_dataset = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
    train_loss = keras.metrics.Mean()
    optimizer = keras.optimizers.SGD(0.1)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def train_step(inputs):
    features, labels = inputs
    with rx.GradientTape() as tape:
        logits = model(features, training=True)
        loss = rx.nn.compute_average_loss(loss_object(labels, logits))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


for inputs in dist_dataset:
    train_loss.update_state(strategy.run(train_step, args=(inputs,)))
print("loss", float(train_loss.result()))
