"""Programs that all workers of a cluster run, and one device for comparison: functions that import what they need."""


def promises():
    """The attributes of the strategy, and the results of its methods."""
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    worker = resolver.task_id + (resolver.task_type == "worker" and "chief" in resolver.cluster_spec().jobs)
    devices = strategy.extended.worker_devices
    report(
        task=[resolver.task_type, resolver.task_id],
        num_replicas=strategy.num_replicas_in_sync,
        num_devices=len(devices),
        processes=sorted({device.process_index for device in devices}),
        checkpoint=strategy.extended.should_checkpoint,
        summary=strategy.extended.should_save_summary,
    )
    with strategy.scope():
        initial = rx.Variable(5.0 + worker)
        total = rx.Variable(0.0)
        on_read = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        mean = rx.Variable(0.0, synchronization="ON_READ", aggregation="MEAN")
        first = rx.Variable(0.0, synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA")
    report(initial=float(initial))

    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group + 1)
    )
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: np.arange(context.replica_id_in_sync_group + 1, dtype=np.float32)
    )

    def step(x):
        context = rx.get_replica_context()
        everyone = context.all_reduce("SUM", x)
        total.assign_add(everyone)
        on_read.assign_add(x)
        mean.assign(x)
        first.assign(x)
        merged = context.merge_call(lambda s, y: s.reduce("MEAN", y, axis=None), args=(x,))
        ids = jnp.asarray(context.replica_id_in_sync_group)
        return x * 10, everyone, merged, context.all_gather(x[None], axis=0), ids

    tens, everyone, merged, gathered, ids = strategy.run(step, args=(numbers,))
    local = strategy.experimental_local_results
    report(
        tens=[float(v) for v in local(tens)],
        ids=[int(v) for v in local(ids)],
        everyone=float(local(everyone)[0]),
        merged=float(local(merged)[0]),
        gathered=np.asarray(local(gathered)[0]).tolist(),
        total=float(total),
        on_read=float(on_read.read_value()),
        on_read_mean=float(mean),
        on_read_first=float(first),
        on_read_reduced=[float(strategy.reduce(op, on_read, axis=None)) for op in ("SUM", "MEAN")],
        reduced=float(strategy.reduce("SUM", tens, axis=None)),
        mean=float(strategy.reduce("MEAN", tens, axis=None)),
        rows=np.asarray(strategy.gather(rows, axis=0)).tolist(),
        sum_of_rows=float(strategy.reduce("SUM", rows, axis=0)),
        mean_of_rows=float(strategy.reduce("MEAN", rows, axis=0)),
        shown=repr(tens),
    )

    @rx.function
    def twice(x):
        first = strategy.run(step, args=(x,))[0]
        return strategy.reduce("SUM", strategy.run(step, args=(first,))[0], axis=None)

    report(function=float(twice(numbers)), total_after=float(total))
    on_read.assign(8.0)
    mean.assign(2.0)
    mean.assign_add(first.value)
    report(assigned_on_read=float(on_read), added_on_read=float(mean), own=[float(v) for v in mean.values])
    total.assign(3.0)
    report(assigned=float(total), plain=float(total + 1))
    try:
        strategy.run(step, args=(numbers,), options=rx.RunOptions(eager=True))
    except rx.errors.UnsupportedError as error:
        report(eager=str(error), total_after_eager=float(total))


def datasets(folder):
    """The rows of each worker's replicas, step by step."""
    import logging
    from pathlib import Path

    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    worker = strategy.cluster_resolver.task_id

    def steps_of(dataset):
        return [
            [np.asarray(value).tolist() for value in strategy.experimental_local_results(element)]
            for element in dataset
        ]

    def rows(count):
        return rx.data.from_arrays(np.arange(count))

    def batches(count, size):
        for start in range(0, count, size):
            yield np.arange(start, min(start + size, count))

    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("replicax").addHandler(handler)
    distribute = strategy.experimental_distribute_dataset
    files = sorted(Path(folder).glob("*.txt"))
    report(
        data=steps_of(distribute(rows(8).batch(3))),
        generator=steps_of(distribute(batches(8, 3))),
        off=steps_of(distribute(rows(5).batch(3), distribute_options="OFF")),
        uneven=steps_of(
            strategy.distribute_datasets_from_function(
                lambda context: rows(8 + context.input_pipeline_id).batch(2)
            )
        ),
        partial=steps_of(
            strategy.distribute_datasets_from_function(
                lambda context: list(batches(14, 4))[context.input_pipeline_id :: context.num_input_pipelines]
            )
        ),
        nothing=steps_of(
            strategy.distribute_datasets_from_function(
                lambda context: rows(4 * context.input_pipeline_id).batch(2)
            )
        ),
        again=[steps_of(dataset) for dataset in [distribute(rows(4).batch(4))] * 2],
        few_files=steps_of(distribute(rx.data.from_text_lines(files[:1]).map(len).batch(4))),
        policy=str(distribute(rx.data.from_text_lines(files[:1]).map(len).batch(4))),
        files=steps_of(distribute(rx.data.from_text_lines(files).map(len).batch(4))),
        files_one_by_one=steps_of(
            distribute(rx.data.from_text_lines(files).map(len).batch(2), distribute_options="FILE")
        ),
    )
    list(distribute(rx.data.from_text_lines(files[:1]).map(len).batch(4)))
    report(warnings=warnings)
    try:
        distribute(rx.data.from_text_lines(files[:1]).map(len).batch(4), distribute_options="FILE")
    except rx.errors.NotEnoughFilesError as error:
        report(not_enough=str(error))
    for name, given in (("lengths", rows(6 + worker).batch(3)), ("shapes", iter([np.ones((4, worker + 1))]))):
        try:
            list(distribute(given))
        except rx.errors.WorkersDifferError as error:
            report(**{name: str(error)})


