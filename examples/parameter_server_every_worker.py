"""Every worker runs this program at its own pace, on variables that parameter servers hold.

replicax launch --workers 2 --ps 1 --no-chief examples/parameter_server_every_worker.py

The worker that is the chief (here worker 0) creates the variables. Each worker reads its own part of the
data, and all stop when they have made NUM_STEPS steps together. In TensorFlow, this form is tf.estimator with
the ParameterServerStrategy of TensorFlow 1.
"""

import jax.numpy as jnp
import numpy as np

import replicax as rx

NUM_STEPS = 400
LEARNING_RATE = 0.1
TRUE_WEIGHTS = np.array([[2.0], [-1.0], [0.5]], np.float32)

strategy = rx.ParameterServerStrategy()
task = strategy.cluster_resolver.task_id

with strategy.scope():
    weights = rx.Variable(jnp.zeros((3, 1)), name="weights")
    global_step = rx.Variable(jnp.int32(0), name="global_step")


def dataset_fn(context: rx.InputContext):
    """All rows of this worker, repeated."""
    x = np.random.default_rng(0).normal(size=(1024, 3)).astype(np.float32)
    rows = rx.data.from_arrays((x, x @ TRUE_WEIGHTS))
    rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
    return (
        rows.shuffle(512, seed=context.input_pipeline_id)
        .repeat()
        .batch(context.get_per_replica_batch_size(32))
    )


def train_step(x, y):
    """Runs here; its assignments are made on the parameter servers, where the other workers assign too."""
    with rx.GradientTape() as tape:
        loss = jnp.mean((x @ weights - y) ** 2)
    gradient = tape.gradient(loss, weights)
    weights.assign_sub(LEARNING_RATE * gradient)
    global_step.assign_add(1)  # in every worker: it has one replica
    return loss


num_own = 0
for x, y in strategy.distribute_datasets_from_function(dataset_fn):
    if int(global_step) >= NUM_STEPS:
        break
    loss = strategy.run(train_step, args=(x, y))
    num_own += 1

print(f"worker {task} made {num_own} steps, its last loss is {float(loss) if num_own else 0.0:.4f}")
if strategy.is_chief:
    print(f"after {int(global_step)} steps of all workers the weights are {weights.numpy().ravel().round(3)}")
