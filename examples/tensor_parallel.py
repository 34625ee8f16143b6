"""A small transformer whose layers are split over the two devices of each replica, as in Megatron-LM.

One layout map splits the variables: the first matrix of each pair by columns (for attention: by heads), the
second by rows, so that a pair needs one sum over the devices of a replica. The same model is trained with
``fit`` and with ``run``. On a machine without TPUs, eight virtual CPU devices replace the cores of four
chips.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import replicax as rx

rx.config.set_local_devices(8)  # has no effect on TPUs

NUM_TOKENS, LENGTH, WIDTH, NUM_HEADS, NUM_BLOCKS = 13, 12, 32, 4, 1
BATCH_SIZE, NUM_STEPS = 50, 30

LAYOUT_MAP = rx.experimental.LayoutMap(
    {
        # Each device computes some of the heads, and a part of each sum with its rows of the next matrix.
        r"attention/(query|key|value)/kernel": (None, "logical", None),
        r"attention/(query|key|value)/bias": ("logical", None),
        r"attention/attention_output/kernel": ("logical", None, None),
        # The same for some of the hidden units.
        r"widen/kernel": (None, "logical"),
        r"widen/bias": ("logical",),
        r"narrow/kernel": ("logical", None),
    }
)


def make_strategy() -> rx.TPUStrategy:
    resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    assignment = rx.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=topology.num_tpus_per_task // 2
    )
    return rx.TPUStrategy(resolver, assignment, layout_map=LAYOUT_MAP)


strategy = make_strategy()


@keras.saving.register_keras_serializable("examples")
class Block(keras.layers.Layer):
    """Causal attention, then two dense layers, each added to its input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norms = [keras.layers.LayerNormalization(name=f"norm_{i}") for i in range(2)]
        self.attention = keras.layers.MultiHeadAttention(NUM_HEADS, WIDTH // NUM_HEADS, name="attention")
        self.widen = keras.layers.Dense(4 * WIDTH, activation="gelu", name="widen")
        self.narrow = keras.layers.Dense(WIDTH, name="narrow")

    def build(self, shape):
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.widen.build(shape)
        self.narrow.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, use_causal_mask=True)
        hidden = self.widen(self.norms[1](x))
        pieces = [1, 1, strategy.num_logical_devices]  # what the compiler would do by itself, said
        return x + self.narrow(strategy.experimental_split_to_logical_devices(hidden, pieces))


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    places = keras.ops.arange(LENGTH)
    x = keras.layers.Embedding(NUM_TOKENS, WIDTH, name="tokens")(tokens)
    x = x + keras.layers.Embedding(LENGTH, WIDTH, name="places")(places)
    for number in range(NUM_BLOCKS):
        x = Block(name=f"block_{number}")(x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, keras.layers.Dense(NUM_TOKENS, name="logits")(x))


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Sequences in which each token is the sum of the two tokens before it; the target is the next token at
    each position."""
    sequences = np.random.default_rng(0).integers(0, NUM_TOKENS, (BATCH_SIZE * NUM_STEPS, LENGTH + 1))
    for place in range(2, LENGTH + 1):
        sequences[:, place] = (sequences[:, place - 1] + sequences[:, place - 2]) % NUM_TOKENS
    return sequences[:, :-1].astype(np.int32), sequences[:, 1:].astype(np.int32)


def train_with_fit(model: keras.Model) -> float:
    """The mean loss of one epoch."""
    with strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss)
    history = model.fit(*make_data(), batch_size=BATCH_SIZE, shuffle=False, verbose=0).history
    return history["loss"][0]


def train_with_run(model: keras.Model) -> float:
    """The same as a loop."""
    with strategy.scope():
        optimizer = keras.optimizers.Adam(3e-3)
        loss_of_each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(batch):
        tokens, wanted = batch
        with rx.GradientTape() as tape:
            losses = keras.ops.mean(loss_of_each(wanted, model(tokens, training=True)), axis=1)
            loss = rx.nn.compute_average_loss(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    batches = strategy.experimental_distribute_dataset(rx.data.from_arrays(make_data()).batch(BATCH_SIZE))
    losses = [strategy.run(step, args=(batch,)) for batch in batches]
    return float(np.mean([strategy.reduce("SUM", loss, axis=None) for loss in losses]))


def main() -> None:
    print(f"{strategy.num_replicas_in_sync} replicas of {strategy.num_logical_devices} devices")
    for train in (train_with_fit, train_with_run):
        with strategy.scope():
            model = make_model()
        print(f"{train.__name__}: a mean loss of {train(model):.4f}")
    for variable in model.trainable_variables[2:]:
        shape, piece = variable.shape, variable.value.addressable_shards[0].data.shape
        if "block_0" in variable.path and piece != shape:
            print(f"  {variable.path:42} {shape!s:13} a device has {piece}")
    planned_fit()


def planned_fit() -> None:
    """What a step of ``fit`` communicates; the step is compiled, but not run."""
    with strategy.scope():
        model = make_model()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    plan = strategy.plan(model.fit, args=make_data(), kwargs={"batch_size": BATCH_SIZE})
    for one in plan.compiled:
        print(f"  {one.count} x {one.kind} of {one.bytes:,} bytes over {'+'.join(one.axes)}")


if __name__ == "__main__":
    main()
