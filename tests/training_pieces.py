"""Pieces of programs that tests launch. ``launched_jobs.source_of`` puts them before the source of a program."""


def iterator_over(strategy, rows, *, seed, batch_size):
    """An endless distributed iterator over shuffled rows."""
    import replicax as rx

    dataset = rx.data.from_arrays(rows).shuffle(seed=seed).repeat().batch(batch_size)
    return iter(strategy.experimental_distribute_dataset(dataset))


def momentum_training(strategy, batch_size):
    """A step with momentum and a random mask for the global batch: ``update(batch)``, its variables and its data."""
    import types

    import jax
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    rng = np.random.default_rng(0)
    rows = rng.standard_normal((1000, 8)).astype(np.float32)
    with strategy.scope():
        step = rx.Variable(0)
        weights = [rx.Variable(rng.standard_normal(shape).astype(np.float32)) for shape in ((8, 16), (16, 1))]
        velocities = [rx.Variable(jnp.zeros(weight.shape)) for weight in weights]

    def update(batch):
        x, y = batch
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(7), step.value), 0.8, (16,))
        with rx.GradientTape() as tape:
            hidden = jnp.tanh(x @ weights[0].value) * kept
            loss = rx.nn.compute_average_loss((hidden @ weights[1].value - y)[:, 0] ** 2)
        gradients = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
            velocity.assign(0.9 * velocity - 0.01 * gradient)
            weight.assign_add(velocity.value)
        step.assign_add(1)
        return loss

    return types.SimpleNamespace(
        step=step,
        weights=weights,
        velocities=velocities,
        iterator=iterator_over(strategy, (rows, rows[:, :1]), seed=1, batch_size=batch_size),
        update=update,
    )


def model_with_random_layers(strategy, *, units=16, outputs=1):
    """A compiled Keras model with dropout and batch normalisation."""
    import keras

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(units, "tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(outputs),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def restored_manager(checkpoint, step_counter):
    """A manager that has restored the newest checkpoint. It saves on failure only: its interval is longer than the
    programs.
    """
    import os

    import replicax as rx

    manager = rx.CheckpointManager(
        checkpoint,
        os.environ["REPLICAX_CHECKPOINT_DIR"],
        step_counter=step_counter,
        checkpoint_interval=1000,
        save_on_failure=True,
    )
    manager.restore_or_initialize()
    return manager


def bits_of(variables, *others):
    """A digest of the values of variables, and of the text of other objects."""
    import hashlib

    digest = hashlib.sha256(repr(others).encode())
    for variable in variables:
        digest.update(variable.numpy().tobytes())
    return digest.hexdigest()[:16]


def model_of_kind(kind):
    """A Keras model that is not compiled, and the arguments of ``compile``.

    Args:
      kind: ``"plain"`` (layers and momentum), ``"normalized"`` (two batch normalisations), ``"dropped"`` (dropout, a
        clipped norm, metrics), ``"half"`` (float16 with a scaled loss) or ``"accumulated"`` (gradients of three steps).
    """
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    hidden = {
        "plain": [layers.Dense(32, "tanh"), layers.Dense(32, "tanh")],
        "normalized": [
            layers.Dense(32, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(16, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        ],
        "dropped": [
            layers.Dense(32, "relu"),
            layers.Dropout(0.3),
            layers.Dense(16, "relu"),
            layers.Dropout(0.2),
        ],
        "half": [
            layers.Dense(32, "relu", dtype="mixed_float16"),
            layers.BatchNormalization(dtype="mixed_float16"),
        ],
        "accumulated": [layers.Dense(32, "tanh")],
    }[kind]
    optimizer = {
        "plain": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "normalized": lambda: keras.optimizers.Adam(0.01),
        "dropped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        "half": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=2.0**10
        ),
        "accumulated": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=3),
    }[kind]()
    metrics = ["mae", keras.metrics.RootMeanSquaredError()] if kind == "dropped" else ["mae"]
    model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(1, dtype="float32")])
    return model, {"optimizer": optimizer, "loss": "mse", "metrics": metrics}


def rows_to_learn(num_rows):
    """Features and one label for each row."""
    import numpy as np

    features = np.random.default_rng(0).standard_normal((num_rows, 8)).astype(np.float32)
    return features, np.tanh(features.sum(axis=1, keepdims=True))


class Moments:
    """Kills this task at some moments, once each, and makes the chief wait for a replacement at others.

    Args:
      number: The number of this task.
      dies: A task's number and a moment, for each death.
      waits: The moments at which the chief waits until a replacement asks to enter.
      preempts: A task's number and a moment, for each SIGTERM.
    """

    def __init__(self, number, dies, waits, preempts=()):
        import os

        self._number, self._dies, self._waits, self._preempts = number, dies, set(waits), preempts
        self._folder = os.environ["REPLICAX_CHECKPOINT_DIR"]

    def reach(self, moment):
        import os
        import signal
        import time

        import replicax as rx
        from replicax._src.cluster.peers import joined_peers

        print(f"at {moment}\n", end="", flush=True)
        for moments, number, word in (
            (self._dies, signal.SIGKILL, "dies"),
            (self._preempts, signal.SIGTERM, "ends"),
        ):
            mark = os.path.join(self._folder, f".{word}-{self._number}-{moment.replace(' ', '-')}")
            if (self._number, moment) in moments and not os.path.exists(mark):
                with open(mark, "w"):
                    pass
                print(f"{word} at {moment}\n", end="", flush=True)
                os.kill(os.getpid(), number)
        if moment in self._waits and rx.is_chief():
            self._waits.remove(moment)
            deadline = time.monotonic() + 200
            while not joined_peers().admission.is_asked:
                assert time.monotonic() < deadline, "no replacement has come"
                time.sleep(0.05)
