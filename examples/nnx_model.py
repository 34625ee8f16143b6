"""A flax nnx model, trained with the strategy that also trains Keras models: nnx modules are arguments of ``run``.

The step is written as for one device, except for two names: ``rx.nn.compute_average_loss``, and
``rx.optax.aggregate_gradients`` at the head of the optimizer's chain.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import replicax as rx
import replicax.optax

rx.config.set_local_devices(2)  # two virtual CPU devices; has no effect on accelerators

BATCH_SIZE, NUM_EPOCHS, NUM_TEST_ROWS = 32, 6, 360


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.convolution = nnx.Conv(1, 24, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(24, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(8 * 8 * 24, 10, rngs=rngs)

    def __call__(self, images):
        hidden = nnx.relu(self.norm(self.convolution(images)))
        return self.head(self.dropout(hidden.reshape(len(images), -1)))


def train_step(model, optimizer, batch):
    """One replica's work on its rows. The model and the optimizer are updated in place."""
    images, labels = batch

    def loss_of(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return rx.nn.compute_average_loss(losses)  # the sum of losses, over the true global batch size

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def test_step(model, batch):
    """The number of this replica's rows that are recognised."""
    images, labels = batch
    return jnp.sum(model(images).argmax(axis=-1) == labels)


def main() -> None:
    strategy = rx.MirroredStrategy()
    print(f"{strategy.num_replicas_in_sync} replicas of {strategy}")
    train_rows, test_rows = load_rows()
    train_data = rx.data.from_arrays(train_rows).shuffle(seed=0).batch(BATCH_SIZE)
    train_batches = strategy.experimental_distribute_dataset(train_data)
    test_batches = strategy.experimental_distribute_dataset(rx.data.from_arrays(test_rows).batch(BATCH_SIZE))

    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, optax.chain(rx.optax.aggregate_gradients(), optax.adam(1e-3)), wrt=nnx.Param
    )
    for epoch in range(1, NUM_EPOCHS + 1):
        model.train()
        losses = [strategy.run(train_step, args=(model, optimizer, batch)) for batch in train_batches]
        mean_loss = np.mean([strategy.reduce("sum", loss, axis=None) for loss in losses])

        model.eval()
        counts = [strategy.run(test_step, args=(model, batch)) for batch in test_batches]
        num_right = sum(int(strategy.reduce("sum", count, axis=None)) for count in counts)
        print(f"epoch {epoch}: loss {mean_loss:.4f}, {num_right} of {NUM_TEST_ROWS} test images recognised")


def load_rows():
    """Images in [0, 1] and labels, for training and for testing."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=NUM_TEST_ROWS, random_state=0, stratify=labels
    )
    return (train_images, train_labels), (test_images, test_labels)


if __name__ == "__main__":
    main()
