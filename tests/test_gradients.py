"""``rx.value_and_grad``: by arguments, by variables, in and out of traced functions."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx


def test_by_argument_like_jax():
    value, gradient = rx.value_and_grad(lambda x, y: x * x * y)(3.0, 2.0)
    assert (float(value), float(gradient)) == (18.0, 12.0)


def test_by_several_arguments_and_pytrees():
    def loss(params, scale):
        return scale * jnp.sum(params["w"] ** 2)

    _, (by_params, by_scale) = rx.value_and_grad(loss, argnums=(0, 1))({"w": np.array([1.0, 2.0], "f")}, 3.0)
    assert by_params["w"].tolist() == [6.0, 12.0]
    assert float(by_scale) == 5.0


def test_by_variables_and_by_both():
    w = rx.Variable(2.0)
    value, gradients = rx.value_and_grad(lambda x: w * x, variables=[w])(5.0)
    assert (float(value), [float(g) for g in gradients]) == (10.0, [5.0])
    _, (by_x, by_w) = rx.value_and_grad(lambda x: w * x, argnums=0, variables=lambda: [w])(5.0)
    assert (float(by_x), float(by_w[0])) == (2.0, 5.0)


def test_aux_is_passed_through():
    (loss, aux), gradient = rx.value_and_grad(lambda x: (x * 2.0, {"twice": x + x}), has_aux=True)(4.0)
    assert (float(loss), float(aux["twice"]), float(gradient)) == (8.0, 8.0, 2.0)


def test_an_unused_argument_has_gradient_zero_as_in_jax():
    _, gradient = rx.value_and_grad(lambda x, y: y * 1.0, argnums=0)(1.0, 2.0)
    assert float(gradient) == 0.0


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_in_run_gradients_are_the_replicas_own(num_replicas):
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        w = rx.Variable(2.0)

    def step(x):
        loss, gradients = rx.value_and_grad(lambda: w * x, variables=[w])()
        total = rx.get_replica_context().all_reduce("sum", gradients[0])
        w.assign_sub(0.1 * total)
        return loss

    x = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.float32(ctx.replica_id_in_sync_group + 1)
    )
    strategy.run(step, (x,))
    assert float(w.value) == pytest.approx(2.0 - 0.1 * sum(range(1, num_replicas + 1)))


def test_it_compiles_once():
    traces = []

    def loss(x):
        traces.append(x)
        return x * x

    by_x = rx.value_and_grad(loss)
    for value in np.arange(4.0, dtype=np.float32):
        by_x(value)
    assert len(traces) == 1
