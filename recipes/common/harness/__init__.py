"""lm-evaluation-harness on a mesh: tasks.py finds and runs its tasks, adapter.py is the model that it
asks, scoring.py computes what it asks for. Only the adapter imports the harness as it is imported.
"""
