"""Recipes: one runnable file per zoo entry, `python -m recipes.<entry>`."""

import os
import time

STARTED = time.perf_counter()  # as good as the command's start: nothing heavy is imported yet

# XLA's and TensorStore's C++ notices go to stderr before Python can filter them. This runs before
# the first import of jax; set the variable to 0 to see them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
