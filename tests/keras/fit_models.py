"""Small compiled models with their training rows: one for each form of Keras training.

Weights whose gradient is zero except for rounding (a bias before batch normalisation) are trained with SGD: Adam would
turn the rounding into full-sized steps, on one device too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers

ROWS = 199
CLASSES = 3


@dataclass(frozen=True)
class Subject:
    """A model and its rows. ``build(**options)`` returns the compiled model; ``options`` go to ``compile``."""

    build: Callable[..., keras.Model]
    rows: Callable[[], tuple]
    rtol: float = 1e-5  # of losses, metrics and predictions
    prediction_atol: float = 1e-6
    weight_rtol: float = 1e-4
    weight_atol: float = 1e-5


def features(*shape):
    return np.random.default_rng(1).normal(size=(ROWS, *shape)).astype("float32")


def labels():
    return np.random.default_rng(2).integers(0, CLASSES, size=ROWS).astype("int32")


def one_hot_labels():
    return np.eye(CLASSES, dtype="float32")[labels()]


def tokens():
    """[rows, 5] ids, with 0 after the end of a row: every number of tokens from 1 to 5 occurs."""
    ids = np.random.default_rng(3).integers(1, 11, size=(ROWS, 5)).astype("int32")
    return np.where(np.arange(5) <= np.arange(ROWS)[:, None] % 5, ids, 0).astype("int32")


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def classifier(model, optimizer=None, **options):
    model.compile(
        optimizer or sgd(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def dense(**options):
    hidden = layers.Dense(8, activation="relu", kernel_regularizer="l2", activity_regularizer="l1")
    return classifier(
        keras.Sequential(
            [
                keras.Input((6,)),
                hidden,
                layers.BatchNormalization(momentum=0.7),
                layers.Dropout(0.3),
                layers.Dense(CLASSES),
            ]
        ),
        **options,
    )


def built_by_fit(**options):
    return classifier(
        keras.Sequential(
            [
                layers.GaussianNoise(0.3),
                layers.Dense(6),
                layers.BatchNormalization(momentum=0.7),
                layers.Dense(CLASSES),
            ]
        ),
        **options,
    )


def convolution(**options):
    return classifier(
        keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Conv2D(3, 3),
                layers.BatchNormalization(momentum=0.7),
                layers.ReLU(),
                layers.GlobalAveragePooling2D(),
                layers.Dense(CLASSES),
            ]
        ),
        **options,
    )


def lstm(**options):
    return classifier(
        keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(11, 4, mask_zero=True),
                layers.LSTM(4, dropout=0.2, recurrent_dropout=0.1),
                layers.Dense(CLASSES),
            ]
        ),
        **options,
    )


def gru_per_time_step(**options):
    """The loss is a mean over the unmasked entries, whose number differs between rows."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(11, 4, mask_zero=True),
            layers.GRU(4, return_sequences=True),
            layers.Dense(1),
        ]
    )
    model.compile(sgd(), "mean_squared_error", metrics=["mean_absolute_error"], **options)
    return model


def attention(**options):
    x = keras.Input((5, 4))
    attended = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3, dropout=0.1)(x, x))
    outputs = layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(attended))
    return classifier(keras.Model(x, outputs), **options)


def inputs_and_outputs(**options):
    """Two named inputs and outputs, whose losses have weights."""
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    hidden = layers.Dense(5, activation="tanh")(layers.Concatenate()([left, right]))
    outputs = {
        "kind": layers.Dense(CLASSES, name="kind")(hidden),
        "size": layers.Dense(1, name="size")(hidden),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        sgd(),
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        loss_weights={"kind": 0.3, "size": 0.7},
        metrics={"kind": ["accuracy"], "size": ["mae", keras.metrics.RootMeanSquaredError(name="rmse")]},
        **options,
    )
    return model


