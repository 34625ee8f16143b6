import jax
import jax.numpy as jnp
import numpy as np
import replicax as rx

rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy()

import copy
import pickle

with strategy.scope():
    weights = rx.Variable(np.ones(3, np.float32))
best = copy.deepcopy(weights)
weights.assign(np.zeros(3, np.float32))
print("best", np.asarray(best))
with open("best.pkl", "wb") as file:
    pickle.dump(weights, file)
