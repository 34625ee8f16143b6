cat > train.py <<'END'
import tensorflow as tf
strategy = tf.distribute.MirroredStrategy()
print "replicas", strategy.num_replicas_in_sync
END
replicax migrate train.py
