"""The forms in which ``fit``, ``evaluate`` and ``predict`` get rows, each for any model's rows.

A feed is a function of (x, y, strategy). Without a strategy it is given to the oracle: plain Keras does not know
replicax's datasets, and gets the same rows as arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import grain
import keras
import numpy as np

from replicax import data as rx_data

BATCH = 64


@dataclass(frozen=True)
class Calls:
    """The arguments of each call; those of an omitted call are None, because each costs two compilations."""

    fit: dict
    evaluate: dict | None = None
    predict: dict | None = None
    compile: dict = field(default_factory=dict)


def taken(tree, index):
    return keras.tree.map_structure(lambda rows: rows[index], tree)


def num_rows(tree):
    return len(keras.tree.flatten(tree)[0])


def weights_of(x):
    """Some are 0, and the last batch's are larger, so that means per batch or per replica show."""
    return np.linspace(0.0, 2.0, num_rows(x), dtype="float32") * (np.arange(num_rows(x)) % 4 != 1)


def arrays(x, y, strategy, **more):
    """Shuffled by Keras, with NumPy's global generator."""
    return Calls(
        fit={"x": x, "y": y, "batch_size": BATCH, **{"epochs": 2, **more}},
        evaluate={"x": x, "y": y, "batch_size": BATCH},
        predict={"x": x, "batch_size": BATCH},
    )


def fit_only(x, y, strategy, **more):
    return Calls(arrays(x, y, strategy, **more).fit)


def with_compile(**options):
    return lambda x, y, strategy: Calls(**{**vars(arrays(x, y, strategy)), "compile": options})


def sample_weight(x, y, strategy):
    weights = weights_of(x)
    calls = arrays(x, y, strategy, sample_weight=weights)
    return Calls(calls.fit, {**calls.evaluate, "sample_weight": weights})


def class_weight(x, y, strategy):
    return fit_only(x, y, strategy, class_weight={0: 0.5, 1: 2.0, 2: 1.0})


def validation_split(x, y, strategy):
    return fit_only(x, y, strategy, validation_split=0.3)


def validation_data(x, y, strategy):
    last = slice(-71, None)
    return fit_only(x, y, strategy, validation_data=(taken(x, last), taken(y, last), weights_of(x)[last]))


def steps_per_epoch(x, y, strategy):
    """Two steps count as an epoch: the second epoch has the rest of the rows."""
    return fit_only(x, y, strategy, steps_per_epoch=2, validation_data=(x, y), validation_steps=1)


def initial_epoch(x, y, strategy):
    return fit_only(x, y, strategy, initial_epoch=1, epochs=3)


def few_rows(x, y, strategy):
    """Batches of 5 rows, and the last of 1: replicas without a row."""
    first = slice(31)
    calls = arrays(taken(x, first), taken(y, first), strategy)
    return Calls({**calls.fit, "batch_size": 5}, predict={**calls.predict, "batch_size": 5})


def run_eagerly(x, y, strategy):
    return Calls(fit_only(x, y, strategy).fit, compile={"run_eagerly": True})


def from_dataset(dataset, **steps):
    """``dataset``: makes one, in the order of the rows."""
    return Calls(
        fit={"x": dataset(), "epochs": 2, "shuffle": False, **steps},
        evaluate={"x": dataset(), **({"steps": 4} if steps else {})},
        predict={"x": dataset(), **({"steps": 4} if steps else {})},
    )


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.rows = (x, y)

    def __len__(self):
        return -(-num_rows(self.rows) // BATCH)

    def __getitem__(self, index):
        return taken(self.rows, slice(index * BATCH, (index + 1) * BATCH))


def py_dataset(x, y, strategy):
    """Keras shuffles its batches, with Python's global generator."""
    return Calls(
        fit={"x": Batches(x, y), "epochs": 2},
        evaluate={"x": Batches(x, y)},
        predict={"x": Batches(x, y)},
    )


class Rows:
    """One element for each row, as Grain's sources are."""

    def __init__(self, x, y):
        self.rows = (x, y)

    def __len__(self):
        return num_rows(self.rows)

    def __getitem__(self, index):
        return taken(self.rows, int(index))


def grain_map(x, y, strategy):
    return from_dataset(lambda: grain.MapDataset.source(Rows(x, y)).batch(BATCH))


def grain_iter(x, y, strategy):
    return from_dataset(lambda: grain.MapDataset.source(Rows(x, y)).to_iter_dataset().batch(BATCH))


def generator(x, y, strategy):
    def endless():
        while True:
            for start in range(0, num_rows(x), BATCH):
                yield taken((x, y), slice(start, start + BATCH))

    return from_dataset(endless, steps_per_epoch=4)


def in_order(x, y, strategy):
    return arrays(x, y, strategy, shuffle=False)


def ours(dataset: Callable):
    """``dataset`` is made from (strategy, (x, y)), and given to the model of the strategy."""

    def feed(x, y, strategy):
        if strategy is None:
            return in_order(x, y, strategy)
        return from_dataset(lambda: dataset(strategy, (x, y)))

    return feed


def batched(rows):
    return rx_data.from_arrays(rows).batch(BATCH)


FEEDS = {
    "arrays": arrays,
    "fit_only": fit_only,
    "in_order": in_order,
    "sample_weight": sample_weight,
    "class_weight": class_weight,
    "validation_split": validation_split,
    "validation_data": validation_data,
    "steps_per_epoch": steps_per_epoch,
    "initial_epoch": initial_epoch,
    "few_rows": few_rows,
    "steps_per_execution": with_compile(steps_per_execution=3),
    "run_eagerly": run_eagerly,
    "without_jit": with_compile(jit_compile=False),
    "py_dataset": py_dataset,
    "grain_map": grain_map,
    "grain_iter": grain_iter,
    "generator": generator,
    "rx_data": ours(lambda strategy, rows: batched(rows)),
    "distributed_dataset": ours(
        lambda strategy, rows: strategy.experimental_distribute_dataset(batched(rows))
    ),
    "distributed_from_function": ours(
        lambda strategy, rows: strategy.distribute_datasets_from_function(
            lambda context: rx_data.from_arrays(rows).batch(context.get_per_replica_batch_size(BATCH))
        )
    ),
}
