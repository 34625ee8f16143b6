"""``rx.keras.callbacks.TensorBoard`` writes the files of Keras's callback, under every strategy, without TensorFlow."""

import importlib.util
import json

import keras
import numpy as np
import pytest

import replicax as rx
import trace_files
from event_files import files_in, scalars_in, summaries_in

X, Y = np.linspace(-1, 1, 16, dtype="float32").reshape(8, 2), np.ones((8, 1), "float32")
STRATEGIES = {
    "none": lambda: None,
    "one device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "mirrored": lambda: rx.MirroredStrategy(2),
    "central storage": lambda: rx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0"),
    "divided": lambda: rx.MirroredStrategy(2, shard_state="all"),
}


def model_of():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, name="hidden"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.125), "mse", metrics=["mae"])
    return model


def made(strategy):
    if strategy is None:
        return model_of()
    with strategy.scope():
        return model_of()


def fitted(logdir, epochs=2, model=None, **options):
    model = model or made(rx.MirroredStrategy(2))
    callback = rx.keras.callbacks.TensorBoard(logdir, **options)
    history = model.fit(
        X, Y, batch_size=4, epochs=epochs, validation_data=(X, Y), verbose=0, callbacks=[callback]
    )
    return model, history.history


@pytest.mark.parametrize("name", STRATEGIES)
def test_epochs_are_written_as_fit_returned_them(name, tmp_path):
    _, history = fitted(tmp_path, model=made(STRATEGIES[name]()), histogram_freq=1)
    train, validation = scalars_in(tmp_path / "train"), scalars_in(tmp_path / "validation")
    assert train.keys() == {"epoch_loss", "epoch_mae", "epoch_learning_rate"}
    assert validation.keys() == {
        "epoch_loss",
        "epoch_mae",
        "evaluation_loss_vs_iterations",
        "evaluation_mae_vs_iterations",
    }
    for metric in ("loss", "mae"):
        for epoch in range(2):
            assert train[f"epoch_{metric}"][epoch] == pytest.approx(history[metric][epoch])
            assert validation[f"epoch_{metric}"][epoch] == pytest.approx(history[f"val_{metric}"][epoch])
        of_steps = validation[f"evaluation_{metric}_vs_iterations"]
        assert list(of_steps) == [2, 4], "of the optimizer's steps"
    assert train["epoch_learning_rate"] == {0: 0.125, 1: 0.125}
    tables = {n: v for plugin, n, step, v in summaries_in(tmp_path / "train") if plugin == "histograms"}
    assert any(n.endswith("hidden/kernel/histogram") for n in tables)
    assert all(table[:, 2].sum() in (8, 4, 1) for table in tables.values())


def test_batches_rates_graph_and_images(tmp_path):
    model, _ = fitted(
        tmp_path, update_freq=2, write_steps_per_second=True, histogram_freq=2, write_images=True, epochs=3
    )
    train = scalars_in(tmp_path / "train")
    assert list(train["batch_loss"]) == list(train["batch_steps_per_second"]) == [2, 4, 6]
    assert list(train["epoch_steps_per_second"]) == [0, 1, 2]
    assert all(rate > 0 for rate in train["epoch_steps_per_second"].values())
    found = summaries_in(tmp_path / "train")
    graphs = [value for plugin, name, _, value in found if (plugin, name) == ("graph_keras_model", "keras")]
    (described,) = [json.loads(one) for (one,) in graphs]
    assert described["config"]["name"] == model.name
    assert {step for plugin, _, step, _ in found if plugin == "histograms"} == {0, 2}
    images = {name: value for plugin, name, _, value in found if plugin == "images"}
    kernel = next(value for name, value in images.items() if name.endswith("hidden/kernel/image"))
    assert kernel[:2] == [b"4", b"2"]
    assert kernel[2].startswith(b"\x89PNG")


def test_evaluate_alone_writes_the_validation_run(tmp_path):
    model = made(rx.MirroredStrategy(2))
    model.fit(X, Y, batch_size=4, verbose=0)
    logs = model.evaluate(
        X, Y, verbose=0, callbacks=[rx.keras.callbacks.TensorBoard(tmp_path)], return_dict=True
    )
    found = scalars_in(tmp_path)
    assert found["evaluation_loss_vs_iterations"] == {2: pytest.approx(logs["loss"])}
    assert [path.parent.name for path in files_in(tmp_path)] == ["validation"]


def test_batches_are_profiled(tmp_path):
    fitted(tmp_path, epochs=2, profile_batch=(2, 3))
    (path,) = trace_files.files_in(tmp_path / "train")
    names = [name for name, stats in trace_files.events_in(path) if "step_num" in stats]
    assert names.count("Sequential.train_step") == 2


@pytest.mark.parametrize("make", [lambda: None, lambda: rx.MirroredStrategy(2)], ids=["keras", "mirrored"])
def test_failed_fit_ends_its_profile_and_the_next_one_restarts(make, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ZeroDivisionError

    model, callback = made(make()), rx.keras.callbacks.TensorBoard(tmp_path, profile_batch=1)
    with pytest.raises(ZeroDivisionError):
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Stop(), callback])
    assert trace_files.files_in(tmp_path / "train")
    with rx.profile(tmp_path / "by_hand"):
        pass
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[callback])
    assert list(scalars_in(tmp_path / "train")["epoch_loss"]) == [0]


def test_resumed_fit_continues_its_count_of_batches(tmp_path):
    callback = rx.keras.callbacks.TensorBoard(tmp_path, update_freq="batch")
    callback.set_state({"num_batches": 10})
    made(None).fit(X, Y, batch_size=4, verbose=0, callbacks=[callback])
    assert list(scalars_in(tmp_path / "train")["batch_loss"]) == [11, 12]
    assert callback.get_state() == {"num_batches": 12}


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"embeddings_freq": 1}, rx.errors.UnsupportedError, "Leave embeddings_freq"),
        ({"embeddings_metadata": {}}, rx.errors.UnsupportedError, "checkpoints of TensorFlow"),
        ({"update_freq": "step"}, rx.errors.InvalidArgumentError, '"epoch", "batch"'),
        ({"update_freq": 0}, rx.errors.InvalidArgumentError, "at least 1"),
        ({"profile_batch": (3, 2)}, rx.errors.InvalidArgumentError, r"such as \(10, 20\)"),
        ({"profile_batch": "a"}, rx.errors.InvalidArgumentError, "Got 'a'"),
    ],
)
def test_unsupported_arguments(options, kind, said):
    with pytest.raises(kind, match=said):
        rx.keras.callbacks.TensorBoard("logs", **options)


def test_keras_own_without_tensorflow_names_ours(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorflow" else found(name, *rest)
    )
    with pytest.raises(rx.errors.MissingExtraError, match=r"Use rx\.keras\.callbacks\.TensorBoard"):
        made(rx.MirroredStrategy(2)).fit(X, Y, verbose=0, callbacks=[keras.callbacks.TensorBoard(tmp_path)])
