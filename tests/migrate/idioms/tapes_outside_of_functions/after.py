"""Tapes that record what TensorFlow runs at once."""

import numpy as np
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import replicax as rx
import keras
from keras import ops

RATE = 0.1
inputs = np.arange(8.0, dtype=np.float32).reshape(4, 2) / 8
targets = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
optimizer = keras.optimizers.SGD(RATE)
losses = []


@rx.function
def traced_step(model, inputs, targets, optimizer):
    with rx.GradientTape() as tape:
        loss = ops.mean(ops.square(model(inputs) - targets))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


for step in range(3):
    loss = traced_step(model, inputs, targets, optimizer)
    losses.append(float(loss))
print([f"{loss:.4f}" for loss in losses])

weight = rx.Variable(3.0)


@rx.function
def traced_step_2(weight):
    with rx.GradientTape(persistent=True) as tape:
        y = weight * weight
        z = y * weight
    dy = tape.gradient(y, weight)
    dz = tape.gradient(z, weight)
    del tape
    return dy, dz


dy, dz = traced_step_2(weight)
print(float(dy), float(dz))


@rx.function
def traced_step_3(variable, offset, total):
    with rx.GradientTape() as tape:
        distance = ops.square(variable - offset)
        total += distance
    gradient = tape.gradient(distance, variable)
    return total, gradient


def descend(variable, offset, num_steps):
    total = 0.0
    for _ in range(num_steps):
        total, gradient = traced_step_3(variable, offset, total)
        variable.assign_sub(RATE * gradient)
    return total


print(f"{float(descend(weight, 1.0, 4)):.4f} {float(weight):.4f}")
