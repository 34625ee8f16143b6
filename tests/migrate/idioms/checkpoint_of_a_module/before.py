"""A checkpoint of a module, its optimizer and the epoch, from which training goes on."""

import tempfile

import numpy as np
import tensorflow as tf

X = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
Y = X[:, :1] - 2 * X[:, 1:2]


class Linear(tf.Module):
    def __init__(self, n_in, n_out, name=None):
        super().__init__(name=name)
        self.w = tf.Variable(np.full((n_in, n_out), 0.5, np.float32), name="w")
        self.b = tf.Variable(tf.zeros([n_out]), name="b")

    @tf.Module.with_name_scope
    def __call__(self, x):
        return tf.matmul(x, self.w) + self.b


class Trainer:
    def __init__(self, strategy, directory):
        self.strategy = strategy
        with strategy.scope():
            self.model = Linear(4, 1)
            self.optimizer = tf.keras.optimizers.Adam(0.1)
            self.epoch = tf.Variable(0, trainable=False, name="epoch")
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, epoch=self.epoch)
        self.manager = tf.train.CheckpointManager(self.checkpoint, directory, max_to_keep=2)

    def restore(self):
        with self.strategy.scope():
            self.optimizer.build(self.model.trainable_variables)
            self.checkpoint.restore(self.manager.latest_checkpoint)
        print("from epoch", int(self.epoch.numpy()))

    def _step(self, x, y):
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean(tf.square(self.model(x) - y), axis=-1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=4)
        variables = self.model.trainable_variables
        grads = tape.gradient(loss, variables)
        grads, _ = tf.clip_by_global_norm(grads, 0.25)
        self.optimizer.apply_gradients(zip(grads, variables))
        return loss

    @tf.function
    def step(self, x, y):
        losses = self.strategy.run(self._step, args=(x, y))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def fit(self, until):
        while int(self.epoch.numpy()) < until:
            epoch = int(self.epoch.numpy())
            order = np.random.RandomState(epoch).permutation(len(X))
            dataset = tf.data.Dataset.from_tensor_slices((X[order], Y[order])).batch(4)
            total = sum(float(self.step(x, y)) for x, y in self.strategy.experimental_distribute_dataset(dataset))
            self.epoch.assign_add(1)
            self.manager.save()
            print("epoch %d loss %.4f steps %d" % (epoch, total, int(self.optimizer.iterations.numpy())))


strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
directory = tempfile.mkdtemp()
for until in (2, 4):
    trainer = Trainer(strategy, directory)
    trainer.restore()
    trainer.fit(until)
print([path.rpartition("/")[2] for path in trainer.manager.checkpoints])
