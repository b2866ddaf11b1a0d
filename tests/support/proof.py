"""Tolerances and records of the proof that every mesh trains the same model; tests/PROOF.md."""

import numpy as np

# Float32 sums over a mesh are taken in another order, so their last bits differ. These bounds are at
# least twice as wide as the differences measured, which are in golden/mesh_differences.json.
LOSS_TOLERANCE = 2e-6  # relative, at each of 5 steps
GRADIENT_TOLERANCE = 2e-6  # |difference| / |gradient|, of each array at each of 5 steps

DIFFERENCES = "mesh_differences.json"
BYTES = "mesh_bytes.json"


def difference(a, b) -> float:
    """Returns |a - b| / |b|, the relative difference in the Euclidean norm."""
    return float(np.linalg.norm(np.ravel(a - b)) / max(np.linalg.norm(np.ravel(b)), 1e-30))
