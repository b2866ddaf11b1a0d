"""lm-evaluation-harness on a mesh: task.py runs its tasks, adapter.py is the model that it asks."""
