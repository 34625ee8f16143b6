import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import replicax as rx

import json

os.environ["TF_CONFIG"] = json.dumps(
    {
        "cluster": {"worker": ["localhost:12345", "localhost:23456"]},
        "task": {"type": "worker", "index": 2},
    }
)
strategy = rx.MultiWorkerMirroredStrategy()
print(strategy.num_replicas_in_sync)
