"""One checkpoint for all processes: process 0 finds it, and the others help to verify it."""

from recipes.common.checkpoint import helpers, integrity, store
from recipes.common.runtime import processes


def find_together(path: str, whole: bool = True, base: str = "") -> store.Source:
    """What `store.find` finds by --restore_from, the same on all; each must call it."""
    if processes.count() == 1:
        return store.find(path, whole=whole, base=base)

    def look() -> str:
        found = store.find(path, whole=whole, base=base)
        return path if path.startswith("hf:") else str(found.path)

    where = processes.broadcast_from_first(helpers.with_help("start", integrity.sha256_of, look))
    return processes.together(lambda: store.find(where, whole=False, base=base))
