import jax
import jax.numpy as jnp
import numpy as np
import replicax as rx

rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy(num_devices=2)

print(strategy.num_replicas_in_sync)
