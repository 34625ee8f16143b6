"""The global view: a step over global batches is the step of one device, for any rows; state is never lost or shared."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import examples
from replicax._src.devices.topology import Topology
from replicax._src.lowering.batch import DatasetBatch
from replicax._src.lowering.global_view import GlobalStep
from replicax._src.lowering.held_state import HeldState


def topology(num_replicas):
    return Topology.of(jax.devices()[:num_replicas])


def running_sums(state, batch):
    """Every kind of state: one that changes, one that does not, and one whose new value is another one's old value."""
    (total, fixed), (_previous,) = state
    x = batch["x"] * batch["scale"]
    moved = total + jnp.sum(x, axis=0)
    return {"mean": jnp.mean(x), "rows": x * 2}, ([moved, fixed], [total])


def new_state():
    return [jnp.zeros(3), jnp.ones(2)], [jnp.full(3, 7.0)]


def batch_of(rows, seed=0):
    return {
        "x": np.random.default_rng(seed).normal(size=(rows, 3)).astype("float32"),
        "scale": np.float32(0.5),
    }


def run(step, state, held, *batches, capacity=1):
    """One call with batches of one form; returns the outputs and the state afterwards."""
    groups = held.hold(state)
    batches = [DatasetBatch(batch) for batch in batches]
    program = step.program(held, batches[0], capacity)
    held.adopt(program.written, lambda: [None] * sum(map(len, groups)))
    return program(held, batches), groups


def made(num_replicas, step=running_sums, *, donates=True, keeps_all=False):
    places = topology(num_replicas)
    return GlobalStep(step, "step", places, donates=donates, keeps_all=keeps_all), HeldState(places)


@examples(25, short=10)
@given(rows=st.integers(0, 12), num_replicas=st.sampled_from([1, 2, 3, 8]), num_steps=st.integers(1, 3))
def test_steps_are_those_of_one_device(rows, num_replicas, num_steps):
    step, held = made(num_replicas)
    state, expected = new_state(), new_state()
    groups = state
    for i in range(num_steps):
        outputs, groups = run(step, groups, held, batch_of(rows, i))
        expected_outputs, expected = running_sums(expected, batch_of(rows, i))
        assert outputs[0]["rows"].shape == (rows, 3)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), outputs[0], expected_outputs
        )
    for group, expected_group in zip(groups, expected, strict=True):
        for value, expected_value in zip(group, expected_group, strict=True):
            np.testing.assert_allclose(value, expected_value, rtol=1e-6, atol=1e-6)
            assert value.sharding.device_set == set(jax.devices()[:num_replicas])
    assert step.num_programs == 1


@pytest.mark.parametrize("num_batches", [2, 3, 4])
def test_several_steps_in_one_call_are_single_steps(num_batches):
    batches = [batch_of(5, i) for i in range(num_batches)]
    together, held = made(2, keeps_all=True)
    outputs, groups = run(together, new_state(), held, *batches, capacity=4)
    singly, other = made(2)
    expected, expected_groups = [], new_state()
    for batch in batches:
        one, expected_groups = run(singly, expected_groups, other, batch)
        expected += one
    assert len(outputs) == num_batches
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), outputs, expected)
    for group, expected_group in zip(groups, expected_groups, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), list(group), list(expected_group)
        )


def test_one_program_serves_all_numbers_of_steps():
    step, held = made(2)
    groups = new_state()
    for count in (4, 2, 3):
        _, groups = run(step, groups, held, *[batch_of(4, i) for i in range(count)], capacity=4)
    assert step.num_programs == 1


def test_rows_are_split_over_the_devices():
    seen = []

    def step(state, batch):
        jax.debug.inspect_array_sharding(batch, callback=seen.append)
        return jnp.sum(batch), state

    global_step, held = made(3, step)
    run(global_step, new_state(), held, np.ones((8, 2), "float32"))
    (sharding,) = seen
    assert sharding.shard_shape((9, 2)) == (3, 2)


def test_unchanged_arrays_are_not_outputs():
    step, held = made(2)
    groups = held.hold(new_state())
    program = step.program(held, DatasetBatch(batch_of(4)), 1)
    assert program.written == [0, 2]
    run(step, groups, held, batch_of(4))
    fixed = held.values()[1]
    run(step, groups, held, batch_of(4))
    assert held.values()[1] is fixed


