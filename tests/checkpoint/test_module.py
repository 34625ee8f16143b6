"""rx.Module finds variables as tf.Module does, and checkpoints save them."""

import keras
import numpy as np
import pytest

import replicax as rx


class Dense(rx.Module):
    def __init__(self, size, name=None):
        super().__init__(name)
        self.w = rx.Variable(np.full((size, size), 0.5, "float32"))
        self.b = rx.Variable(np.zeros(size, "float32"))
        self.size = size

    @rx.Module.with_name_scope
    def __call__(self, x):
        return x @ self.w + self.b


class Net(rx.Module):
    def __init__(self):
        super().__init__()
        with self.name_scope:
            self.zeta = [Dense(2, "first"), Dense(2)]
            self.heads = {"b": Dense(2), "a": Dense(3)}
        self.alpha = rx.Variable(1.0, trainable=False)
        self.note = "text"
        self.other_name = self.zeta[0]

    def __call__(self, x):
        for layer in self.zeta:
            x = layer(x)
        return self.heads["b"](x) * self.alpha


def test_variables_are_found_in_tensorflows_order_and_once():
    net = Net()
    a, b = net.heads["a"], net.heads["b"]
    first, second = net.zeta
    expected = [net.alpha, *(v for dense in (a, b, first, second) for v in (dense.b, dense.w))]
    assert [id(v) for v in net.variables] == [id(v) for v in expected]
    assert net.non_trainable_variables == (net.alpha,)
    assert len(net.trainable_variables) == 8
    assert net.submodules == (a, b, first, second)


def test_an_attribute_that_changes_counts():
    net = Net()
    net.zeta.append(Dense(2))
    assert len(net.variables) == 11
    del net.heads
    assert len(net.variables) == 7


def test_names():
    class MyHTTPNet(rx.Module):
        def __init__(self):
            pass  # tf.Module, too, works without super().__init__()

    assert MyHTTPNet().name == "my_http_net"
    assert Dense(2, "first").name == "first"
    assert MyHTTPNet().variables == ()


def test_keras_layers_in_attributes_count():
    class Mixed(rx.Module):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.BatchNormalization()
            self.layer.build((None, 3))
            self.scale = rx.Variable(1.0)

    mixed = Mixed()
    assert len(mixed.variables) == 5
    assert len(mixed.trainable_variables) == 3


@pytest.mark.timeout(120)
def test_a_module_trains_on_replicas_and_is_restored(tmp_path):
    strategy = rx.MirroredStrategy()
    with strategy.scope():
        net = Net()

    def step(x):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(((net(x) - 2.0) ** 2).mean(-1))
        variables = [v for v in net.trainable_variables if v.shape != (3,) and v.shape != (3, 3)]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * rx.get_replica_context().all_reduce("sum", gradient))
        return loss

    data = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.ones((8, 2), "float32")).batch(8))
    before = np.asarray(net.zeta[0].w)
    for batch in data:
        strategy.run(step, args=(batch,))
    after = np.asarray(net.zeta[0].w)
    assert not np.array_equal(before, after)
    checkpoint = rx.Checkpoint(net=net)
    path = checkpoint.save(str(tmp_path / "saved"))
    for variable in net.variables:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    checkpoint.restore(path).assert_existing_objects_matched()
    assert np.array_equal(np.asarray(net.zeta[0].w), after)
    assert float(net.alpha.numpy()) == 1.0