class WithAddLoss(keras.Model):
    """Its own loss is not a mean over rows: it is the variance of the hidden units over the batch."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(5, activation="tanh"), layers.Dense(CLASSES)

    def call(self, x):
        hidden = self.hidden(x)
        self.add_loss(0.5 * keras.ops.mean(keras.ops.var(hidden, axis=0)))
        return self.out(hidden)


class WithTrainStep(keras.Model):
    """Its ``train_step`` sees the global batch, so that a mean in it is one over all rows."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(5, activation="tanh"), layers.Dense(CLASSES)
        self.dropout = layers.Dropout(0.2)

    def call(self, x, training=False):
        return self.out(self.dropout(self.hidden(x), training=training))

    def penalised_loss(self, trainable, non_trainable, x, y):
        logits, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        loss = self.compute_loss(x, y, logits) + 0.1 * jnp.mean(jnp.var(logits, axis=0))
        return loss, (logits, non_trainable)

    def train_step(self, state, data):
        trainable, non_trainable, bindings, metric_state = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self.penalised_loss, has_aux=True)
        (loss, (logits, non_trainable)), grads = gradient(trainable, non_trainable, x, y)
        trainable, bindings = self.optimizer.stateless_apply(bindings, grads, trainable)
        logs, new_metric_state = {}, []
        for metric in self.metrics:
            size = len(metric.variables)
            before = metric_state[len(new_metric_state) : len(new_metric_state) + size]
            values = (loss,) if metric.name == "loss" else (y, logits)
            after = metric.stateless_update_state(before, *values)
            logs[metric.name] = metric.stateless_result(after)
            new_metric_state += after
        logs["spread"] = jnp.max(logits) - jnp.min(logits)
        return logs, (trainable, non_trainable, bindings, new_metric_state)


def add_loss(**options):
    return classifier(WithAddLoss(), **options)


def custom_train_step(**options):
    return classifier(WithTrainStep(), **options)


def plain(optimizer, **options):
    return classifier(
        keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(CLASSES)]),
        optimizer,
        **options,
    )


def mixed_bfloat16(**options):
    policy = "mixed_bfloat16"
    return classifier(
        keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="relu", dtype=policy),
                layers.BatchNormalization(momentum=0.7, dtype=policy),
                layers.Dense(CLASSES, dtype=policy),
            ]
        ),
        **options,
    )


def frozen(**options):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(CLASSES),
        ]
    )
    model.layers[0].trainable = False
    model.layers[1].trainable = False
    return classifier(model, **options)


def loss_scaled(**options):
    return plain(
        keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0, dynamic_growth_steps=3), **options
    )


def accumulating(**options):
    return plain(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), **options)


def averaged(**options):
    optimizer = keras.optimizers.AdamW(
        0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=None
    )
    return plain(optimizer, **options)


def clipped(**options):
    return plain(keras.optimizers.SGD(0.3, momentum=0.9, nesterov=True, global_clipnorm=0.2), **options)


def stateful_metrics(**options):
    metrics = keras.metrics
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(1, activation="sigmoid")]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        "binary_crossentropy",
        metrics=[metrics.AUC(name="auc"), metrics.Precision(name="precision"), metrics.Recall(name="recall")],
        weighted_metrics=[metrics.BinaryIoU(name="iou"), metrics.RootMeanSquaredError(name="rmse")],
        **options,
    )
    return model


def dice(**options):
    """Dice is a ratio of sums over the global batch: the mean of the replicas' ratios is another number."""
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(CLASSES, activation="softmax")]
    )
    model.compile(sgd(), keras.losses.Dice(), metrics=["categorical_accuracy"], **options)
    return model


def classified(*shape):
    return lambda: (features(*shape), labels())


def named_rows():
    x = features(6)
    return {"left": x[:, :4], "right": x[:, 4:]}, {"kind": labels(), "size": x[:, :1] ** 2}


SUBJECTS = {
    "dense": Subject(dense, classified(6)),
    "built_by_fit": Subject(built_by_fit, classified(6)),
    "convolution": Subject(convolution, classified(6, 6, 1)),
    "lstm": Subject(lstm, lambda: (tokens(), labels())),
    "gru_per_time_step": Subject(gru_per_time_step, lambda: (tokens(), features(5, 1))),
    "attention": Subject(attention, classified(5, 4)),
    "inputs_and_outputs": Subject(inputs_and_outputs, named_rows),
    "add_loss": Subject(add_loss, classified(6)),
    "custom_train_step": Subject(custom_train_step, classified(6)),
    # bfloat16 has 8 bits: sums in another order are rounded to a neighbouring number, 2**-8 away. One row of 199 may be classified
    # otherwise.
    "mixed_bfloat16": Subject(
        mixed_bfloat16, classified(6), rtol=1.5e-2, prediction_atol=2e-2, weight_rtol=1e-2, weight_atol=5e-3
    ),
    "frozen": Subject(frozen, classified(6)),
    "loss_scaled": Subject(loss_scaled, classified(6)),
    "accumulating": Subject(accumulating, classified(6)),
    "averaged": Subject(averaged, classified(6)),
    "clipped": Subject(clipped, classified(6)),
    "stateful_metrics": Subject(
        stateful_metrics, lambda: (features(6), (labels()[:, None] > 0).astype("float32"))
    ),
    "dice": Subject(dice, lambda: (features(6), one_hot_labels())),
}
