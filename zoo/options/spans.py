"""Spans of causal rows whose positions see each other in both directions, such as those of a picture.

A kernel runs twice. First as for any causal row: each position sees earlier ones. Then over the row in
reverse, within spans alone: each sees later ones. The two outputs are joined by their shares in the
softmax's denominator, as those of the devices on a ring are. So a sliding window, soft caps and sinks
hold as without spans, and every kernel whose outputs can be joined has spans, on a ring too.

Shapes: B batch, T query positions, S key positions, N heads, K kv heads, H head dim.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..core.attention import AttentionInputs, RowLayout
from ..core.layers import AttentionType
from ..core.sharding import constrain
from ..kernels.choice import RING, SPANS
from ..kernels.shared import Settings, joined

CODES = 4_096  # an id that layers attend by is segment · CODES + span
NO_QUERY = 2**31 - 1  # ids in the reverse pass of positions outside of spans, which see nothing
NO_KEY = 2**31 - 2


def with_spans(
    inputs: AttentionInputs,
    spans_BT: jax.Array,
    length: int,
    kinds: tuple[AttentionType, ...] | None = None,
) -> AttentionInputs:
    """Inputs of attention with spans.

    Args:
      spans_BT: int; the number of the span that a position is in, below 0: none. The spans of a
        segment that are within `length` positions have numbers that differ by less than CODES - 1.
      length: the most positions of a span.
      kinds: those of the layers that have spans; others are causal. None: all.
    """
    if kinds == ():
        return inputs
    plain = inputs
    segments_BT = inputs.segment_ids_BT
    if segments_BT is None:
        segments_BT = jnp.zeros_like(spans_BT)
    spans_BT = constrain(spans_BT, "batch", "seq")
    segments_BT = constrain(segments_BT, "batch", "seq")
    codes_BT = jnp.where(spans_BT < 0, 0, spans_BT % (CODES - 1) + 1)
    ids_BT = (segments_BT * CODES + codes_BT).astype(jnp.int32)
    layout = span_layout(inputs.layout, length)
    inputs = dataclasses.replace(inputs, segment_ids_BT=ids_BT, layout=layout)
    if kinds is None:
        return inputs
    return SomeSpans(**vars(inputs), kinds=kinds, causal_inputs=plain)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SomeSpans(AttentionInputs):
    """Inputs of attention with spans in layers of some kinds."""

    kinds: tuple[AttentionType, ...]
    causal_inputs: AttentionInputs  # of other layers

    def attend(self, q_BTNH, k_BTKH, v_BTKH, kind, cache_index=None, **scores) -> jax.Array:
        attend = super().attend if kind in self.kinds else self.causal_inputs.attend
        return attend(q_BTNH, k_BTKH, v_BTKH, kind, cache_index, **scores)


@dataclasses.dataclass(frozen=True)
class SpanLayout(RowLayout):
    """A layout of rows that may have spans."""

    rows: RowLayout = dataclasses.field(default_factory=RowLayout)
    length: int = 1

    def positions(self, seq_len: int) -> jax.Array:
        return self.rows.positions(seq_len)

    def reorder(self, x_BT, *axes: str, back: bool = False) -> Any:
        return self.rows.reorder(x_BT, *axes, back=back)

    def on_device(self, settings: Settings) -> Settings:
        settings = self.rows.on_device(settings)
        return dataclasses.replace(settings, around=BothWays(settings.around, self.length))


def span_layout(rows: RowLayout, length: int) -> SpanLayout:
    """The layout of rows with spans, from that of rows without."""
    return SpanLayout(
        exchange=RING if rows.exchange == RING else SPANS,
        seq=rows.seq,
        heads=rows.heads,
        kv_heads=rows.kv_heads,
        rows=rows,
        length=length,
    )


@dataclasses.dataclass(frozen=True)
class BothWays:
    """Makes of the two functions of a kernel (one of choice.JOINABLE) those for rows with spans."""

    around: Any  # likewise for the keys of all devices on a ring, or None
    length: int

    def __call__(self, outputs, gradients):
        if self.around:
            outputs, gradients = self.around(outputs, gradients)

        def both_outputs(settings, q_BNTH, kv, ids_BT, offset):
            out_and_sum = outputs(settings, q_BNTH, *earlier(kv, ids_BT), offset)
            reverse = self.reverse_of(settings)
            later_out_and_sum = outputs(reverse, flip(q_BNTH), *later(kv, ids_BT), offset - 1)
            return joined(*out_and_sum, *map(flip, later_out_and_sum))

        def both_gradients(settings, q_BNTH, kv, ids_BT, offset, *saved):
            of_earlier = gradients(settings, q_BNTH, *earlier(kv, ids_BT), offset, *saved)
            reverse = self.reverse_of(settings)
            of_later = gradients(
                reverse, flip(q_BNTH), *later(kv, ids_BT), offset - 1, *map(flip, saved)
            )
            return [x + flip(y) for x, y in zip(of_earlier, of_later, strict=True)]

        return both_outputs, both_gradients

    def reverse_of(self, settings: Settings) -> Settings:
        """The settings for later positions, of which none beyond `length` is in the same span."""
        return dataclasses.replace(settings, window=self.length, reverse=True)


def flip(x: jax.Array) -> jax.Array:
    """[B, N, T, ...] with T in reverse."""
    return jnp.flip(x, 2)


def earlier(kv, ids_BT):
    """(keys, values and their ids), and the ids of queries, of the pass over earlier positions."""
    k_BKSH, v_BKSH, ids_BS = kv
    return (k_BKSH, v_BKSH, ids_BS // CODES), ids_BT // CODES


def later(kv, ids_BT):
    """Likewise of the pass over later positions."""
    k_BKSH, v_BKSH, ids_BS = kv
    return (flip(k_BKSH), flip(v_BKSH), in_spans(ids_BS, NO_KEY)), in_spans(ids_BT, NO_QUERY)


def in_spans(ids_BT: jax.Array, outside: int) -> jax.Array:
    """Ids in the reverse pass."""
    return jnp.flip(jnp.where(ids_BT % CODES == 0, outside, ids_BT), 1)
