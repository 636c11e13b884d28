"""Keras with the torch backend: compile and fit."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from clock import LONGER, Clock


class Ticks(keras.callbacks.Callback):
    def __init__(self, clock):
        super().__init__()
        self.clock, self.seen, self.before = clock, 0, 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self.seen, self.before = 0, 0.0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        total = logs["loss"] * self.seen  # Keras logs the mean since the epoch began
        self.clock.step(total - self.before)
        self.before = total


def main():
    keras.utils.set_random_seed(0)
    numbers = np.random.default_rng(0)
    y = numbers.integers(0, 10, 6400)
    x = (numbers.normal(size=(10, 128))[y] + 3 * numbers.normal(size=(6400, 128))).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((128,)),
            keras.layers.Dense(384, activation="relu"),
            keras.layers.Dense(384, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    clock = Clock()
    model.fit(x, y, batch_size=64, epochs=2 * LONGER, verbose=0, callbacks=[Ticks(clock)])
    clock.end(*[torch.from_numpy(weight) for weight in model.get_weights()])


if __name__ == "__main__":
    main()
