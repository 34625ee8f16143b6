"""The files, arguments and errors of a ``SummaryWriter``, under the strategies of one process."""

import io
import threading
import time
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from PIL import Image

import replicax as rx
from checks import tpu_strategy
from event_files import events_of, files_in, scalars_in, summaries_in
from replicax._src.summaries import writer as writer_module
from replicax.errors import ContextError, InvalidArgumentError, PerReplicaUseError, SummaryError

STRATEGIES = {
    "default": rx.get_strategy,
    "one": lambda: rx.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "tpu": lambda: tpu_strategy(2, 1),
}


def test_numbers_histograms_images_and_texts_are_in_the_file(tmp_path):
    picture = np.zeros((2, 3, 4, 3), np.uint8)
    picture[..., 0] = 255
    with rx.SummaryWriter(tmp_path / "run") as writer:
        assert writer.scalar("loss", 1.5, 0)
        assert writer.scalar("train loss", jnp.float32(0.5), np.int64(2**40))
        assert writer.histogram("weights", jnp.asarray([0.0, 1.0, 2.0, jnp.nan]), 1, buckets=2)
        assert writer.image("pictures", picture, 2, max_outputs=1)
        assert writer.image("grey", jnp.full((1, 3, 4, 1), 0.5, jnp.bfloat16), 2)
        assert writer.text("note", "**bold**", 3, description="a note")
        assert writer.text("table", [["a", "b"], ["c", "d"]], 3)
    (path,) = files_in(tmp_path / "run")
    assert next(events_of(path)).file_version == "brain.Event:2"
    found = {name: (plugin, step, value) for plugin, name, step, value in summaries_in(tmp_path)}
    assert found["loss"] == ("scalars", 0, 1.5)
    assert found["train loss"] == ("scalars", 2**40, 0.5)
    assert found["weights"][2].tolist() == [[0, 1, 1], [1, 2, 2]]
    width, height, png = found["pictures"][2]
    assert (width, height) == (b"4", b"3")
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))), picture[0])
    assert np.asarray(Image.open(io.BytesIO(found["grey"][2][2]))).tolist() == [[127] * 4] * 3
    assert found["note"] == ("text", 3, [b"**bold**"])
    assert found["table"] == ("text", 3, [b"a", b"b", b"c", b"d"])


@pytest.mark.parametrize("values", [[], [float("nan")], [2.0, 2.0]])
def test_a_histogram_of_nothing_or_of_one_value_is_tensorflows(tmp_path, values):
    with rx.SummaryWriter(tmp_path) as writer:
        writer.histogram("h", np.asarray(values), 0, buckets=3)
    ((_, _, _, table),) = summaries_in(tmp_path)
    expected = np.zeros((3, 3)) if 2.0 not in values else [[2, 2, 0], [2, 2, 0], [2, 2, 2]]
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_results_of_strategies_are_written(tmp_path, kind):
    strategy = STRATEGIES[kind]()
    with strategy.scope():
        total = rx.Variable(
            0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=rx.VariableAggregation.SUM
        )
        steps = rx.Variable(0, trainable=False, aggregation=rx.VariableAggregation.ONLY_FIRST_REPLICA)
        metric = keras.metrics.Mean(name="mean")

    def step_fn(x):
        total.assign_add(x)
        steps.assign_add(1)
        metric.update_state(x)
        return 2.0 * x

    count = strategy.num_replicas_in_sync
    with rx.SummaryWriter(tmp_path, strategy=strategy) as writer:
        for _ in range(3):
            result = strategy.run(step_fn, args=(jnp.float32(1),))
            writer.scalar("reduced", strategy.reduce("SUM", result, axis=None), steps)
            writer.scalar("on_read", total, steps)
            writer.scalar("metric", metric.result(), steps)
    assert scalars_in(tmp_path) == {
        "reduced": dict.fromkeys((1, 2, 3), 2.0 * count),
        "on_read": {step: float(step * count) for step in (1, 2, 3)},
        "metric": dict.fromkeys((1, 2, 3), 1.0),
    }


def test_value_at_the_call_is_written_even_if_its_memory_is_donated(tmp_path):
    give = jax.jit(lambda x: x + 1, donate_argnums=0)
    host = np.zeros(1000)
    with rx.SummaryWriter(tmp_path) as writer:
        x = jnp.zeros(1000)
        for step in range(50):
            writer.scalar("first", x[0], step)
            writer.histogram("all", x, step, buckets=1)
            writer.histogram("host", host, step, buckets=1)
            x = give(x)
            host += 1
    rows = {(name, step): value for _, name, step, value in summaries_in(tmp_path)}
    assert [rows["first", step] for step in range(50)] == list(range(50))
    for name in ("all", "host"):
        assert [rows[name, step].tolist() for step in range(50)] == [[[s, s, 1000]] for s in range(50)]


