"""Programs of workers with ``fault_tolerance`` of which some end themselves: functions that import what they need."""


def fit_twice(data, *deaths):
    """Reports the bits of a training without deaths, and of one with them.

    Args:
      data: "arrays", "dataset", or "generator" of a number of batches that Keras does not know.
      deaths: Of each worker that dies in the second training, its number and the number of batches after which it
        does. Batches of training, validation, evaluation and predictions count.
    """
    import hashlib
    import os

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
    number = strategy.cluster_resolver.task_id
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(485, 6)).astype("float32"), rng.integers(0, 3, 485).astype("int32")

    class Batches(keras.callbacks.Callback):
        def __init__(self, last):
            super().__init__()
            self.num_batches, self.last = 0, last

        def count(self, batch=None, logs=None):
            self.num_batches += 1
            if self.num_batches == self.last:
                os.kill(os.getpid(), 9)

        on_train_batch_end = on_test_batch_end = on_predict_batch_end = count

    def batches():
        for start in range(0, len(x), 97):
            yield x[start : start + 97], y[start : start + 97]

    def trained(deaths):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(8),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dropout(0.3),
                    keras.layers.Dense(3),
                ]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
        options = {"callbacks": [Batches(dict(deaths).get(number))]}
        if data == "arrays":
            history = model.fit(
                x, y, batch_size=97, epochs=3, validation_data=(x[:100], y[:100]), **options
            ).history
        elif data == "dataset":
            history = model.fit(
                rx.data.from_arrays((x, y)).shuffle(len(x), seed=2).batch(97), epochs=3, **options
            ).history
        else:
            history = model.fit(batches(), **options).history
        evaluated = model.evaluate(x, y, batch_size=97, **options)
        predicted = model.predict(x, batch_size=97, **options)
        arrays = [*model.variables, *model.optimizer.variables]
        bits = b"".join(np.array(variable.value).tobytes() for variable in arrays)
        return hashlib.sha256(bits + repr((history, evaluated)).encode() + predicted.tobytes()).hexdigest()

    first = trained([])
    report(undisturbed=first, disturbed=trained(deaths))
    report(is_chief=[rx.is_chief(), strategy.is_chief], replicas=list(strategy.topology.local_replicas))


def loop_twice(in_function, folder, *deaths):
    """Reports the bits of a loop of one's own without deaths, and of one with them.

    Args:
      in_function: True for a loop whose ``run`` and ``reduce`` are in one ``rx.function``.
      folder: That of checkpoints.
      deaths: Of each worker that dies in the second training, its number and the number of its steps.
    """
    import hashlib
    import os

    import jax.numpy as jnp
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
    number = strategy.cluster_resolver.task_id
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(485, 6)).astype("float32"), rng.normal(size=(485, 1)).astype("float32")

    def trained(deaths):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(8),
                    keras.layers.Dropout(0.3),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dense(1),
                ]
            )
            optimizer, error = keras.optimizers.Adam(0.01), keras.metrics.MeanAbsoluteError()
            largest = rx.Variable(np.float32(0), synchronization="ON_READ", aggregation="SUM")

        def step(batch):
            features, labels = batch
            with rx.GradientTape() as tape:
                predictions = model(features, training=True)
                loss = jnp.sum((predictions - labels) ** 2) / 97
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            error.update_state(labels, predictions)
            largest.assign(jnp.maximum(largest, jnp.max(predictions)))
            return loss, predictions

        def run(batch):
            loss, predictions = strategy.run(step, args=(batch,))
            return strategy.reduce("SUM", loss, axis=None), strategy.gather(predictions, axis=0)

        run = rx.function(run) if in_function else run
        dataset = rx.data.from_arrays((x, y)).shuffle(len(x), seed=2).batch(97)
        batches, losses, last_rows = strategy.experimental_distribute_dataset(dataset), [], []
        checkpoint = rx.Checkpoint(model=model, optimizer=optimizer, error=error, largest=largest)
        manager = rx.CheckpointManager(checkpoint, f"{folder}/{len(deaths)}", max_to_keep=2)
        for _ in range(4):
            for batch in batches:
                if len(losses) == dict(deaths).get(number):
                    os.kill(os.getpid(), 9)
                loss, predictions = run(batch)
                losses.append(float(loss))
                last_rows.append(predictions[-1].item())
                if len(losses) % 5 == 0:
                    manager.save()
        arrays = [*model.variables, *optimizer.variables, *error.variables, largest]
        bits = b"".join(np.array(variable.value).tobytes() for variable in arrays)
        for variable in arrays:
            variable.assign(np.zeros(variable.shape, variable.dtype))
        checkpoint.restore(manager.latest_checkpoint)
        assert bits == b"".join(np.array(variable.value).tobytes() for variable in arrays)
        components = [value.item() for value in largest.values]
        figures = repr((losses, last_rows, components, float(error.result())))
        return hashlib.sha256(bits + figures.encode()).hexdigest()

    first = trained([])
    report(undisturbed=first, disturbed=trained(deaths))
    report(is_chief=[rx.is_chief(), strategy.is_chief], replicas=list(strategy.topology.local_replicas))


def fit_from_other_values():
    """Reports the bits of initial values, and of trained ones, of models that each worker has begun in its own way."""
    import hashlib

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
    number = strategy.cluster_resolver.task_id
    x, y = np.ones((12, 2), "float32"), np.arange(12.0, dtype="float32")

    def bits(model):
        return hashlib.sha256(b"".join(np.array(v.value).tobytes() for v in model.weights)).hexdigest()

    keras.utils.set_random_seed(number)
    with strategy.scope():
        plain = rx.Variable(float(number))
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    report(plain=float(plain.value), initial=bits(model))
    for weight in model.weights:
        weight.assign(np.full(weight.shape, number, "float32"))
    model.fit(x, y, batch_size=6, verbose=0)
    report(trained=bits(model))


def fit_and_exit_early(leaver, code):
    """Worker ``leaver`` ends its program in the middle of the training: with this code, or by itself if it is None."""
    import sys

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def leave(batch, logs):
        if batch == 4 and strategy.cluster_resolver.task_id == leaver and code is not None:
            sys.exit(code)

    rows = 30 if strategy.cluster_resolver.task_id == leaver and code is None else 60
    options = {"verbose": 0, "callbacks": [keras.callbacks.LambdaCallback(on_train_batch_end=leave)]}
    for _ in range(rows // 6):
        model.fit(np.ones((60, 2), "float32"), np.ones(60, "float32"), batch_size=6, **options)
    report(replicas=list(strategy.topology.local_replicas))
