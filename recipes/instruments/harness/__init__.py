"""lm-evaluation-harness on a mesh.

tasks.py runs its tasks, model.py is the model that they query, and scoring.py computes
log-likelihoods. Only model.py imports the harness when it is imported.
"""