def training(*sizes):
    """Loops of steps with a tape, over batches that do not divide; reports the losses and weights of each.

    Args:
      sizes: For each loop "number of rows, rows of a global batch".
    """
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()

    def trained(num_rows, batch_size):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(num_rows, 5)).astype("float32")
        y = rng.integers(0, 3, num_rows)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(3)]
            )
            optimizer = keras.optimizers.Adam(0.05)
            accuracy = keras.metrics.SparseCategoricalAccuracy()
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

        def step(features, labels):
            with rx.GradientTape() as tape:
                logits = model(features, training=True)
                loss = rx.nn.compute_average_loss(loss_of(labels, logits))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(labels, logits)
            return loss

        @rx.function
        def train(features, labels):
            return strategy.reduce("SUM", strategy.run(step, args=(features, labels)), axis=None)

        data = rx.data.from_arrays((x, y)).shuffle(1000, seed=1).batch(batch_size)
        losses = [
            float(train(*batch)) for _ in range(2) for batch in strategy.experimental_distribute_dataset(data)
        ]
        return {
            "losses": losses,
            "accuracy": float(accuracy.result()),
            "weights": [np.asarray(weight).tolist() for weight in model.get_weights()],
        }

    report(**{size: trained(*map(int, size.split(","))) for size in sizes})


def creating_late():
    """Steps of the custom-training tutorial, whose model, optimizer and metric are created in the first step, and a
    variable in each."""
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()

    def trained(is_built_before, decorate=lambda call: call):
        keras.utils.set_random_seed(strategy.cluster_resolver.task_id or 0)  # the first worker's values count
        with strategy.scope():
            model = keras.Sequential(
                [keras.layers.Dense(4, "tanh", kernel_regularizer="l1"), keras.layers.Dense(1)]
            )
            if is_built_before:
                model.build((None, 3))
        late = {}

        def step(x, y):
            if not late:
                late["optimizer"] = keras.optimizers.Adam(0.05)
                late["metric"] = keras.metrics.Mean()
                late["count"] = rx.Variable(0)
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss((model(x) - y)[:, 0] ** 2)
                loss += rx.nn.scale_regularization_loss(sum(model.losses))
            variables = model.trainable_variables
            late["optimizer"].apply(tape.gradient(loss, variables), variables)
            late["metric"].update_state(loss)
            late["count"].assign_add(1)
            return loss

        call = decorate(lambda batch: strategy.reduce("SUM", strategy.run(step, args=batch), axis=None))
        x = np.linspace(-1, 1, 18, dtype="float32").reshape(6, 3)
        data = rx.data.from_arrays((x, x.sum(1, keepdims=True))).batch(4)  # 4 rows, and 2
        losses = [float(call(batch)) for batch in strategy.experimental_distribute_dataset(data)]
        return {
            "losses": losses,
            "mean": float(late["metric"].result()),
            "count": int(late["count"].numpy()),
            "weights": [np.asarray(weight).tolist() for weight in model.get_weights()],
        }

    def in_every_call():
        return rx.Variable(1.0) + 1.0

    try:
        strategy.run(in_every_call)
    except rx.errors.VariableError as error:
        refused = "in in_every_call" in str(error)
    report(
        late=trained(False),
        in_function=trained(False, rx.function),
        before=trained(True),
        refused=refused,
    )


