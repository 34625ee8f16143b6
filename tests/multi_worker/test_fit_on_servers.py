"""A model that servers train learns as on one device."""

import keras
import numpy as np
import pytest

import replicax as rx

pytestmark = [
    pytest.mark.rest,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]


def same(one, other, atol=1e-6):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(other[name], one[name], rtol=0, atol=atol, err_msg=name)


def digits_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


@pytest.mark.long
def test_digits_on_two_workers_are_learnt_as_on_one_device():
    from sklearn.datasets import load_digits  # takes long

    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(images))
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    held_out = {"x": images[1437:], "y": labels[1437:], "verbose": 0}

    def dataset_fn():
        while True:
            for start in range(0, 1400, 50):
                yield images[start : start + 50], labels[start : start + 50]

    def accuracy(model):
        keras.utils.set_random_seed(1)
        model.fit(images[:1437], labels[:1437], epochs=12, verbose=0)
        return model.evaluate(**held_out)[1]

    reached = accuracy(digits_model())
    with rx.testing.server_cluster(workers=2, ps=2), rx.ParameterServerStrategy() as strategy:
        with strategy.scope():
            model = digits_model()
        found = accuracy(model)
        assert reached > 0.95
        assert found > reached - 0.02
        assert model.optimizer.iterations.value == 12 * 45
        local = digits_model()
        local.set_weights(model.get_weights())
        same(*(m.evaluate(**held_out, return_dict=True) for m in (local, model)))
        predicted = (m.predict(held_out["x"], verbose=0) for m in (local, model))
        np.testing.assert_allclose(*predicted, rtol=0, atol=1e-5)
        history = model.fit(dataset_fn, steps_per_epoch=28, verbose=0).history
        assert history["accuracy"][0] > 0.95
