import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import replicax as rx

rx.config.set_local_devices(2)
keras.utils.set_random_seed(0)
strategy = rx.MirroredStrategy()

x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        self.discriminator = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        self.seeds = keras.random.SeedGenerator(0)

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data):
        noise = keras.random.normal((keras.ops.shape(data)[0], 4), seed=self.seeds)
        with rx.GradientTape() as tape:
            scores = self.discriminator(self.generator(noise))
            loss = rx.nn.compute_average_loss(keras.ops.softplus(-scores)[:, 0])
        weights = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"g_loss": loss}


with strategy.scope():
    gan = GAN()
    gan.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3))
history = gan.fit(x, batch_size=16, verbose=0).history
print(f"epoch 1 loss {history['g_loss'][0]:.3f}")
