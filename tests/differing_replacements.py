"""A program for `replicax launch` with fault tolerance whose checkpoint lacks something that its steps read."""

from training_pieces import Moments, bits_of


def forgetful(lacks=None, dies=(), waits=()):
    """A loop of twelve steps, with a save after each.

    Args:
      lacks: ``"scale"`` for a checkpoint without a variable of this name, ``"iterator"`` for one without the data.
      dies, waits: See ``Moments``.
    """
    import os

    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
    moments = Moments(strategy.cluster_resolver.task_id, dies, waits)
    x = np.random.default_rng(0).standard_normal((144, 4)).astype("float32")
    data = rx.data.from_arrays((x, x[:, :1])).shuffle(144, seed=3).batch(12)
    with strategy.scope():
        weights = rx.Variable(np.ones((4, 1), "float32"), name="weights")
        scale = rx.Variable(np.float32(1), trainable=False, name="scale")
        step = rx.Variable(0, trainable=False)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    objects = {"weights": weights, "scale": scale, "step": step, "iterator": iterator}
    checkpoint = rx.Checkpoint(**{name: each for name, each in objects.items() if name != lacks})
    manager = rx.CheckpointManager(checkpoint, os.environ["REPLICAX_CHECKPOINT_DIR"], max_to_keep=2)

    def train_step(batch):
        features, labels = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((features @ weights.value - labels)[:, 0] ** 2)
        gradient = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, [weights])[0])
        weights.assign_sub(0.05 * scale.value * gradient)
        scale.assign(scale * 0.9)
        return loss

    manager.restore_or_initialize()
    while int(step) < 12:
        strategy.run(train_step, args=(next(iterator),))
        step.assign_add(1)
        moments.reach(f"step {int(step)}")
        manager.save()
    print("bits", bits_of([weights, scale]), flush=True)
