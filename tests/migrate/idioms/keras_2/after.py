"""Arguments and names as programs for Keras 2 have them. TensorFlow 2.15, the last with Keras 2, printed printed_by_keras_2.txt."""

import numpy as np
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import replicax as rx
import keras
strategy = rx.MirroredStrategy(["cpu:0"])
rs = np.random.RandomState(0)
x = rs.rand(64, 8).astype("float32"); y = rs.randint(0, 3, 64)
def const(shape, seed): return keras.initializers.Constant(np.random.RandomState(seed).normal(0, .3, shape))
with strategy.scope():
    model = keras.models.Sequential([
        keras.layers.InputLayer(shape=(8,)),
        keras.layers.Dense(6, kernel_initializer=const((8, 6), 1), kernel_regularizer=keras.regularizers.l2(l2=0.01)),
        keras.layers.LeakyReLU(negative_slope=0.1),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Dense(3, 'softmax', True, const((6, 3), 2)),
    ], name='net')
    model.compile(keras.optimizers.SGD(learning_rate=keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1e-2), momentum=0.9, nesterov=True), 'sparse_categorical_crossentropy', metrics=['accuracy'])
    opt = keras.optimizers.Adam(learning_rate=0.01)
h = model.fit(x, y, 16, 3, 0, shuffle=False)
print(["%.4f" % v for v in h.history["loss"]])
loss_object = keras.losses.SparseCategoricalCrossentropy(reduction=None)
m = keras.metrics.Mean('loss')
@rx.function
def step(a, b):
    with rx.GradientTape() as tape:
        per = loss_object(b, model(a, training=True))
        loss = rx.nn.compute_average_loss(per, global_batch_size=32)
    g = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(g, model.trainable_variables))
    m.update_state(loss)
    return loss
for i in range(0, 64, 32):
    strategy.run(step, args=(x[i:i+32], y[i:i+32]))
print("%.4f" % np.asarray(m.result())[()])
m.reset_state()
