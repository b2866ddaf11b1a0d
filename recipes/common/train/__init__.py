"""The training state, the train step, and the loop around it."""
