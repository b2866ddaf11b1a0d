"""Sharding rules for decoders with experts: strategies.py's, and those that split the experts.

Notation as there. E experts, J experts per position.
"""

import dataclasses

from ..core.strategies import CP, DECODER, HEADS, PP, TP, decoder_rules, split_alike
from ..options.dense_first import DENSE_STACK

EXPERT = "expert"  # the logical axis of E, of weights of experts
EXPERT_EMBED = "expert_embed"  # that of D there, or of a latent that experts read
ROUTER = "router"  # that of the router's

# Expert parallel: each device along `expert` has E / expert of the experts, and positions travel to
# them and back: Slots[E, B_data_expert, D] → Slots[E_expert, B_data, D]. These are four all-to-alls
# per layer and step, each of capacity · J · D per position. Dropless: see exchange.exchange.
EP = {"batch": ("data", "expert"), "expert": "expert"}

# ZeRO-3 with expert parallelism: experts are split over `expert` and `data`, other weights over all
# devices. A device gathers only its own experts. FSDP_EP_CP: over `seq` too, after the axes of the
# batch: gradients are summed over devices in this order, and in another TPUs don't scatter them.
FSDP_EP = {"embed": ("data", "expert"), "expert_embed": "data"}
FSDP_EP_CP = {"embed": ("data", "expert", "seq"), "expert_embed": ("data", "seq")}


def expert_rules(*like_embed: str, like_heads: tuple[str, ...] = ()) -> dict[str, dict]:
    """`decoder_rules` of a decoder with experts, and the strategies that split the experts.

    The experts' D has an axis of its own, since a mesh axis that splits E can't split D as well.
    Without expert parallelism, every layer gathers all experts, even those that a device hardly
    uses. TP splits each expert's hidden dim; its all-reduces don't grow with J.
    """
    fsdp_ep = split_alike(FSDP_EP, like_embed)
    fsdp_ep_cp = split_alike(FSDP_EP_CP, like_embed)
    tp = split_alike(TP, like_heads, HEADS)
    return decoder_rules("expert_embed", *like_embed, like_heads=like_heads) | {
        "ep": EP,
        "fsdp_ep": EP | fsdp_ep,
        "fsdp_ep_tp": EP | fsdp_ep | tp,
        "fsdp_ep_pp": EP | fsdp_ep | PP,
        "fsdp_ep_cp": EP | CP | fsdp_ep_cp,
        "fsdp_ep_cp_tp": EP | CP | fsdp_ep_cp | tp,
    }


# All strategies. If several fit a mesh equally well, the last one is its default.
STRATEGIES = tuple(expert_rules())

EXPERT_DECODER = dataclasses.replace(
    DECODER,
    logical_axes=DECODER.logical_axes
    | {
        "expert": "weights",  # activations travel to the devices of their experts
        EXPERT_EMBED: "weights",  # D, of experts at rest
        "router": "weights",  # E, of the router: each device scores all experts
        DENSE_STACK: "stack",
    },
    in_use=DECODER.in_use | {EXPERT_EMBED: "act_embed"},
    gathered_by_layers=(EXPERT_EMBED,),  # mixture.mix gathers them
    within={"expert": "batch"},  # positions travel along the mesh axes that split experts
)
