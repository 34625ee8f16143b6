import jax
import jax.numpy as jnp
import numpy as np
import replicax as rx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy()

mesh = Mesh(np.array(jax.devices()), ("data",))


def step(x):
    double = jax.shard_map(lambda part: 2 * part, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return double(x).sum()


print(strategy.run(step, args=(jnp.ones(4),)))
