"""A checkpoint of a module, its optimizer and the epoch, from which training goes on."""

import tempfile

import numpy as np
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import tensorflow as tf
import replicax as rx
import keras
from keras import ops
import optax

X = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
Y = X[:, :1] - 2 * X[:, 1:2]


class Linear(rx.Module):
    def __init__(self, n_in, n_out, name=None):
        super().__init__(name=name)
        self.w = keras.Variable(np.full((n_in, n_out), 0.5, np.float32), name="w")
        self.b = keras.Variable(ops.zeros([n_out]), name="b")

    @rx.Module.with_name_scope
    def __call__(self, x):
        return ops.matmul(x, self.w) + self.b


class Trainer:
    def __init__(self, strategy, directory):
        self.strategy = strategy
        with strategy.scope():
            self.model = Linear(4, 1)
            self.optimizer = keras.optimizers.Adam(0.1)
            self.epoch = rx.Variable(0, trainable=False, name="epoch")
        self.checkpoint = rx.Checkpoint(model=self.model, optimizer=self.optimizer, epoch=self.epoch)
        self.manager = rx.CheckpointManager(self.checkpoint, directory, max_to_keep=2)

    def restore(self):
        with self.strategy.scope():
            self.optimizer.build(self.model.trainable_variables)
            self.checkpoint.restore(self.manager.latest_checkpoint)
        print("from epoch", int(np.asarray(self.epoch)[()]))

    def _step(self, x, y):
        with rx.GradientTape() as tape:
            errors = ops.mean(ops.square(self.model(x) - y), axis=-1)
            loss = rx.nn.compute_average_loss(errors, global_batch_size=4)
        variables = self.model.trainable_variables
        grads = tape.gradient(loss, variables)
        grads, _ = (optax.projections.projection_l2_ball(grads, 0.25), optax.tree.norm(grads))
        self.optimizer.apply_gradients(zip(grads, variables))
        return loss

    @rx.function
    def step(self, x, y):
        losses = self.strategy.run(self._step, args=(x, y))
        return self.strategy.reduce(rx.ReduceOp.SUM, losses, axis=None)

    def fit(self, until):
        while int(np.asarray(self.epoch)[()]) < until:
            epoch = int(np.asarray(self.epoch)[()])
            order = np.random.RandomState(epoch).permutation(len(X))
            dataset = tf.data.Dataset.from_tensor_slices((X[order], Y[order])).batch(4)
            total = sum(float(self.step(x, y)) for x, y in self.strategy.experimental_distribute_dataset(dataset))
            self.epoch.assign_add(1)
            self.manager.save()
            print("epoch %d loss %.4f steps %d" % (epoch, total, int(np.asarray(self.optimizer.iterations)[()])))


strategy = rx.MirroredStrategy(["/cpu:0"])
directory = tempfile.mkdtemp()
for until in (2, 4):
    trainer = Trainer(strategy, directory)
    trainer.restore()
    trainer.fit(until)
print([path.rpartition("/")[2] for path in trainer.manager.checkpoints])
