"""What several kernels use: static settings, which keys a query sees, and what a device can do.

Shapes: R rows of logits, M positions of a row, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

NOT_SEEN = -1e30  # a score without weight
TRITON_BLOCK = 64  # most queries, and keys, of one step of `triton`


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings of a kernel on one device."""

    positions: int  # T on the device
    window: int | None
    causal: bool = True  # False: a position sees later ones too
    soft_cap: float | None = None
    ring: tuple[str, ...] = ()  # mesh axes that split T between devices
    devices: int = 1  # on the ring
    striped: bool = False  # whether device d of n has the positions d, d + n, d + 2n, …
    # Makes of a kernel's two functions those for more keys than it is called with.
    around: Any = None
    # Whether this is a pass over rows in reverse, for later positions: devices on a ring count from the
    # last one, and a position does not see itself.
    reverse: bool = False

    @property
    def blind(self) -> bool:
        """Whether a call may have queries that see no key."""
        return self.reverse or bool(self.ring)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Limits x smoothly to ±cap (Bello et al. 2017); None: returns x."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def joined(out, log_sum, new_out, new_log_sum):
    """Joins outputs of two sets of keys by their shares in the softmax's denominator.

    Returns: (output [B, N, T, H], logarithm of the denominator [B, N, T]), as those that it takes.
    """
    total = jnp.logaddexp(log_sum, new_log_sum)
    old_share = jnp.exp(log_sum - total)[..., None]
    new_share = jnp.exp(new_log_sum - total)[..., None]
    return out * old_share + new_out * new_share, total


def in_window(age, window: int | None, slack: int = 0):
    """Whether a query sees a key that is `age` positions before it, in blocks `slack` more or less."""
    return (age >= -slack) & (window is None or age < window + slack)


def block_of(seq_len: int, window: int | None = None) -> int:
    """Positions in a block of the TPU kernel; 0 if it doesn't support rows of this length.

    Blocks of 1,024 spare more passes over scores than they compute beyond a causal mask: a row of
    8,192 takes a fifth fewer cycles than with 512. Beyond a narrow window they compute more.
    """
    largest = (1_024,) if window is None or window >= 1_024 else ()
    return next((block for block in (*largest, 512, 384, 256, 128) if seq_len % block == 0), 0)


def compute_capability(kind: str) -> float:
    """The CUDA compute capability of a kind of GPU; 0.0 for AMD GPUs."""
    for gpu in jax.devices():
        text = str(getattr(gpu, "compute_capability", ""))
        if gpu.device_kind == kind and text.replace(".", "").isdigit():
            return float(text)
    return 9.0 if "NVIDIA" in kind else 0.0  # compiling for a GPU that this machine lacks


def is_target(logits_RMV: jax.Array, targets_RM: jax.Array) -> jax.Array:
    """Where the logits of the targets are, bool [R, M, V]."""
    return jnp.arange(logits_RMV.shape[-1])[None, None] == targets_RM[..., None]
