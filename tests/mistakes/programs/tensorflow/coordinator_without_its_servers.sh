cat > train.py <<'END'
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import replicax as rx

resolver = rx.cluster_resolver.TFConfigClusterResolver()
strategy = rx.ParameterServerStrategy(resolver)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
coordinator = rx.coordinator.ClusterCoordinator(strategy)
END
export REPLICAX_START_TIMEOUT_S=5
export TF_CONFIG='{"cluster": {"chief": ["localhost:'$PORT_A'"], "worker": ["localhost:'$PORT_B'"], "ps": ["localhost:'$PORT_C'"]}, "task": {"type": "chief", "index": 0}}'
python train.py
