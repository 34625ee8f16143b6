"""Programs that train one regression in many forms, over arrays and over files; see ``programs.py``."""


def loops(batch_size, folder):
    """One regression by every kind of loop and of gradient, for two epochs; reports the losses and weights.

    ``all.txt`` in the folder has the rows in its lines.
    """
    from pathlib import Path

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import replicax as rx
    from replicax.testing import report

    batch_size = int(batch_size)
    strategy = rx.MultiWorkerMirroredStrategy()
    table = np.loadtxt(Path(folder) / "all.txt", dtype="f")
    rows, labels = table[:, :3], table[:, 3]
    rate = 0.05

    def of_arrays():
        data = rx.data.from_arrays((rows, labels)).batch(batch_size)
        return strategy.experimental_distribute_dataset(data)

    def of_one_file():
        data = rx.data.from_text_lines(Path(folder) / "all.txt").map(parse).batch(batch_size)
        return strategy.experimental_distribute_dataset(data)

    def parse(line):
        numbers = np.array(line.split(), "f")
        return numbers[:3], numbers[3]

    def loss_of(weights, batch):
        features, wanted = batch
        return rx.nn.compute_average_loss((features @ weights - wanted) ** 2)

    def summed(losses):
        return np.ravel(strategy.reduce("SUM", losses, axis=None)).tolist()

    def with_variable(make_loop):
        """``make_loop(weights)`` returns a function from the batches to their losses."""
        with strategy.scope():
            weights = rx.Variable(jnp.zeros(3))
        go = make_loop(weights)

        def train(dataset):
            losses = [loss for _ in range(2) for loss in go(dataset)]
            return {"losses": losses, "weights": weights.numpy().tolist()}

        return train

    def stepping(weights):
        def step(batch):
            with rx.GradientTape() as tape:
                loss = loss_of(weights, batch)
            gradient = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
            weights.assign_sub(rate * gradient)
            return loss

        return step

    def single_runs(weights):
        step = stepping(weights)
        return lambda dataset: [
            loss for batch in dataset for loss in summed(strategy.run(step, args=(batch,)))
        ]

    def several_in_one(weights):
        step = stepping(weights)

        def go(dataset):
            iterator, losses = iter(dataset), []
            while True:
                try:
                    losses += summed(strategy.run_steps(step, iterator, 2))
                except rx.errors.OutOfRangeError:
                    return losses

        return go

    def in_a_function(weights):
        step = stepping(weights)

        @rx.function
        def train_epoch(dataset):
            losses = []
            for batch in dataset:
                losses.append(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None))
            return losses

        return lambda dataset: [float(loss) for loss in train_epoch(dataset)]

    def merging(weights):
        def merge(merged, gradient):
            total = merged.reduce("SUM", gradient, axis=None)
            merged.extended.update(weights, lambda variable, g: variable.assign_sub(rate * g), args=(total,))
            return total

        def step(batch):
            with rx.GradientTape() as tape:
                loss = loss_of(weights, batch)
            rx.get_replica_context().merge_call(merge, args=(tape.gradient(loss, weights),))
            return loss

        @rx.function
        def train(batch):
            return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

        return lambda dataset: [float(train(batch)) for batch in dataset]

    def by_value_and_grad(weights):
        def step(batch):
            loss, gradient = rx.value_and_grad(lambda: loss_of(weights, batch), variables=weights)()
            weights.assign_sub(rate * rx.get_replica_context().all_reduce("SUM", gradient))
            return loss

        return lambda dataset: [
            loss for batch in dataset for loss in summed(strategy.run(step, args=(batch,)))
        ]

    def chain():
        return optax.chain(rx.optax.aggregate_gradients(), optax.clip_by_global_norm(1.0), optax.adam(rate))

    def by_optax(dataset):
        optimizer = chain()
        weights = jnp.zeros(3)
        state = strategy.replicate((weights, optimizer.init(weights)))

        def step(state, batch):
            weights, inner = state
            loss, gradient = jax.value_and_grad(loss_of)(weights, batch)
            updates, inner = optimizer.update(gradient, inner, weights)
            return (optax.apply_updates(weights, updates), inner), loss

        losses = []
        for _ in range(2):
            for batch in dataset:
                state, loss = strategy.run(step, args=(state, batch))
                losses += summed(loss)
        return {"losses": losses, "weights": np.asarray(strategy.unreplicate(state)[0]).tolist()}

    def by_nnx(dataset):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, chain(), wrt=nnx.Param)

        def step(model, optimizer, batch):
            features, wanted = batch

            def loss_of_model(model):
                return rx.nn.compute_average_loss((model(features)[:, 0] - wanted) ** 2)

            loss, gradients = nnx.value_and_grad(loss_of_model)(model)
            optimizer.update(model, gradients)
            return loss

        losses = [
            loss
            for _ in range(2)
            for batch in dataset
            for loss in summed(strategy.run(step, args=(model, optimizer, batch)))
        ]
        kernel = model.kernel.get_value()
        return {"losses": losses, "weights": np.ravel(kernel).tolist()}

    report(
        single_runs=with_variable(single_runs)(of_arrays()),
        run_steps=with_variable(several_in_one)(of_arrays()),
        function=with_variable(in_a_function)(of_arrays()),
        merge_call=with_variable(merging)(of_arrays()),
        value_and_grad=with_variable(by_value_and_grad)(of_arrays()),
        optax=by_optax(of_arrays()),
        nnx=by_nnx(of_arrays()),
        one_file=with_variable(single_runs)(of_one_file()),
        one_file_run_steps=with_variable(several_in_one)(of_one_file()),
    )


