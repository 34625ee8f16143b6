import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import replicax as rx

resolver = rx.cluster_resolver.TPUClusterResolver(tpu="")
rx.tpu.experimental.initialize_tpu_system(resolver)
strategy = rx.TPUStrategy(resolver)
print(strategy.num_replicas_in_sync)
