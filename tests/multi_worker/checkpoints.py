"""Programs of the tests of checkpoints, which all workers of a cluster run."""


def training(folder, num_steps, restores):
    """Steps with dropout, a count per replica and data in the order of the files; saves after every second step."""
    import hashlib
    import os
    import tempfile
    import time

    import keras
    import numpy as np

    import replicax as rx
    from replicax._src.checkpoint import agreement, writing
    from replicax.checkpoint import CheckpointError, UnsharedDirectoryError
    from replicax.errors import InvalidArgumentError
    from replicax.testing import report

    strategy = (
        rx.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else rx.OneDeviceStrategy("cpu:0")
    )
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.01)
        rows = rx.Variable(0, trainable=False, synchronization="on_read", aggregation="sum")
    x = np.random.RandomState(0).randn(48, 4).astype("float32")
    data = rx.data.from_arrays((x, x.sum(1, keepdims=True))).shuffle(48, seed=5).batch(12).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(data))
    checkpoint = rx.Checkpoint(
        model=model, optimizer=optimizer, rows=rows, iterator=iterator, state={"epoch": 1}
    )
    manager = rx.CheckpointManager(checkpoint, folder)

    def train_step(inputs):
        x, y = inputs
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((model(x, training=True) - y)[:, 0] ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        rows.assign_add(x.shape[0])
        return loss

    step = rx.function(
        lambda inputs: strategy.reduce("sum", strategy.run(train_step, args=(inputs,)), axis=None)
    )
    if restores == "True":
        path = manager.restore_or_initialize()
        report(restored=os.path.basename(path), at_restore=int(rows))
    losses = []
    for number in range(int(num_steps)):
        losses.append(float(step(next(iterator))))
        if number % 2:
            manager.save()
    manager.close()

    digest = hashlib.sha256()
    for variable in [*model.variables, *optimizer.variables]:
        digest.update(np.asarray(variable).tobytes())
    report(
        losses=losses,
        state=digest.hexdigest(),
        rows=[int(rows), *map(int, rows.values)],
        num_written=manager.statistics()["num_saved"],
        latest=os.path.basename(manager.latest_checkpoint),
    )
    if strategy.num_replicas_in_sync > 1:
        waited = rx.CheckpointManager(checkpoint, f"{folder}-waited")
        write_pieces, index = writing.write_pieces, min(strategy.cluster_resolver.task_id, 1)
        writing.write_pieces = lambda *args: (time.sleep(2), write_pieces(*args))[1]
        waited.save()
        try:
            waited.wait(timeout_s=0.1)
        except TimeoutError as error:
            report(late=str(error))
        waited.wait()
        report(after_wait=[os.path.basename(path) for path in waited.checkpoints])
        writing.write_pieces = write_pieces if index == 0 else None
        waited.save()
        try:
            waited.save()
        except CheckpointError as error:
            report(failed=f"{type(error).__name__}: {error}")
        writing.write_pieces = write_pieces
        waited.save()
        waited.wait()
        report(after_failure=[os.path.basename(path) for path in waited.checkpoints])
        before = optimizer.iterations.numpy()
        for name, path in (
            ("another", waited.checkpoints[index]),
            ("none", [None, waited.checkpoints[0]][index]),
        ):
            try:
                checkpoint.restore(path)
            except InvalidArgumentError as error:
                report(**{f"restoring_{name}": str(error)})
        try:
            checkpoint.restore([waited.checkpoints[0], f"{folder}-waited/ckpt-999"][index])
        except CheckpointError as error:
            report(restoring_missing=f"{type(error).__name__}: {error}")
        report(untouched=bool(optimizer.iterations.numpy() == before))
        agreement._SHARED_WITHIN_S = 0.5
        if index == 0:
            writing.write_pieces = lambda *args: (time.sleep(0.5), write_pieces(*args))[1]
        with rx.CheckpointManager(checkpoint, f"{folder}-closed") as closed:
            closed.save(1)
        report(after_close=os.path.basename(rx.checkpoint.latest_checkpoint(closed.directory) or "none"))
        manager = rx.CheckpointManager(checkpoint, f"{folder}-under-way", max_to_keep=1)
        manager.save(1)
        if index == 1:  # by itself: the other process does not call it
            report(under_way=os.path.basename(rx.checkpoint.latest_checkpoint(manager.directory)))
        checkpoint.restore(manager.save(2)).assert_consumed()
        manager.save(3)
        report(reopened=rx.CheckpointManager(checkpoint, manager.directory).restore_or_initialize()[-6:])
        if index == 0:
            writing.write_pieces = None
        path = manager.save(4)
        try:
            rx.checkpoint.latest_checkpoint(manager.directory)
        except CheckpointError as error:
            report(failed_alone=type(error).__name__)
        try:
            checkpoint.restore(path)
        except CheckpointError as error:
            report(failed_together=f"{type(error).__name__}: {error}")
        report(after_all=os.path.basename(rx.checkpoint.latest_checkpoint(manager.directory)))
        writing.write_pieces = write_pieces
        with tempfile.TemporaryDirectory() as own:
            try:
                checkpoint.write(os.path.join(own, "exact"))
            except UnsharedDirectoryError as error:
                report(unshared=str(error))
        with tempfile.TemporaryDirectory() as own:  # as programs of TensorFlow, which remove it
            given = f"{folder}-shared" if index == 0 else os.path.join(own, "workertemp")
            second = rx.CheckpointManager(rx.Checkpoint(state={"epoch": 1}), given)
            for _ in range(2):
                second.save()
                second.wait()
                if index == 1:
                    os.rmdir(given)
            report(saved_to=second.directory, latest=second.latest_checkpoint)


def divided_state(folder, action, num_bytes):
    """Saves or restores arrays that are divided over the devices of all processes, by rows, columns and both."""
    import os
    import time

    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import replicax as rx
    from replicax._src.checkpoint import array_chunks, writing
    from replicax._src.devices import topology
    from replicax.errors import ClusterFailureError
    from replicax.testing import report

    array_chunks.CHUNK_BYTES, array_chunks.FILE_BYTES = 1 << 16, 1 << 19
    strategy = (
        rx.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else rx.OneDeviceStrategy("cpu:0")
    )
    devices = np.array(jax.devices()).reshape(-1, 2 if len(jax.devices()) % 2 == 0 else 1)
    mesh = jax.sharding.Mesh(devices, ("x", "y"))
    rows = int(num_bytes) // 4 // 512
    layouts = {
        "rows": PartitionSpec(("x", "y")),
        "columns": PartitionSpec(None, ("x", "y")),
        "both": PartitionSpec("x", "y"),
        "turned": PartitionSpec("y", "x"),
        "copied": PartitionSpec(),
    }
    values = {
        name: np.random.default_rng(number).random((rows, 512), np.float32)
        for number, name in enumerate(layouts)
    }

    def placed(name, value):
        sharding = NamedSharding(mesh, layouts[name])
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def gathers(*args, **kwargs):
        raise AssertionError("an array was gathered")

    state = {name: placed(name, values[name] * (action != "restore")) for name in layouts}
    state["number"] = np.int64(7)
    checkpoint = rx.Checkpoint(state=state)
    manager = rx.CheckpointManager(checkpoint, folder)
    topology.Topology.put_whole = topology.Topology.compile = gathers
    if action == "restore":
        with open("/proc/self/io") as file:
            before = int(file.readline().split()[1])
        path = manager.restore_or_initialize()
        with open("/proc/self/io") as file:
            num_read = int(file.readline().split()[1]) - before
        needed = sum(
            len({str(shard.index) for shard in state[name].addressable_shards})
            * state[name].addressable_shards[0].data.nbytes
            for name in layouts
        )
        are_equal = all(
            np.array_equal(shard.data, values[name][shard.index])
            for name in layouts
            for shard in checkpoint.state[name].addressable_shards
        )
        layouts_kept = all(checkpoint.state[name].sharding == state[name].sharding for name in layouts)
        report(path=os.path.basename(path), read=num_read, needed=needed, equal=are_equal, kept=layouts_kept)
        return
    manager.save()
    manager.wait()
    report(
        written=manager.statistics()["num_bytes"],
        buffers=checkpoint._buffers.num_bytes,
        total=sum(value.nbytes for value in values.values()),
    )
    if action == "die":
        write_pieces = writing.write_pieces
        if strategy.cluster_resolver.task_id == 1:
            writing.write_pieces = lambda *args: (write_pieces(*args), os._exit(9))
        manager.save()
        began = time.monotonic()
        try:
            manager.wait()
        except ClusterFailureError as error:
            report(died=str(error), after_s=time.monotonic() - began)
        report(left=sorted(os.listdir(folder)))


def continuous(folder, saves_on_failure):
    """A save after each step that is due; one worker's disk is slow, and then full for a while."""
    import errno
    import time

    import numpy as np

    import replicax as rx
    from replicax._src.checkpoint import writing
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    with strategy.scope():
        weights, step = rx.Variable(np.zeros(4, "float32")), rx.Variable(0)
    manager = rx.CheckpointManager(
        rx.Checkpoint(weights=weights, step=step),
        folder,
        max_to_keep=2,
        continuous=True,
        save_on_failure=saves_on_failure == "True",
    )
    write_pieces, began = writing.write_pieces, []

    def write(*args):
        if index == 1:
            time.sleep(0.03)
            if 40 <= int(step) < 80:
                raise OSError(errno.ENOSPC, "No space left on device")
        return write_pieces(*args)

    writing.write_pieces = write
    train = rx.function(lambda: strategy.run(lambda: weights.assign_add(np.ones(4, "float32"))))
    for number in range(150):
        train()
        step.assign_add(1)
        time.sleep(0.002 * ((number + index) % 3))
        if manager.save(number + 1) is not None:
            began.append(number + 1)
    manager.save(150, check_interval=False)
    manager.close()
    kept = [path.rpartition("-")[2] for path in manager.checkpoints]
    manager.restore_or_initialize()
    report(began=began, kept=kept, step=int(step), weights=np.asarray(weights).tolist())