def test_per_replica_values_raise_with_a_helpful_message(tmp_path):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    per_replica = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group * 1.0)
    with rx.SummaryWriter(tmp_path) as writer:
        for write in (writer.scalar, writer.histogram):
            with pytest.raises(PerReplicaUseError, match=r"strategy\.reduce"):
                write("loss", per_replica, 0)
    assert not files_in(tmp_path)


class Writing(keras.layers.Layer):
    def __init__(self, write):
        super().__init__()
        self.write = write

    def call(self, x):
        if not isinstance(x, keras.KerasTensor):
            self.write()
        return x


def fit(strategy, write):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), Writing(write)])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)


PLACES = {
    "run": lambda strategy, write: strategy.run(write),
    "eager": lambda strategy, write: strategy.run(write, options=rx.RunOptions(eager=True)),
    "function": lambda _, write: rx.function(write)(),
    "jit": lambda _, write: jax.jit(write)(),
    "fit": fit,
}


@pytest.mark.parametrize("place", PLACES)
def test_summary_in_traced_functions_says_where_to_write(tmp_path, place):
    writer = rx.SummaryWriter(tmp_path)
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ContextError, match=r"'loss'.*test_writer.py:\d+.*Return the value") as info:
        PLACES[place](strategy, lambda: writer.scalar("loss", 1.0, 0) and None)
    assert "keras.callbacks.Callback" in str(info.value)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda w: w.scalar("x", [1.0, 2.0], 0), r"takes one number, got shape \(2,\)"),
        (lambda w: w.scalar("x", jnp.zeros((1,)), 0), r"takes one number, got shape \(1,\)"),
        (lambda w: w.scalar("x", 1 + 1j, 0), "real numbers, got complex128"),
        (lambda w: w.scalar("x", "1", 0), "real numbers, got <U1"),
        (lambda w: w.scalar("x", None, 0), "real numbers, got object"),
        (lambda w: w.scalar("x", jax.random.key(0), 0), r"real numbers, got key<fry>"),
        (lambda w: w.histogram("x", [[1], [1, 2]], 0), "not an array"),
        (lambda w: w.histogram("x", [1.0], 0, buckets=0), "buckets must be a whole number of at least 1"),
        (lambda w: w.image("x", np.zeros((3, 3, 3)), 0), r"got float64\[3, 3, 3\].*image\[None\]"),
        (lambda w: w.image("x", np.zeros((1, 3, 3, 1), int), 0), "uint8, or of floats"),
        (lambda w: w.text("x", 1.0, 0), "takes a str"),
        (lambda w: w.scalar("x", 1.0), "no step.*set_step"),
        (lambda w: w.scalar("x", 1.0, 0.5), "step must be a whole number"),
        (lambda w: w.scalar("x", 1.0, 2**63), "steps of up to 2"),
        (lambda w: rx.SummaryWriter(w.logdir, purge_step="3"), "purge_step must be a whole number"),
    ],
)
def test_wrong_data_raises_at_the_call(tmp_path, write, words):
    with rx.SummaryWriter(tmp_path) as writer:
        with pytest.raises(InvalidArgumentError, match=words):
            write(writer)
    assert not files_in(tmp_path)


def test_tensorflows_functions_write_to_the_default_writer(tmp_path):
    assert rx.summary.scalar("loss", 1.0, 0) is False
    train = rx.summary.create_file_writer(tmp_path / "train", max_queue=5, flush_millis=1000)
    test = rx.summary.create_file_writer(str(tmp_path / "test"))
    with train.as_default(step=7):
        assert rx.summary.scalar("loss", 1.0)
        with test.as_default():
            rx.summary.scalar("loss", 2.0, step=8)
            rx.summary.experimental.set_step(9)
            rx.summary.text("note", "later")
        with rx.summary.record_if(lambda: False):
            assert not rx.summary.should_record_summaries()
            assert not rx.summary.histogram("never", [1.0])
        rx.summary.image("picture", np.zeros((1, 2, 2, 1), np.uint8))
        rx.summary.flush()
        assert [(name, step) for _, name, step, _ in summaries_in(tmp_path / "train")] == [
            ("loss", 7),
            ("picture", 9),
        ]
    assert rx.summary.experimental.get_step() is None
    test.close()
    assert [(name, step) for _, name, step, _ in summaries_in(tmp_path / "test")] == [
        ("loss", 8),
        ("note", 9),
    ]
    seen = []
    with train.as_default():
        thread = threading.Thread(target=lambda: seen.append(rx.summary.scalar("loss", 3.0, 10)))
        thread.start()
        thread.join()
    assert seen == [False]
    train.close()


class SlowFile:
    """A disk that is slow, or fails."""

    def __init__(self, is_open, error=None):
        self.is_open, self.error, self.num_added = is_open, error, 0
        self.has_one = threading.Event()

    def add(self, *_):
        self.has_one.set()
        self.is_open.wait(60)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.num_added += 1

    def flush(self):
        pass

    close = flush


@pytest.fixture
def slow_file(monkeypatch):
    def give(**options):
        file = SlowFile(threading.Event(), **options)
        monkeypatch.setattr("replicax._src.summaries.events.EventFile", lambda *_: file)
        return file

    return give