def over_files(batch_size, folder, batches):
    """Trains on files that are distributed over the workers, for two epochs; reports the rows of each step, the losses
    and the weights.

    Args:
      batch_size: The rows of a global batch.
      folder: The folder of the files.
      batches: JSON, the rows of each step; if there are any, they replace the files.
    """
    import json
    from pathlib import Path

    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = rx.Variable(jnp.zeros(3))

    def step(batch):
        features, labels = batch[:, :3], batch[:, 3]
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((features @ weights - labels) ** 2)
        weights.assign_sub(0.01 * rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights)))
        return loss

    def parse(line):
        return np.array(line.split(), "f")

    if batches:
        dataset = strategy.experimental_distribute_dataset(
            [np.array(rows, "f") for rows in json.loads(batches)]
        )
    else:
        files = rx.data.from_text_lines(sorted(Path(folder).glob("part*.txt"))).map(parse)
        dataset = strategy.experimental_distribute_dataset(
            files.batch(int(batch_size)), distribute_options="FILE"
        )
    seen, losses = [], []
    for _ in range(1 if batches else 2):
        for batch in dataset:
            seen.append(np.asarray(strategy.gather(batch, axis=0)).tolist())
            losses.append(float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)))
    report(seen=seen, losses=losses, weights=weights.numpy().tolist(), shown=str(dataset))


def own_states():
    """Gives ``run_steps`` a state that differs between workers, made in two forms; reports the results and the
    messages."""
    import logging

    import jax
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("replicax").addHandler(handler)
    own = 10.0 * (1 + jax.process_index())
    dataset = strategy.experimental_distribute_dataset(
        rx.data.from_arrays(np.ones(8, np.float32)).batch(4).repeat()
    )
    iterator = iter(dataset)

    def step(state, batch):
        total = rx.get_replica_context().all_reduce("SUM", jnp.sum(batch))
        return {"w": state["w"] + total, "b": state["b"]}, None

    def after(state):
        state, _ = strategy.run_steps(step, iterator, 2, state=state)
        return state

    states = [after({"w": own, "b": 1.0}), after(strategy.replicate({"w": np.float32(own), "b": 1.0}))]
    states.append(after(states[-1]))
    report(states=[[float(np.asarray(s[name].as_array())) for name in ("w", "b")] for s in states], said=said)