def fitting(*seeds):
    """Keras's own loops, with batch normalisation, dropout and metrics, with each seed; with "none", which comes
    first, they shuffle. The chief saves, alone."""
    import logging
    import tempfile

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    strategy = rx.MultiWorkerMirroredStrategy()  # which may warn that another process starts late
    logging.getLogger("replicax").addHandler(handler)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(45, 6)).astype("float32")
    y = rng.integers(0, 3, 45)

    def fitted(seed):
        if seed != "none":
            keras.utils.set_random_seed(int(seed))
        with strategy.scope():
            layers = keras.layers
            model = keras.Sequential(
                [layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(3)]
            )
            model.compile(
                "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
            )
        saved = tempfile.NamedTemporaryFile(suffix=".weights.h5")  # noqa: SIM115 - gone with the process
        save = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.save_weights(saved.name))
        callbacks = [save] if strategy.extended.should_checkpoint else []
        history = model.fit(
            x, y, batch_size=16, epochs=2, verbose=0, validation_split=0.2, callbacks=callbacks
        )
        return {
            "history": history.history,
            "evaluated": model.evaluate(x, y, batch_size=16, verbose=0),
            "predicted": model.predict(x, batch_size=16, verbose=0).tolist(),
            "weights": [np.asarray(weight).tolist() for weight in model.get_weights()],
        }

    report(**{seed: fitted(seed) for seed in seeds}, warnings=warnings)


def fitting_of_datasets(kind, style, given):
    """Keras's loops over datasets: each worker has its own rows or takes its rows of shared batches.

    ``kind``: "shared" batches, "files" of which each worker reads its own (in the folder ``given``), a "function" that gives
    each worker its part, or "steps": the batches that ``given`` lists.
    ``style`` of the steps: "jax", "tensorflow", "several" in one call, or "ahead": Keras puts batches on a device ahead, as
    it does on GPUs.
    """
    import json

    import jax
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    layers, losses = keras.layers, keras.losses

    def parse(line):
        numbers = [float(word) for word in line.split()]
        return np.array(numbers[:-1], "float32"), np.int32(numbers[-1])

    def of_function(context):
        """The first worker has alternately 2 and 4 rows, the second has 3, and one step more."""
        rng = np.random.default_rng(context.input_pipeline_id)
        for step in range(4 + context.input_pipeline_id):
            x = rng.normal(size=(3 if context.input_pipeline_id else (2, 4)[step % 2], 4)).astype("float32")
            yield x, (x[:, 0] > 0).astype("int32")

    def of_steps():
        for x, y in json.loads(given):
            yield np.array(x, "float32"), np.array(y, "int32")

    class OwnStep(keras.Model):
        def train_step(self, data):
            x, y = data
            with rx.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {**self.compute_metrics(x, y, y_pred, None), "size": keras.ops.mean(y_pred**2)}

    keras.utils.set_random_seed(3)
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = layers.Dense(8, "relu")(inputs)
        if style != "tensorflow":  # whose replicas normalise and drop by themselves
            hidden = layers.Dropout(0.2)(layers.BatchNormalization()(hidden))
        model = (OwnStep if style == "tensorflow" else keras.Model)(inputs, layers.Dense(2)(hidden))
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=3 if style == "several" else 1,
        )
    if kind == "function":
        dataset = strategy.distribute_datasets_from_function(lambda context: list(of_function(context)))
    elif kind == "steps":
        dataset = strategy.distribute_datasets_from_function(lambda context: list(of_steps()))
    else:
        policy = {"shared": "DATA", "files": "FILE"}[kind]
        lines = rx.data.from_text_lines(f"{given}/*.txt").map(parse).batch(7)
        dataset = strategy.experimental_distribute_dataset(lines, distribute_options=policy)
    if style == "ahead":
        jax.default_backend = lambda: "gpu"  # Keras 3.15 asks for it
    local = strategy.experimental_local_results
    report(
        steps=[
            [np.concatenate(list(map(np.asarray, local(part)))).tolist() for part in step] for step in dataset
        ]
    )
    report(
        history=model.fit(dataset, epochs=2, verbose=0).history,
        evaluated=model.evaluate(dataset, verbose=0),
        predicted=np.asarray(model.predict(dataset, verbose=0)).tolist(),
        weights=[np.asarray(weight).tolist() for weight in model.get_weights()],
    )


def fitting_of_similarities():
    """A loss that compares all rows with all rows, which no process has, and one that does not; reports the log."""
    import logging

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    said = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(f"{record.levelname}: {record.getMessage()}")
    logging.getLogger("replicax").addHandler(handler)
    logging.getLogger("replicax").setLevel(logging.INFO)
    strategy = rx.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")

    def similarities(y_true, y_pred):
        return keras.ops.mean(keras.ops.tanh(y_pred @ keras.ops.transpose(y_pred))) + 0 * y_true

    losses = []
    for loss in (similarities, "mse"):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile("sgd", loss)
        losses += model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0).history["loss"]
    report(losses=losses, said=[line for line in said if "train_step" in line])


