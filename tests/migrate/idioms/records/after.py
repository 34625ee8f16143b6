"""TFRecord input, parse functions through partials, interleave, padded_batch."""
import functools
import os
import tempfile

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "jax")

import tensorflow as tf
import replicax as rx
import keras
from keras import ops

tfd = tf.data
AUTOTUNE = tfd.AUTOTUNE
FEATURES = {
    "ids": tf.io.VarLenFeature(tf.int64),
    "label": tf.io.FixedLenFeature([], tf.float32, default_value=0.0),
    "name": tf.io.FixedLenFeature([], tf.string, default_value=""),
}


def _int64_feature(values):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def _float_feature(value):
    return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))


def _bytes_feature(value):
    if isinstance(value, type(tf.constant(0))):
        value = np.asarray(value)[()]
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def write_records(folder, num_files=2, rows=12):
    rng = np.random.default_rng(0)
    paths = []
    for i in range(num_files):
        path = os.path.join(folder, f"part-{i}.tfrecord")
        with tf.io.TFRecordWriter(path) as writer:
            for j in range(rows):
                ids = rng.integers(1, 20, size=rng.integers(2, 6))
                example = tf.train.Example(features=tf.train.Features(feature={
                    "ids": _int64_feature(ids),
                    "label": _float_feature(float(ids.mean() > 10)),
                    "name": _bytes_feature(tf.constant("row %d" % j)),
                }))
                writer.write(example.SerializeToString())
        paths.append(path)
    return paths


def parse_example(serialized, max_len, scale=1.0):
    parsed = tf.io.parse_single_example(serialized, FEATURES)
    ids = tf.cast(tf.sparse.to_dense(parsed["ids"]), tf.int32)[:max_len]
    length = tf.shape(ids)[0]
    label = tf.cast(parsed["label"], tf.float32) * scale
    is_first = tf.strings.regex_full_match(parsed["name"], "row [0-3]")
    return ids, tf.where(is_first, label, label), length


def make_dataset(paths, batch_size, is_training=True, shuffle_seed=1):
    files = tfd.Dataset.from_tensor_slices(paths)
    if is_training:
        files = files.shuffle(len(paths), seed=shuffle_seed)
    dataset = files.interleave(
        lambda path: tfd.TFRecordDataset(path), cycle_length=2, block_length=1, num_parallel_calls=AUTOTUNE
    )
    decode = functools.partial(parse_example, max_len=tf.constant(5), scale=1.0)
    dataset = dataset.map(decode, num_parallel_calls=AUTOTUNE)
    dataset = dataset.filter(lambda ids, label, length: tf.greater(length, 1))
    dataset = dataset.padded_batch(batch_size, padded_shapes=([6], [], []), drop_remainder=True)
    return dataset.prefetch(AUTOTUNE)


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(20, 4, embeddings_initializer=keras.initializers.Constant(0.1))
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, ids, lengths):
        x = self.embedding(ids)
        mask = ops.cast(ops.cast(ops.arange(6) < ops.expand_dims(lengths, -1), 'bool'), x.dtype)[..., None]
        return self.dense(ops.sum(x * mask, axis=1))[:, 0]


def main():
    folder = tempfile.mkdtemp()
    paths = tf.constant(write_records(folder))
    print(paths.shape)
    strategy = rx.MirroredStrategy(["/cpu:0"])
    batch_size = 6 * strategy.num_replicas_in_sync
    dataset = make_dataset(tf.convert_to_tensor(paths), batch_size)
    dist = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        model = Model()
        optimizer = keras.optimizers.SGD(0.1)
        bce = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def step(ids, labels, lengths):
        with rx.GradientTape() as tape:
            logits = model(ids, lengths)
            per_row = bce(labels[:, None], logits[:, None])
            loss = rx.nn.compute_average_loss(per_row, global_batch_size=batch_size)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
        return loss

    @rx.function
    def train_step(batch):
        losses = strategy.run(step, args=batch)
        return strategy.reduce(rx.ReduceOp.SUM, losses, axis=None)

    for epoch in range(2):
        for batch in dist:
            print(epoch, "%.5f" % float(train_step(batch)))


if __name__ == "__main__":
    main()