def test_callers_wait_only_for_a_full_queue(tmp_path, slow_file):
    file = slow_file()
    with rx.SummaryWriter(tmp_path, max_in_flight=3) as writer:
        for step in range(4):
            writer.scalar("loss", 1.0, step)
            assert file.has_one.wait(60)  # one is with the thread
        assert writer.statistics() == {"num_written": 0, "num_waiting": 3, "waited_s": 0.0}
        waiting = threading.Thread(target=writer.scalar, args=("loss", 1.0, 4))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        file.is_open.set()
        waiting.join(60)
        assert not waiting.is_alive()
        assert writer.statistics()["waited_s"] > 0
        writer.flush()
        assert file.num_added == writer.statistics()["num_written"] == 5


def test_error_of_the_thread_is_raised_once_by_the_next_call(tmp_path, slow_file):
    file = slow_file(error=OSError(28, "No space left on device"))
    file.is_open.set()
    writer = rx.SummaryWriter(tmp_path)
    writer.scalar("loss", 1.0, 0)
    with pytest.raises(SummaryError, match=r"scalar\('loss'\).*No space left"):
        writer.flush()
    writer.scalar("loss", 1.0, 1)
    writer.close()
    assert file.num_added == 1


def test_flush_that_takes_too_long_raises(tmp_path, slow_file):
    file = slow_file()
    writer = rx.SummaryWriter(tmp_path)
    writer.scalar("loss", 1.0, 0)
    with pytest.raises(SummaryError, match=r"not written after 0.1 s"):
        writer.flush(timeout_s=0.1)
    file.is_open.set()
    writer.close()
    with pytest.raises(InvalidArgumentError, match="has been closed"):
        writer.scalar("loss", 1.0, 1)


def test_close_that_took_too_long_can_be_repeated(tmp_path, slow_file):
    file = slow_file()
    writer = rx.SummaryWriter(tmp_path)
    writer.scalar("loss", 1.0, 0)
    for _ in range(2):
        with pytest.raises(SummaryError, match=r"not written after 0.1 s"):
            writer.close(timeout_s=0.1)
    threading.Timer(0.3, file.is_open.set).start()
    writer.close()
    assert file.num_added == 1
    writer.flush(timeout_s=0.1)  # all is there
    writer.close(timeout_s=0.1)


def test_no_caller_waits_forever(tmp_path, slow_file, monkeypatch, caplog):
    """Neither a caller, nor an error on its way out, which stays the error; and Python's exit does not wait a second
    time."""
    file = slow_file()
    monkeypatch.setattr("replicax._src.summaries.writer._AFTER_AN_ERROR_S", 0.1)
    before = time.monotonic()

    def fail():
        with rx.SummaryWriter(tmp_path, max_in_flight=1) as writer:
            for step in range(2):
                writer.scalar("loss", 1.0, step)
                assert file.has_one.wait(60)  # one is with the thread
            threads.append(writer._thread)
            raise KeyError("mine")

    threads = []
    with pytest.raises(KeyError, match="mine"):
        fail()
    with pytest.raises(SummaryError, match=r"not written after 0.1 s: 1 are waiting"):
        threads[0].add(None, timeout_s=0.1)
    assert "not written after 0.1 s" in caplog.text
    threads[0].stop_if_running(60)
    assert time.monotonic() - before < 20
    file.is_open.set()


def test_folder_that_cannot_be_created_raises_at_the_first_summary(tmp_path):
    (tmp_path / "file").write_text("")
    writer = rx.SummaryWriter(tmp_path / "file" / "run")
    with pytest.raises(SummaryError, match="cannot be written to"):
        writer.scalar("loss", 1.0, 0)
    writer.close()


def test_folder_that_is_not_a_path_raises():
    with pytest.raises(InvalidArgumentError, match=r"logdir.*int: 3"):
        rx.SummaryWriter(3)


def test_restarted_run_purges_from_its_step(tmp_path):
    with rx.SummaryWriter(tmp_path, purge_step=40) as writer:
        writer.scalar("loss", 1.0, 40)
    kinds = [(event.step, event.session_log.status) for event in events_of(files_in(tmp_path)[0])]
    assert kinds == [(0, 0), (40, 1), (40, 0)]  # 1 is START


def test_next_chief_opens_a_file_of_its_own(tmp_path, monkeypatch):
    """Where the live processes continue after the death of the chief, another one is the chief from then on."""
    peers = types.SimpleNamespace(is_leader=False)
    monkeypatch.setattr(writer_module, "joined_peers", lambda: peers)
    with rx.SummaryWriter(tmp_path) as writer:
        assert not writer.scalar("loss", 1.0, 0)
        assert files_in(tmp_path) == []
        peers.is_leader = True
        assert writer.scalar("loss", 2.0, 1)
    assert scalars_in(tmp_path) == {"loss": {1: 2.0}}
