"""The test of ``replicax doctor --test``, which runs in a separate process with a time limit."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from replicax._src.cluster.processes import Process, ProcessTimeoutError

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy

_NUM_TIMES: Final = 5
_NUM_VALUES: Final = 1 << 20  # 4 MB
_NUM_ROWS: Final = 32  # per replica
_NUM_FEATURES: Final = 256
_MOST_LINES: Final = 12


def run_test(timeout_s: float) -> tuple[list[tuple[str, str]], str | None]:
    """Runs the test in a separate process. Returns the rows to show, and the fault or None."""
    command = [sys.executable, "-m", "replicax._launch.doctor_test"]
    with Process(command, name="the test") as child:
        try:
            ending = child.wait(timeout_s)
        except ProcessTimeoutError:
            hint = (
                "The other processes may be missing: start the test in all of them, or raise --test-timeout."
            )
            return [("result", "not finished")], f"The test did not finish in {timeout_s:g} s. {hint}"
    found = [line for line in child.lines if line.startswith("{")]
    if not (ending.is_success and found):
        last = "\n".join(child.lines[-_MOST_LINES:])
        return [("result", "failed")], f"The test {ending}:\n{last}"
    return [(name, str(value)) for name, value in json.loads(found[-1]).items()], None


def main() -> None:
    """Prints a JSON object with the results and their times.

    Raises:
      AssertionError: A number is wrong.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from replicax._src.cluster.detect import choose_resolver
    from replicax._src.functions.function import function
    from replicax._src.scope.context import get_replica_context
    from replicax._src.strategies.mirrored import MirroredStrategy
    from replicax._src.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
    from replicax._src.tracing.tape import GradientTape
    from replicax._src.variables.variable import Variable

    membership = choose_resolver().membership
    has_servers = "ps" in membership.spec.jobs
    is_joined = not has_servers and not membership.is_evaluator and membership.num_workers > 1
    start = time.perf_counter()
    strategy: Strategy = MultiWorkerMirroredStrategy() if is_joined else MirroredStrategy(jax.local_devices())
    joined_s = time.perf_counter() - start
    num_replicas = strategy.num_replicas_in_sync
    num_processes = membership.num_workers if is_joined else 1

    def values_of(make: Any) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: make(context.replica_id_in_sync_group)
        )

    def sum_over_replicas(x: Any) -> Any:
        context = get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", x)

    @function
    def all_reduce(values: Any) -> Any:
        return strategy.run(sum_over_replicas, args=(values,))

    def on_devices(values: Any) -> Any:
        return jax.block_until_ready(strategy.run(lambda x: x, args=(values,)))

    numbers = on_devices(values_of(lambda number: np.full(_NUM_VALUES, number + 1, np.float32)))
    first_s, step_s, result = _timed(lambda: all_reduce(numbers))
    got = float(np.asarray(strategy.experimental_local_results(result)[0])[-1])
    expected = num_replicas * (num_replicas + 1) / 2
    if got != expected:
        raise AssertionError(f"the all-reduce of 1, …, {num_replicas} gave {got}, not {expected}")
    rows = {
        "devices": f"{num_replicas} ({jax.local_devices()[0].device_kind}) in {num_processes} process(es)",
        "all-reduce": f"{step_s * 1e3:.2f} ms for 4 MB, the first time {first_s:.2f} s with compiling",
    }

    def rows_of(number: int) -> Any:
        return np.random.default_rng(number).normal(size=(_NUM_ROWS, _NUM_FEATURES)).astype(np.float32)

    with strategy.scope():
        weights = Variable(jnp.zeros((_NUM_FEATURES,)))

    def step(features: Any) -> Any:
        with GradientTape() as tape:
            error = features @ weights.value - jnp.sum(features, axis=1)
            loss = jnp.mean(error**2) / num_replicas
        gradient = sum_over_replicas(tape.gradient(loss, weights))
        weights.assign_sub(0.01 * gradient)
        return loss

    @function
    def train(features: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(features,)), axis=None)

    batch = on_devices(values_of(rows_of))
    start = time.perf_counter()
    jax.block_until_ready(train(batch))
    first_s = time.perf_counter() - start
    everything = np.concatenate([rows_of(number) for number in range(num_replicas)]).astype(np.float64)
    expected_weights = 0.02 * everything.T @ everything.sum(axis=1) / len(everything)
    found = np.asarray(weights)
    largest = np.abs(found - expected_weights).max()
    if not largest < 1e-3:
        raise AssertionError(f"the weights after one step are off by {largest:.2g}")
    _, step_s, _ = _timed(lambda: train(batch))
    rows["training step"] = f"{step_s * 1e3:.2f} ms, the first time {first_s:.2f} s with compiling"
    if is_joined:
        rows["joining"] = f"{joined_s:.2f} s"
    if has_servers:
        rows["not tested"] = "parameter servers: only the devices of this process were"
    rows["result"] = "the numbers are right"
    print(json.dumps(rows), flush=True)


def _timed(call: Any) -> tuple[float, float, Any]:
    """Returns the seconds of the first call, the median of the later calls, and the result."""
    import jax

    times = []
    result = None
    for _ in range(1 + _NUM_TIMES):
        start = time.perf_counter()
        result = jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:]), result


if __name__ == "__main__":
    main()
