"""Cases that train: a line by hand, a small network by hand, and Keras models with Keras optimizers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from parity_cases.registry import case
from parity_cases.side import Side

NUM_STEPS = 5
# Two layers, five steps: a few hundred float32 operations in another order.
LOOP_RTOL = 2e-5


def wave(*shape: int, phase: float = 0.0) -> np.ndarray:
    """Fixed numbers between -1 and 1."""
    count = int(np.prod(shape))
    return np.sin(np.arange(count) * 1.7 + phase).reshape(shape).astype("float32")


def cut(rows: np.ndarray, num_replicas: int) -> list[np.ndarray]:
    """Contiguous slices whose sizes differ by at most one, larger first."""
    return np.array_split(rows, num_replicas)


def batches(sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(wave(n, 3, phase=i), wave(n, 2, phase=10.0 + i)) for i, n in enumerate(sizes)]


def initial_weights() -> list[np.ndarray]:
    return [wave(3, 4), wave(4, phase=1.0), wave(4, 2, phase=2.0), wave(2, phase=3.0)]


# Case 96: the same numbers on every strategy.


@case(96, on="S1 S2 S3 S4 C2", rtol=LOOP_RTOL, num_rows=[8, 6, 5], compiled=[False, True])
def line(side: Side, num_rows: int, compiled: bool) -> Any:
    """w·x to 2·x with squared error over global batches of 4, by hand."""
    w = side.variable(0.0, agg="ONLY_FIRST_REPLICA")
    rows = np.arange(1, num_rows + 1, dtype="float32")

    def replica_fn(x: Any) -> Any:
        with side.GradientTape() as tape:
            loss = side.nn.compute_average_loss((w * x - 2.0 * x) ** 2, global_batch_size=4)
        gradient = side.dist.get_replica_context().all_reduce("SUM", tape.gradient(loss, w))
        w.assign_sub(0.01 * gradient)
        return loss

    def step(x: Any) -> Any:
        out = side.strategy.run(replica_fn, args=(x,))
        return side.strategy.reduce("SUM", out, axis=None)

    run = side.function(step) if compiled else step
    losses = [
        run(side.per_replica(cut(rows[start : start + 4], side.num_replicas)))
        for start in range(0, num_rows, 4)
    ]
    return {"losses": losses, "w": side.read(w)}


# A network by hand.


def hand_written(side: Side, sizes: list[int], loss_fn: Callable[..., Any]) -> Any:
    """Momentum 0.9, rate 0.1, gradients summed over the replicas by hand."""
    weights = [side.variable(w) for w in initial_weights()]
    slots = [side.variable(np.zeros_like(w), trainable=False) for w in initial_weights()]

    def replica_fn(x: Any, y: Any, size: Any) -> Any:
        with side.GradientTape() as tape:
            hidden = side.tanh(x @ weights[0] + weights[1])
            loss = loss_fn(hidden @ weights[2] + weights[3], y, size)
        gradients = tape.gradient(loss, weights)
        gradients = side.dist.get_replica_context().all_reduce("SUM", gradients)

        def merge_fn(strategy: Any, gradients: Any) -> None:
            for weight, slot, gradient in zip(weights, slots, gradients, strict=True):
                strategy.extended.update(slot, lambda m, g: m.assign(0.9 * m + g), args=(gradient,))
                strategy.extended.update(weight, lambda w, m: w.assign_sub(0.1 * m), args=(slot,))

        side.dist.get_replica_context().merge_call(merge_fn, args=(gradients,))
        return loss

    @side.function
    def step(x: Any, y: Any, size: Any) -> Any:
        out = side.strategy.run(replica_fn, args=(x, y, size))
        return side.strategy.reduce("SUM", out, axis=None)

    return run_steps(side, step, sizes, weights)


def run_steps(side: Side, step: Any, sizes: list[int], weights: list[Any]) -> Any:
    losses = []
    for x, y in batches(sizes):
        size = side.array(float(len(x)))
        count = side.num_replicas
        losses.append(step(side.per_replica(cut(x, count)), side.per_replica(cut(y, count)), size))
    return {"losses": losses, "weights": [side.read(w) for w in weights]}


@case(on="S1 S2 S4", rtol=LOOP_RTOL, sizes=[[8] * NUM_STEPS, [7, 5, 7, 1, 6]])
def network_by_hand(side: Side, sizes: list[int]) -> Any:
    def loss_fn(logits: Any, y: Any, size: Any) -> Any:
        return side.sum(side.mean_of_rows((logits - y) ** 2)) / size

    return hand_written(side, sizes, loss_fn)


@case(rtol=LOOP_RTOL)
def network_by_hand_default_denominator(side: Side) -> Any:
    def loss_fn(logits: Any, y: Any, size: Any) -> Any:
        return side.nn.compute_average_loss(side.mean_of_rows((logits - y) ** 2))

    return hand_written(side, [8] * NUM_STEPS, loss_fn)


# Keras.


def keras_model(side: Side) -> Any:
    keras = side.keras()
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )
    model.set_weights(initial_weights())
    return model


def keras_optimizer(side: Side, name: str) -> Any:
    optimizers = side.keras().optimizers
    if name == "momentum":
        return optimizers.SGD(0.1, momentum=0.9)
    return {"sgd": optimizers.SGD, "adam": optimizers.Adam}[name](0.05)


def keras_weights(side: Side, model: Any) -> list[np.ndarray]:
    return [side.read(w.value) for w in model.weights]


def keras_loop(side: Side, optimizer_name: str, sizes: list[int], loss_fn: Callable[..., Any]) -> Any:
    with side.strategy.scope():
        model = keras_model(side)
        optimizer = keras_optimizer(side, optimizer_name)
        optimizer.build(model.trainable_variables)

    def replica_fn(x: Any, y: Any, size: int) -> Any:
        with side.GradientTape() as tape:
            loss = loss_fn(model, x, y, size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @side.function
    def step(x: Any, y: Any, size: int) -> Any:
        out = side.strategy.run(replica_fn, args=(x, y, size))
        return side.strategy.reduce("SUM", out, axis=None)

    losses = []
    for x, y in batches(sizes):
        count = side.num_replicas
        losses.append(step(side.per_replica(cut(x, count)), side.per_replica(cut(y, count)), len(x)))
    return {"losses": losses, "weights": keras_weights(side, model)}


def row_losses(side: Side, model: Any, x: Any, y: Any) -> Any:
    return side.mean_of_rows((model(x, training=True) - y) ** 2)


@case(on="S1 S2 S4", rtol=LOOP_RTOL, optimizer=["sgd", "momentum", "adam"])
def keras_even(side: Side, optimizer: str) -> Any:
    def loss_fn(model: Any, x: Any, y: Any, size: int) -> Any:
        return side.nn.compute_average_loss(row_losses(side, model, x, y))

    return keras_loop(side, optimizer, [8] * NUM_STEPS, loss_fn)


@case(on="S1 S2 S4", rtol=LOOP_RTOL, optimizer=["sgd", "momentum", "adam"])
def keras_uneven(side: Side, optimizer: str) -> Any:
    def loss_fn(model: Any, x: Any, y: Any, size: int) -> Any:
        return side.nn.compute_average_loss(row_losses(side, model, x, y), global_batch_size=size)

    return keras_loop(side, optimizer, [7, 5, 7, 5, 7], loss_fn)


@case(rtol=LOOP_RTOL)
def keras_uneven_default_denominator(side: Side) -> Any:
    def loss_fn(model: Any, x: Any, y: Any, size: int) -> Any:
        return side.nn.compute_average_loss(row_losses(side, model, x, y))

    return keras_loop(side, "sgd", [7, 5, 7, 5, 7], loss_fn)


@case(on="S1 S2", rtol=LOOP_RTOL, scaled=[True, False])
def keras_regularisation(side: Side, scaled: bool) -> Any:
    """Every weight is regularised; the loss is scaled as the guide says, or the scaling is forgotten."""

    def loss_fn(model: Any, x: Any, y: Any, size: int) -> Any:
        penalty = sum(side.sum(w * w) for w in model.trainable_variables) * 0.01
        if scaled:
            penalty = side.nn.scale_regularization_loss(penalty)
        return side.nn.compute_average_loss(row_losses(side, model, x, y)) + penalty

    return keras_loop(side, "momentum", [8] * NUM_STEPS, loss_fn)


@case(on="S1 S2", rtol=LOOP_RTOL, optimizer=["sgd", "adam"])
def keras_weight_in_regularisation_only(side: Side, optimizer: str) -> Any:
    """Only the regularisation loss affects two weights: equal gradients, which are summed all the same."""

    def loss_fn(model: Any, x: Any, y: Any, size: int) -> Any:
        kernel, bias = model.trainable_variables[:2]
        rows = side.mean_of_rows((side.tanh(x @ kernel + bias)) ** 2)
        others = sum(side.sum(w * w) for w in model.trainable_variables[2:])
        return side.nn.compute_average_loss(rows) + side.nn.scale_regularization_loss(others * 0.1)

    return keras_loop(side, optimizer, [8] * NUM_STEPS, loss_fn)


@case(on="S1 S2", rtol=LOOP_RTOL)
def keras_plain_arguments(side: Side) -> Any:
    """Every replica gets the full batch: R equal gradients, summed."""
    with side.strategy.scope():
        model = keras_model(side)
        opt = keras_optimizer(side, "sgd")
        opt.build(model.trainable_variables)

    def replica_fn(x: Any, y: Any) -> Any:
        with side.GradientTape() as tape:
            loss = side.nn.compute_average_loss(row_losses(side, model, x, y), global_batch_size=4)
        gradients = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step = side.function(lambda x, y: side.strategy.run(replica_fn, args=(x, y)))
    losses = [side.local(step(side.array(x), side.array(y))) for x, y in batches([4] * NUM_STEPS)]
    return {"losses": losses, "weights": keras_weights(side, model)}


@case(on="S1 S2", rtol=LOOP_RTOL, op=["SUM", "MEAN"])
def keras_all_reduced_before_apply(side: Side, op: str) -> Any:
    """The user has reduced the gradients already and gives them to the optimizer."""
    with side.strategy.scope():
        model = keras_model(side)
        opt = keras_optimizer(side, "sgd")
        opt.build(model.trainable_variables)

    def replica_fn(x: Any, y: Any) -> Any:
        with side.GradientTape() as tape:
            loss = side.nn.compute_average_loss(row_losses(side, model, x, y))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = side.dist.get_replica_context().all_reduce(op, gradients)
        opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @side.function
    def step(x: Any, y: Any) -> Any:
        return side.strategy.reduce("SUM", side.strategy.run(replica_fn, args=(x, y)), axis=None)

    losses = []
    for x, y in batches([8] * NUM_STEPS):
        xs, ys = (side.per_replica(cut(a, side.num_replicas)) for a in (x, y))
        losses.append(step(xs, ys))
    return {"losses": losses, "weights": keras_weights(side, model)}


@case(rtol=LOOP_RTOL, op=["SUM", "MEAN"])
def keras_all_reduced_by_hand(side: Side, op: str) -> Any:
    """The user reduces the gradients and updates the weights with assign_sub."""
    with side.strategy.scope():
        model = keras_model(side)

    def replica_fn(x: Any, y: Any) -> Any:
        with side.GradientTape() as tape:
            loss = side.nn.compute_average_loss(row_losses(side, model, x, y))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = side.dist.get_replica_context().all_reduce(op, gradients)
        for weight, gradient in zip(model.trainable_variables, gradients, strict=True):
            weight.assign_sub(0.05 * gradient)
        return loss

    @side.function
    def step(x: Any, y: Any) -> Any:
        return side.strategy.reduce("SUM", side.strategy.run(replica_fn, args=(x, y)), axis=None)

    losses = []
    for x, y in batches([8] * NUM_STEPS):
        xs, ys = (side.per_replica(cut(a, side.num_replicas)) for a in (x, y))
        losses.append(step(xs, ys))
    return {"losses": losses, "weights": keras_weights(side, model)}


# What evaluation reads, and how the gradient of a table is clipped.

# Two replicas see different rows.
NORMALISED_ROWS = np.array([[1.0, 0.0], [3.0, 2.0], [7.0, 10.0], [5.0, 4.0]], "float32")
DENOMINATOR = 5.0
TABLE = np.array([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0], [-1.0, 3.0]], "float32")
LOOKED_UP = {"once": [0, 1, 2, 3], "again": [0, 1, 1, 1]}


@case(on="S1 S2")
def keras_moving_statistics_read_in_run(side: Side) -> Any:
    """One step of training, then evaluation in ``run``: what it computes, and what the variables are after it."""
    with side.strategy.scope():
        layer = side.keras().layers.BatchNormalization(momentum=0.5, epsilon=0.0)
        layer.build((None, 2))

    def train(x: Any) -> Any:
        return layer(x, training=True)

    def evaluate(x: Any) -> Any:
        return layer(x, training=False)

    rows = side.per_replica(cut(NORMALISED_ROWS, side.num_replicas))
    side.function(lambda x: side.strategy.run(train, args=(x,)))(rows)
    evaluated = side.function(lambda x: side.strategy.run(evaluate, args=(x,)))(rows)
    statistics = (layer.moving_mean, layer.moving_variance)
    return {
        "evaluated": side.local(evaluated),
        "mean and variance": [side.read(w.value) for w in statistics],
    }


@case(on="S1 S2", clip=["global_clipnorm", "clipnorm", "clipvalue"], rows=list(LOOKED_UP))
def keras_clipped_table(side: Side, clip: str, rows: str) -> Any:
    """One step of SGD with a clipped gradient, whose rows a batch looks up once, or one of them again."""
    keras = side.keras()
    with side.strategy.scope():
        layer = keras.layers.Embedding(4, 2)
        layer.build()
        layer.embeddings.assign(TABLE)
        optimizer = keras.optimizers.SGD(1.0, **{clip: 0.5})
        optimizer.build(layer.trainable_variables)

    def replica_fn(ids: Any) -> None:
        with side.GradientTape() as tape:
            loss = side.sum(layer(ids) ** 2) / DENOMINATOR
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

    ids = side.per_replica(cut(np.array(LOOKED_UP[rows], "int32"), side.num_replicas))
    side.function(lambda x: side.strategy.run(replica_fn, args=(x,)))(ids)
    return side.read(layer.embeddings.value)


@case(on="S1", rows=list(LOOKED_UP))
def norm_of_the_gradient_of_a_table(side: Side, rows: str) -> Any:
    """The norm by which ``clip_by_global_norm`` divides."""
    layer = side.keras().layers.Embedding(4, 2)
    layer.build()
    layer.embeddings.assign(TABLE)

    def replica_fn(ids: Any) -> Any:
        with side.GradientTape() as tape:
            loss = side.sum(layer(ids) ** 2) / DENOMINATOR
        return side.global_norm(tape.gradient(loss, layer.trainable_variables))

    ids = side.per_replica([np.array(LOOKED_UP[rows], "int32")])
    return side.local(side.function(lambda x: side.strategy.run(replica_fn, args=(x,)))(ids))