def test_held_array_is_not_donated():
    step, held = made(2)
    state = new_state()
    first = state[0][0]
    _, groups = run(step, state, held, batch_of(4))
    held.release()
    assert not first.is_deleted()
    assert not list(groups[0])  # nobody sees arrays that are somebody else's now

    step, held = made(2)
    _, groups = run(step, new_state(), held, batch_of(4))
    arrays = [list(group) for group in groups]
    kept = arrays[0][0]
    held.release()
    run(step, arrays, held, batch_of(4))
    assert not kept.is_deleted()
    np.testing.assert_array_equal(kept, kept + 0)


def test_program_that_writes_more_than_the_previous_one():
    def step(state, batch):
        (a, b), (c,) = state
        return jnp.sum(batch), ([a + 1, b + 1 if batch.shape[0] < 8 else b], [c])

    global_step, held = made(2, step)
    state = new_state()
    first = state[0][1]
    _, groups = run(global_step, state, held, np.ones((8, 2), "float32"))
    _, groups = run(global_step, groups, held, np.ones((6, 2), "float32"))
    np.testing.assert_array_equal(first, np.ones(2))
    np.testing.assert_array_equal(list(groups[0])[1], np.full(2, 2.0))


def test_unreferenced_array_is_donated():
    step, held = made(2)
    _, groups = run(step, new_state(), held, batch_of(4))
    arrays = [list(group) for group in groups]
    held.release()
    watched = weakref.ref(arrays[0][0])
    pointer = arrays[0][0].addressable_shards[0].data.unsafe_buffer_pointer()
    _, groups = run(step, arrays, held, batch_of(4))
    del arrays
    gc.collect()
    pointers = {v.addressable_shards[0].data.unsafe_buffer_pointer() for group in groups for v in group}
    assert pointer in pointers
    assert watched() is None or watched().is_deleted()


def test_one_value_in_two_places_is_two_buffers():
    def step(state, batch):
        (a, b), (_c,) = state
        mean = jnp.mean(batch) + a
        return mean, ([mean, b], [mean])

    global_step, held = made(2, step)
    groups = new_state()
    for _ in range(3):
        _, groups = run(global_step, groups, held, np.ones((4, 2), "float32"))
    np.testing.assert_allclose(next(iter(groups[0])), np.full(3, 3.0))
    np.testing.assert_allclose(next(iter(groups[1])), np.full(3, 3.0))


def test_a_batch_may_be_overwritten_as_soon_as_the_call_returns():
    step, held = made(2)
    buffer, groups, expected = np.zeros((64, 3), "float32"), new_state(), np.zeros(3)
    for i in range(20):
        buffer[:] = i
        _, groups = run(step, groups, held, {"x": buffer, "scale": np.float32(1)})
        expected += 64.0 * i
    np.testing.assert_allclose(next(iter(groups[0])), expected)


def test_a_step_that_cannot_be_traced_leaves_the_state():
    step, held = made(2)
    groups = held.hold(new_state())
    with pytest.raises(TypeError):
        step.program(held, DatasetBatch({"x": np.zeros((4, 2), "float32"), "scale": np.float32(1)}), 1)
    np.testing.assert_array_equal(held.values()[0], np.zeros(3))
    run(step, groups, held, batch_of(4))


def test_weakly_typed_results_do_not_compile_again():
    def step(state, batch):
        (a, b), (c,) = state
        return jnp.sum(batch), ([jnp.where(a > 0, 1.0, 2.0), b], [c])

    global_step, held = made(2, step)
    groups = new_state()
    for _ in range(3):
        _, groups = run(global_step, groups, held, np.ones((4, 2), "float32"))
    program = global_step.program(held, DatasetBatch(np.ones((4, 2), "float32")), 1)
    assert program._compiled._cache_size() == 1


def test_convolutions_are_not_looped_over_on_cpu():
    kernel = np.ones((2, 1, 1), "float32")

    def step(state, batch):
        out = jax.lax.conv_general_dilated(
            batch, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        (a, b), (c,) = state
        return jnp.sum(out), ([a + jnp.sum(out), b], [c])

    global_step, held = made(2, step, keeps_all=True)
    batches = [np.full((3, 4, 1), i, "float32") for i in range(3)]
    outputs, groups = run(global_step, new_state(), held, *batches, capacity=8)
    assert len(outputs) == 3
    program = global_step.program(held, DatasetBatch(batches[0]), 8)
    assert program is global_step.program(held, DatasetBatch(batches[0]), 1)
    np.testing.assert_allclose(next(iter(groups[0])), np.full(3, float(sum(outputs))))
