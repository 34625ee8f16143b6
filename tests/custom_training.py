"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy", rewritten for replicax and for TensorFlow
itself.

Source: https://www.tensorflow.org/tutorials/distribute/custom_training. As there, its first call builds the model, in
  the
step, and its layers have regularizers.
"""

import math

import keras
import numpy as np

NUM_CLASSES, GLOBAL_BATCH = 3, 8


def images(num_rows, seed):
    """Images of noise with a brighter band; the label is the band's position."""
    random = np.random.RandomState(seed)
    labels = random.randint(0, NUM_CLASSES, num_rows).astype("int32")
    pictures = random.uniform(size=(num_rows, 6, 6, 1)).astype("float32")
    for picture, label in zip(pictures, labels, strict=True):
        picture[2 * label : 2 * label + 2] += 1
    return pictures, labels


def initial(shape, dtype=None):
    """Weights that are equal in every library."""
    numbers = keras.ops.arange(math.prod(shape), dtype="float32")
    return keras.ops.cast(keras.ops.reshape(keras.ops.cos(numbers) / 3, shape), dtype)


def create_model():
    layers, regularizer = keras.layers, keras.regularizers.L2(1e-2)
    return keras.Sequential(
        [
            layers.Conv2D(
                4, 3, activation="relu", kernel_initializer=initial, kernel_regularizer=regularizer
            ),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(8, activation="relu", kernel_initializer=initial, kernel_regularizer=regularizer),
            layers.Dense(NUM_CLASSES, kernel_initializer=initial),
        ]
    )


def train(lib, strategy, batched, num_epochs=2):
    """Trains and tests for some epochs.

    Args:
      lib: A module with ``function``, ``GradientTape``, ``nn`` and ``ReduceOp``.
      batched: Makes a dataset of batches from a tuple of arrays and the number of rows of a batch.

    Returns:
      A dict with the mean loss, the accuracies and the test loss of each epoch, and the weights.
    """
    training = strategy.experimental_distribute_dataset(batched(images(20, seed=0), GLOBAL_BATCH))
    testing = strategy.experimental_distribute_dataset(batched(images(11, seed=1), GLOBAL_BATCH))

    with strategy.scope():
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

        def compute_loss(labels, predictions, model_losses):
            loss = lib.nn.compute_average_loss(loss_object(labels, predictions))
            if model_losses:
                loss += lib.nn.scale_regularization_loss(sum(model_losses))
            return loss

        test_loss = keras.metrics.Mean(name="test_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        model = create_model()
        optimizer = keras.optimizers.Adam(learning_rate=0.01)

    def train_step(inputs):
        pictures, labels = inputs
        with lib.GradientTape() as tape:
            predictions = model(pictures, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs):
        pictures, labels = inputs
        predictions = model(pictures, training=False)
        test_loss.update_state(loss_object(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    @lib.function
    def distributed_train_step(inputs):
        losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(lib.ReduceOp.SUM, losses, axis=None)

    @lib.function
    def distributed_test_step(inputs):
        return strategy.run(test_step, args=(inputs,))

    found = {"loss": [], "accuracy": [], "test_loss": [], "test_accuracy": []}
    for _ in range(num_epochs):
        losses = [float(distributed_train_step(batch)) for batch in training]
        for batch in testing:
            distributed_test_step(batch)
        found["loss"].append(sum(losses) / len(losses))
        for name, metric in {
            "accuracy": train_accuracy,
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
        }.items():
            found[name].append(float(metric.result()))
            metric.reset_state()
    weights = {
        f"weight_{n}": keras.ops.convert_to_numpy(v.value) for n, v in enumerate(model.trainable_variables)
    }
    return {name: np.asarray(value) for name, value in (found | weights).items()}
