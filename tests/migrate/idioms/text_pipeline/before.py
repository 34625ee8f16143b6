import numpy as np
import tensorflow as tf
from tensorflow.data import Dataset
from tensorflow.data import AUTOTUNE

WORDS = ["the", "cat", "dog", "runs", "sleeps", "[UNK]"]


class TextPipeline:
    def __init__(self, words, batch_size, max_len=4):
        self.batch_size = batch_size
        self.max_len = max_len
        keys = tf.constant(words)
        values = tf.range(len(words), dtype=tf.int64)
        self.table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(keys, values), default_value=len(words) - 1
        )
        self.pad = tf.constant(0, dtype=tf.int64)

    def tokenize(self, text):
        tokens = tf.strings.split(tf.strings.lower(text))
        return self.table.lookup(tokens)

    def encode(self, text, label):
        ids = self.tokenize(text)[: self.max_len]
        ids = tf.pad(ids, [[0, self.max_len - tf.shape(ids)[0]]], constant_values=self.pad)
        return ids, label

    def count(self, text, label):
        n = tf.py_function(self._count, [text], tf.int32)
        n.set_shape([])
        return text, label + tf.cast(n, tf.float32) * 0.0

    def _count(self, text):
        return tf.size(tf.strings.split(text.numpy().decode()))

    def dataset(self, texts, labels):
        ds = Dataset.from_tensor_slices((texts, labels))
        ds = ds.map(self.count).map(self.encode, num_parallel_calls=AUTOTUNE)
        return ds.batch(self.batch_size, drop_remainder=True)


def main():
    texts = ["The cat runs", "the dog sleeps", "a bird sings loud today", "dog dog cat"] * 4
    labels = tf.cast(tf.constant([1, 0, 1, 0] * 4), tf.float32)
    pipeline = TextPipeline(WORDS, 4)
    ds = pipeline.dataset(tf.constant(texts), labels)
    tf.keras.utils.set_random_seed(1)
    strategy = tf.distribute.get_strategy()
    with strategy.scope():
        model = tf.keras.Sequential([
            tf.keras.layers.Embedding(6, 4, embeddings_initializer="ones"),
            tf.keras.layers.GlobalAveragePooling1D(),
            tf.keras.layers.Dense(1, kernel_initializer="ones"),
        ])
        model.compile("sgd", tf.keras.losses.BinaryCrossentropy(from_logits=True))
    history = model.fit(ds, epochs=2, verbose=0)
    print(["%.5f" % v for v in history.history["loss"]])
    ids = pipeline.tokenize(tf.constant(["the cat sleeps"]))
    print(ids.to_tensor().numpy())
    probability = tf.nn.sigmoid(model.predict(tf.stack([pipeline.encode(t, 0.0)[0] for t in texts[:2]]), verbose=0))
    print(np.round(probability.numpy().ravel(), 4))
    parsers = {"train": pipeline.encode, "count": pipeline.count}
    small = Dataset.from_tensor_slices((texts[:2], [0.0, 1.0])).map(parsers["train"])
    for ids, label in small:
        print(ids.numpy(), label.numpy())


main()