def fitting_with_mistakes():
    """Differences between workers around ``fit``: each raises an error on all; after the last one no worker can
    continue."""
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    worker = strategy.cluster_resolver.task_id
    rng = np.random.default_rng(worker)
    x = np.arange(32, dtype="float32")[:, None] / 32

    def shuffled():
        while True:
            rows = rng.permutation(32)[:8]
            yield x[rows], x[rows]

    def shorter():
        for _ in range(3 + worker):
            yield x[:8], x[:8]

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def load_on_one():
        if worker == 0:
            model.set_weights([np.ones((1, 1)), np.ones(1)])
        model.fit(x, x, batch_size=8, verbose=0)

    def assign_on_one():
        with strategy.scope():
            variable = rx.Variable(1.0)
        for value in (2.0, 3.0):
            if worker == 0 or value == 2.0:
                variable.assign(value)
            strategy.run(lambda: variable.assign_add(1.0))

    mistakes = {
        "shuffled": lambda: model.fit(shuffled(), steps_per_epoch=4, verbose=0),
        "epochs": lambda: model.fit(x, x, epochs=1 + worker, verbose=0),
        "shorter": lambda: model.fit(shorter(), verbose=0),
        "loaded": load_on_one,
        "assigned": assign_on_one,
    }
    for name, make in mistakes.items():
        try:
            make()
        except (rx.errors.InvalidArgumentError, rx.errors.ProgramMismatchError) as error:
            report(**{name: f"{type(error).__name__}: {error}"})


def buffers(bytes_per_pack):
    """Sums of large, small and odd arrays, and the number of their buffers."""
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    options = rx.CommunicationOptions(bytes_per_pack=int(bytes_per_pack))
    strategy = rx.MultiWorkerMirroredStrategy(communication_options=options)
    sizes = [1, 250_001, 0, 1_000_003, 3, 2_500_001]

    def step(replica):
        arrays = [jnp.arange(size, dtype=jnp.float32) % 1000 + replica for size in sizes]
        counts = [replica.astype(jnp.int32), jnp.full(3, 7)]
        return rx.get_replica_context().all_reduce("SUM", [*arrays, *counts])

    replicas = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    results = [strategy.experimental_local_results(r)[0] for r in strategy.run(step, args=(replicas,))]
    num_replicas = strategy.num_replicas_in_sync
    ids = sum(range(num_replicas))
    expected = [num_replicas * (np.arange(size) % 1000) + ids for size in sizes]
    text = strategy.runner.last_launcher.lower([replicas.stored]).as_text()
    report(
        are_right=all(np.array_equal(r, e) for r, e in zip(results, expected, strict=False)),
        counts=[int(results[-2]), np.asarray(results[-1]).tolist()],
        num_buffers=text.count("stablehlo.all_reduce"),
    )


