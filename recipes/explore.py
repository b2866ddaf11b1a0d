"""Shows what sharding does to every array: opens a page for all entries, sizes, meshes and strategies.

    python -m recipes.explore
    python -m recipes.explore --entry=moe --size=mixtral_8x7b --mesh=data=8,expert=4 --rules=fsdp_ep
    python -m recipes.explore --from=runs/transformer            # the layout of a run

The page is one file, which needs no server, no network and no Python. docs/explore.md explains it.
"""

from recipes.common.runtime.start import instrument, start

if __name__ == "__main__":
    start(*instrument("explore.command"))
