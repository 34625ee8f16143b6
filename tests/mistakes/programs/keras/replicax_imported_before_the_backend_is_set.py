import replicax as rx

strategy = rx.MirroredStrategy()

import keras

with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