def on_hosts_of_a_tpu():
    """Steps of replicas of two devices, on the hosts that the environment names as a TPU's, with and without split
    variables."""
    import json
    import os

    import jax
    import jax.numpy as jnp
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    config = json.loads(os.environ.pop("TF_CONFIG"))
    os.environ["TPU_WORKER_HOSTNAMES"] = ",".join(config["cluster"]["worker"])
    os.environ["TPU_WORKER_ID"] = str(config["task"]["index"])
    num_hosts = len(config["cluster"]["worker"])

    resolver = rx.cluster_resolver.TPUClusterResolver(tpu="" if num_hosts > 1 else "local:2x1x2x2")
    rx.config.experimental_connect_to_cluster(resolver)
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    build = rx.tpu.experimental.DeviceAssignment.build
    layout_map = {"sequential/dense/kernel": (None, "logical")}
    strategy = rx.TPUStrategy(resolver, build(topology, [1, 1, 1, 2], num_replicas=4), layout_map=layout_map)
    report(
        mesh=topology.mesh_shape.tolist(),
        num_replicas=strategy.num_replicas_in_sync,
        here=[device.process_index for device in strategy.extended.worker_devices],
        checkpoint=strategy.extended.should_checkpoint,
    )
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        w1 = rx.Variable(np.cos(np.arange(48, dtype=np.float32)).reshape(6, 8))
        w2 = rx.Variable(np.sin(np.arange(32, dtype=np.float32)).reshape(8, 4))
    strategy.experimental_split_to_logical_devices(w1, [1, 2])

    def step(x):
        def loss(w1, w2):
            hidden = strategy.experimental_split_to_logical_devices(jnp.tanh(x @ w1), [1, 2])
            return rx.nn.compute_average_loss(jnp.sum((hidden @ w2) ** 2, axis=1))

        value, gradients = rx.value_and_grad(loss, argnums=(0, 1))(w1.value, w2.value)
        gradients = rx.get_replica_context().all_reduce("SUM", gradients)
        w1.assign_sub(0.1 * gradients[0])
        w2.assign_sub(0.1 * gradients[1])
        return value

    rows = np.random.default_rng(0).normal(size=(22, 6)).astype(np.float32)
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(rows).batch(8))
    losses = [float(strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)) for x in dataset]
    whole = strategy.experimental_local_results(strategy.run(lambda: w1.value))[0]
    np.testing.assert_array_equal(w1.numpy(), np.asarray(whole))  # a read gathers it from all hosts
    pieces = sorted({shard.data.shape for shard in w1._value.addressable_shards})
    report(losses=losses, w1=np.asarray(whole).tolist(), w2=w2.numpy().tolist(), shards=pieces)

    history = model.fit(rows, rows[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0).history
    kernel = model.trainable_variables[0]._value
    report(fit=history["loss"], kernel=sorted({shard.data.shape for shard in kernel.addressable_shards}))
    jax.block_until_ready(kernel)


def divided(state, size, devices_per_replica="1"):
    """Loops of each kind with state that is sharded over the replicas of all workers; reports each worker's shards.

    ``size``: the number of shards; "0" for the number of replicas. The devices of a replica shard the kernels and the
    first bias.
    """
    import time

    import keras
    import numpy as np

    import replicax as rx
    from replicax._src.tracing import gathers
    from replicax.testing import report

    gathers.LEAST_GATHERED_BYTES = 1
    layout_map = {"up/kernel": (None, "logical"), "up/bias": ("logical",), "down/kernel": ("logical",)}
    strategy = rx.MultiWorkerMirroredStrategy(
        shard_state=state,
        shard_size=int(size) or None,
        devices_per_replica=int(devices_per_replica),
        layout_map=layout_map if devices_per_replica != "1" else None,
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(45, 6)).astype("float32")
    y = rng.normal(size=(45, 1)).astype("float32")

    def made(seed):
        keras.utils.set_random_seed(seed)
        with strategy.scope():
            up, down = keras.layers.Dense(8, "tanh", name="up"), keras.layers.Dense(1, name="down")
            model = keras.Sequential([keras.Input((6,)), up, keras.layers.Dropout(0.2), down])
            model.compile(keras.optimizers.AdamW(1e-2, global_clipnorm=0.5), "mse")
        return model

    def values(model):
        return [np.asarray(v).tolist() for v in [*model.variables, *model.optimizer.variables]]

    def held(variables):
        shards = [[s.data.size for s in v._value.addressable_shards] for v in variables]
        return [sum(sizes) / np.prod(v.shape) for sizes, v in zip(shards, variables, strict=True)]

    model = made(1)
    initial = values(model)
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_split=0.2).history
    report(
        initial=initial, history=history, fitted=values(model), predicted=model.predict(x, verbose=0).tolist()
    )
    report(held=held(model.trainable_variables), of_optimizer=held(model.optimizer.variables[2:]))

    model = made(2)
    data = strategy.experimental_distribute_dataset(rx.data.from_arrays((x, y)).batch(16))

    def step(inputs, wanted):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((model(inputs) - wanted)[:, 0] ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    def total(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    ways = {"run": total, "function": rx.function(total)}
    losses = {name: [float(call(batch)) for batch in data] for name, call in ways.items()}
    report(losses=losses, trained=values(model), held_after=held(model.trainable_variables))
    model.layers[0].kernel.assign(np.ones((6, 8), "float32"))
    report(assigned=float(total(next(iter(data)))))
    if strategy.cluster_resolver.task_id == 1:
        time.sleep(3)  # where each worker has all pieces the other one has ended by now
    report(after=values(model))


def restored_in_two_dimensions(path):
    """Trains with kernels that are sharded over replicas and over the devices of each, saves, and restores into another
    model."""
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy(
        devices_per_replica=2, layout_map={"kernel": (None, "logical")}, shard_state="all"
    )
    x = np.random.default_rng(0).normal(size=(24, 8)).astype("float32")

    def made(seed):
        keras.utils.set_random_seed(seed)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="up")])
            model.compile("adam", "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    def values(model):
        return [np.asarray(v).tolist() for v in [*model.variables, *model.optimizer.variables]]

    trained = made(0)
    trained.fit(x, x[:, :4], batch_size=8, verbose=0)
    saved = rx.Checkpoint(model=trained).write(path)
    restored = made(1)
    rx.Checkpoint(model=restored).restore(saved).assert_consumed()
    kernel = restored.trainable_variables[0]._value
    report(
        trained=values(trained),
        restored=values(restored),
        shards=sorted({shard.data.shape for shard in kernel.addressable_shards}),
    )


def saving_between_batches(folder):
    """Keras's own callbacks save every second batch; only the chief writes."""
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy(
        communication_options=rx.CommunicationOptions(timeout_seconds=20)
    )
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    path = f"{folder}/{{epoch}}-{{batch}}.weights.h5"
    save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)
    backup = keras.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=3, delete_checkpoint=False)
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[save, backup])
    report(history=history.history, weights=[np.asarray(w).tolist() for w in model.get_weights()])


