"""Arguments and names as programs for Keras 2 have them. TensorFlow 2.15, the last with Keras 2, printed printed_by_keras_2.txt."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
strategy = tf.distribute.MirroredStrategy(["cpu:0"])
rs = np.random.RandomState(0)
x = rs.rand(64, 8).astype("float32"); y = rs.randint(0, 3, 64)
def const(shape, seed): return tf.constant_initializer(np.random.RandomState(seed).normal(0, .3, shape))
with strategy.scope():
    model = keras.models.Sequential([
        keras.layers.InputLayer(input_shape=(8,)),
        keras.layers.Dense(6, kernel_initializer=const((8, 6), 1), kernel_regularizer=keras.regularizers.l2(l=0.01)),
        keras.layers.LeakyReLU(alpha=0.1),
        keras.layers.BatchNormalization(momentum=0.9, fused=False),
        keras.layers.Dense(3, 'softmax', True, const((6, 3), 2)),
    ], 'net')
    model.compile(keras.optimizers.legacy.SGD(lr=0.1, decay=1e-2, momentum=0.9, nesterov=True), 'sparse_categorical_crossentropy', ['accuracy'])
    opt = keras.optimizers.legacy.Adam(lr=0.01, epsilon=None)
h = model.fit(x, y, 16, 3, 0, shuffle=False, workers=2, max_queue_size=4)
print(["%.4f" % v for v in h.history["loss"]])
loss_object = tf.losses.SparseCategoricalCrossentropy(reduction=tf.losses.Reduction.NONE)
m = tf.metrics.Mean('loss')
@tf.function
def step(a, b):
    with tf.GradientTape() as tape:
        per = loss_object(b, model(a, training=True))
        loss = tf.nn.compute_average_loss(per, global_batch_size=32)
    g = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(g, model.trainable_variables))
    m.update_state(loss)
    return loss
for i in range(0, 64, 32):
    strategy.run(step, args=(x[i:i+32], y[i:i+32]))
print("%.4f" % m.result().numpy())
m.reset_states()
