"""How much an array on a mesh differs from the same array on one device."""

import numpy as np

# Float32 sums over a mesh are taken in another order, so their last bits differ. These bounds are at
# least 1.25 times as wide as the differences measured for the zoo (tests/PROOF.md).
LOSS_TOLERANCE = 2e-6  # relative
GRADIENT_TOLERANCE = 2e-6  # |difference| / |gradient|, of each array


def difference(a, b, like=None) -> float:
    """Returns |a - b| / |b|, the relative difference in the Euclidean norm; `like`: in place of b."""
    norm = np.linalg.norm(np.ravel(b if like is None else like))
    return float(np.linalg.norm(np.ravel(a - b)) / max(norm, 1e-30))