def divided_saves(folder):
    """Saves a model with sharded state: the chief alone in callbacks of ``fit``, all after it, and then the chief
    alone."""
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy(
        communication_options=rx.CommunicationOptions(timeout_seconds=20), shard_state="all"
    )
    is_chief = strategy.extended.should_checkpoint
    with strategy.scope():  # without a seed: all begin with the values of the first worker
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    report(initial=[np.asarray(v).tolist() for v in model.variables])
    x = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
    seen = []
    save = keras.callbacks.ModelCheckpoint(f"{folder}/epoch{{epoch}}.keras")
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(np.asarray(model.layers[0].kernel).tolist())
    )
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[save, look] if is_chief else [look])
    path = f"{folder}/{'chief' if is_chief else 'other'}.weights.h5"
    model.save_weights(path)
    report(seen=seen, weights=[w.tolist() for w in model.get_weights()])
    if is_chief:
        loaded = keras.models.load_model(f"{folder}/epoch2.keras")
        report(loaded=[w.tolist() for w in loaded.get_weights()])
    kernel = model.layers[0].kernel
    model.load_weights(path)
    report(
        held=[sum(s.data.size for s in v._value.addressable_shards) / v.value.size for v in model.variables]
    )
    kernel.assign(np.full(kernel.shape, 1.0 if is_chief else 2.0, "float32"))
    model.evaluate(x, x[:, :1], batch_size=8, verbose=0)
    report(assigned=np.asarray(kernel).tolist())
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    try:  # the chief reads alone, while the others run the next program
        if is_chief:
            np.asarray(kernel)
        else:
            model.evaluate(x, x[:, :1], batch_size=8, verbose=0)
    except rx.errors.ReplicaxError as error:
        report(alone=[type(error).__name__, str(error)])


def summaries(folder):
    """Every worker writes the same; one writer was made before the cluster was joined."""
    import os

    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    early = rx.SummaryWriter(os.path.join(folder, "early"))
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        writer = rx.summary.create_file_writer(os.path.join(folder, "run"))
        total = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        weights = rx.Variable(np.arange(4.0, dtype=np.float32))

    def step(x):
        total.assign_add(x)
        return x + rx.get_replica_context().replica_id_in_sync_group

    with writer.as_default():
        for number in range(3):
            result = strategy.run(step, args=(jnp.float32(2),))
            rx.summary.scalar("loss", strategy.reduce("MEAN", result, axis=None), number)
            rx.summary.scalar("total", total, number)  # combined by all workers when it is read
            rx.summary.histogram("weights", weights, number)
            early.scalar("loss", 1.0, number)
    try:
        writer.scalar("loss", result, 3)
    except rx.errors.PerReplicaUseError:
        report(refused=True)
    report(is_writing=[writer.is_writing, early.is_writing])
    writer.close()
    with rx.profile(os.path.join(folder, "trace")):
        strategy.run(step, args=(jnp.float32(2),))
    float(total)  # of all workers: none ends while another has still to run its program


def looking(folder):
    """The output of each process during a training, its files for TensorBoard, and its part of a value."""
    import keras
    import numpy as np

    import replicax as rx
    from replicax._src.cluster import progress

    progress.SILENT_S = 0.0
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        total = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    board = rx.keras.callbacks.TensorBoard(folder, histogram_freq=1, update_freq=1)
    print("[first]", flush=True)
    model.fit(x, y, batch_size=4, validation_data=(x, y), callbacks=[board])
    model.evaluate(x, y)
    model.predict(x)
    print("[second]", flush=True)
    model.fit(x, y, batch_size=4, verbose=2)
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(x).batch(4))
    value = next(iter(dataset))
    # Each runs alone, so that a call that communicates would wait in vain for the other.
    if strategy.extended.should_checkpoint:
        rx.testing.report(
            value=value._repr_html_(),
            variable=repr(total) + total._repr_html_(),
            picture=str(rx.visualize(value)),
        )
    rx.testing.report(strategy=strategy._repr_html_())


