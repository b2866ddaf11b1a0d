"""Proves that your model, under your sharding rules, trains on every mesh as on one device.

    python -m recipes.prove --model=my_project/model.py:MyModel --config=tiny
    python -m recipes.prove --model=net.py:Net --rules=rules.py:RULES --batch=data.py:batch --loss=net.py:loss
    python -m recipes.prove --model=mine/moe.py:MoE --config=tiny --meshes="4x2;data=2,expert=4" --x64
    python -m recipes.prove --generate=transformer.stdlib_3m --meshes=8,1x8 --dtype=bfloat16

The last one compares a checkpoint's log-probabilities in training with those of a generator.

Simulates eight devices where there are no accelerators. Exit codes: 0 all agree; 1 some differ; 2 user error.
"""

from recipes.common.runtime.start import instrument, start

if __name__ == "__main__":
    start(*instrument("prove.command"))
