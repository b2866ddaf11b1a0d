"""Plans a run without hardware: compares meshes and rules by memory, bytes sent and step time.

    python -m recipes.plan --size=8b --devices=v5p:64 --batch_tokens=4M --seq_len=8192
    python -m recipes.plan --size=70b --devices=v5e:256x2     # two slices; h100:16 is two nodes of 8
    python -m recipes.plan --devices=cpu:8                     # the laptop's simulated devices
    python -m recipes.plan --size=8b --devices=v5p:64 --confirm=3   # asks the real compiler too

docs/plan.md lists the estimates' assumptions and errors.
"""

from recipes.common.runtime.start import instrument, start

if __name__ == "__main__":
    start(*instrument("plan.command"))