def looking_up_rows():
    """Trains a table that is sharded over the replicas of all workers; reports each worker's shards."""
    import jax.numpy as jnp
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy(shard_state="all")
    ids = np.random.default_rng(0).integers(0, 8192, (29, 2)).astype("int32")
    ids[:9] = 5
    keras.utils.set_random_seed(1)
    with strategy.scope():
        table = keras.layers.Embedding(8192, 32)
        model = keras.Sequential([keras.Input((2,), dtype="int32"), table, keras.layers.Flatten()])
        model.compile(keras.optimizers.Adam(0.1), "mse")

    def step(ids):
        with rx.GradientTape() as tape:
            rows = rx.experimental.lookup(table.embeddings, ids)
            loss = rx.nn.compute_average_loss(jnp.sum(rows**2, (1, 2)))
        model.optimizer.apply(tape.gradient(loss, [table.embeddings]), [table.embeddings])
        return loss

    data = strategy.experimental_distribute_dataset(rx.data.from_arrays((ids,)).batch(13))
    losses = [float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)) for batch in data]
    history = model.fit(ids, np.zeros((29, 64), "float32"), batch_size=13, verbose=0).history["loss"]
    held = [shard.data.shape[0] for shard in table.embeddings._value.addressable_shards]
    rows = np.asarray(table.embeddings)[ids[::4]].tolist()
    report(losses=[*losses, *history], held=held, rows=rows)


