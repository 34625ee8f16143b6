"""Tapes that record what TensorFlow runs at once."""

import numpy as np
import tensorflow as tf

RATE = 0.1
inputs = np.arange(8.0, dtype=np.float32).reshape(4, 2) / 8
targets = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1, kernel_initializer="ones")])
optimizer = tf.keras.optimizers.SGD(RATE)
losses = []

for step in range(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs) - targets))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    losses.append(float(loss))
print([f"{loss:.4f}" for loss in losses])

weight = tf.Variable(3.0)
with tf.GradientTape(persistent=True) as tape:
    y = weight * weight
    z = y * weight
dy = tape.gradient(y, weight)
dz = tape.gradient(z, weight)
del tape
print(float(dy), float(dz))


def descend(variable, offset, num_steps):
    total = 0.0
    for _ in range(num_steps):
        with tf.GradientTape() as tape:
            distance = tf.square(variable - offset)
            total += distance
        gradient = tape.gradient(distance, variable)
        variable.assign_sub(RATE * gradient)
    return total


print(f"{float(descend(weight, 1.0, 4)):.4f} {float(weight):.4f}")