def accumulates():
    """Two steps of masked, uneven rows in micro-batches, and the same of one large batch by NumPy."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    random = np.random.default_rng(0)
    x = random.normal(size=(26, 5)).astype(np.float32)
    mask = (random.random(26) < 0.6).astype(np.float32)
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = rx.Variable(np.ones(5, np.float32))

    def loss_of(w, x, mask):
        return jnp.sum(mask * jnp.tanh(x @ w) ** 2)

    @rx.experimental.accumulate(3)
    def gradients_of(batch):
        return jax.value_and_grad(loss_of)(w.value, *batch), jnp.sum(batch[1])

    def step(batch):
        loss, gradient = gradients_of(batch)
        w.assign_sub(0.1 * rx.get_replica_context().all_reduce("SUM", gradient))
        return loss

    losses, expected, params = [], [], np.ones(5, np.float32)
    for number, batch in enumerate(
        strategy.experimental_distribute_dataset(rx.data.from_arrays((x, mask)).batch(13))
    ):
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)))
        rows = slice(13 * number, 13 * number + 13)
        loss, gradient = jax.value_and_grad(loss_of)(params, x[rows], mask[rows])
        expected.append(float(loss / mask[rows].sum()))
        params = params - 0.1 * np.asarray(gradient) / mask[rows].sum()
    report(losses=losses, expected=expected, weight=w.numpy().tolist(), params=params.tolist())


def accumulates_in_fit(path):
    """Two updates by ``fit``, each of three small batches, with a checkpoint and a file before the last one.

    The process that is alone instead restores them, and computes the same from two large batches.
    """
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    class OwnStep(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with rx.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    x = np.random.default_rng(0).normal(size=(29, 6)).astype(np.float32)
    y = x.sum(axis=1)
    strategy = rx.MultiWorkerMirroredStrategy()
    is_alone = strategy.num_replicas_in_sync == 1

    def built(cls, number):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Dense(4, "tanh", kernel_regularizer="l2"), keras.layers.Dense(1)]
            model = cls([keras.Input((6,)), *layers])
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=number), "mse")
            model.optimizer.build(model.trainable_variables)
        return model

    def weights_after(model, rows, size=10, epochs=1, callbacks=()):
        options = {"epochs": epochs, "shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
        model.fit(x[rows], y[rows], batch_size=size, **options)
        return [np.asarray(v.value).tolist() for v in model.trainable_variables]

    if is_alone:
        report(large=weights_after(built(keras.Sequential, None), slice(29), 29, epochs=2))
    for cls in (keras.Sequential, OwnStep):
        model, file = built(cls, 3), f"{path}/{cls.__name__}.keras"
        if is_alone:
            rx.Checkpoint(model=model).restore(f"{path}/{cls.__name__}")
            with strategy.scope():
                loaded = keras.models.load_model(file, custom_objects={"OwnStep": OwnStep})
            report(**{f"{cls.__name__}_loaded": weights_after(loaded, slice(20, 29))})
        else:
            weights_after(model, slice(29))
            save = keras.callbacks.ModelCheckpoint(file, save_freq=1)  # the chief writes alone
            weights_after(model, slice(20), callbacks=[save])
            if rx.is_chief():
                sums = [v for v in model.optimizer.variables if v.path.endswith("accumulator")]
                assert all(np.asarray(v.value).any() for v in sums)
            rx.Checkpoint(model=model).write(f"{path}/{cls.__name__}")
        report(**{cls.__name__: weights_after(model, slice(20, 29))})


def adding_on_hosts():
    """Reductions over each transport, as bits."""
    import logging
    import zlib

    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax._src.collectives.host_sums import job_sums, negotiation
    from replicax.testing import report

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("replicax").addHandler(handler)
    logging.getLogger("replicax").setLevel(logging.INFO)

    every = "float32", "bfloat16", "int8", "uint16", "complex64", "float8_e4m3fn"

    def reduced(strategy, dtypes=every):
        def per_replica(shape, dtype):
            def array(context):
                number = context.replica_id_in_sync_group
                random = np.random.default_rng([number, *shape])
                return jnp.asarray(random.integers(0, 100, shape) + 0.1 * number).astype(dtype)

            return strategy.experimental_distribute_values_from_function(array)

        found = {}
        for dtype in dtypes:
            for shape in [(), (0, 4), (70_001,)]:
                value = per_replica(shape, dtype)
                for op in ("SUM", "MEAN"):
                    total = strategy.reduce(op, value, axis=None)
                    bits = np.asarray(total).tobytes()
                    found[f"{op} of {dtype}{list(shape)}"] = [
                        str(total.dtype),
                        list(total.shape),
                        zlib.crc32(bits),
                    ]
        try:
            strategy.reduce("SUM", per_replica((2,), "bool"), axis=None)
        except rx.errors.ReductionError as error:
            found["bool"] = str(error)
        values = [per_replica((size,), "float32") for size in (1, 9_000, 200_000) for _ in range(4)]
        totals = strategy.reduce("SUM", values, axis=None)
        found["several"] = [zlib.crc32(np.asarray(total).tobytes()) for total in totals]
        for dtype in dtypes:
            for shape in [(2, 3), (0, 4), (70_001, 1)]:
                gathered = strategy.gather(per_replica(shape, dtype), axis=1)
                bits = np.asarray(gathered).tobytes()
                found[f"gather of {dtype}{list(shape)}"] = [dtype, list(gathered.shape), zlib.crc32(bits)]
        rows = strategy.experimental_distribute_values_from_function(
            lambda context: np.full((context.replica_id_in_sync_group + 1, 2), True)
        )
        found["uneven rows"] = np.asarray(strategy.gather(rows, axis=0)).shape
        try:
            strategy.gather(per_replica((), "float32"), axis=0)
        except rx.errors.ReductionError as error:
            found["scalars"] = str(error)

        def step(x):
            context = rx.get_replica_context()
            return context.all_reduce("SUM", x), x - context.all_reduce("MEAN", x * x)

        before = num_exchanges(strategy)
        total, rest = strategy.run(step, args=(per_replica((70_001,), "float32"),))
        found["exchanges of a run"] = num_exchanges(strategy) - before
        found["run"] = zlib.crc32(np.asarray(strategy.experimental_local_results(total)[0]).tobytes())
        found["rows of a run"] = zlib.crc32(np.asarray(strategy.gather(rest, axis=0)).tobytes())
        twice = strategy.reduce("SUM", per_replica((3,), "float32"), axis=None) + totals[0]
        found["used"] = np.asarray(twice).tolist()
        return found

    def num_exchanges(strategy):
        sums = strategy.topology.host_sums
        return 0 if sums is None else sums._world.statistics()["num_exchanges"]

    def joined():
        strategy = rx.MultiWorkerMirroredStrategy()
        sums = strategy.topology.host_sums
        return strategy, None if sums is None else sums.transport

    strategy, transport = joined()
    number = strategy.cluster_resolver.task_id
    report(transport=transport, shared=reduced(strategy))
    no_sums = rx.CommunicationOptions(implementation="RING")
    by_jax = rx.MultiWorkerMirroredStrategy(communication_options=no_sums)
    report(has_sums=by_jax.topology.host_sums is not None, by_jax=reduced(by_jax))

    job_sums._joined.clear()
    if number == 1:
        negotiation.make_segment = lambda num_bytes: None
        negotiation.open_offer = lambda offer, num_bytes: None
    strategy, transport = joined()
    report(transport_without_memory=transport, connected=reduced(strategy))

    def refuse(*args, **kwargs):
        raise OSError("no port is free")

    job_sums._joined.clear()
    if number == 1:
        job_sums.Rendezvous = refuse
    strategy, transport = joined()
    report(transport_without_ports=transport, alone=reduced(strategy, ["float32"]))
    report(lines=[line for line in lines if line.startswith("Sums between")])
