"""The start of many processes, played in one."""

import concurrent.futures
import importlib.util
from collections.abc import Callable


def played(count: int) -> Callable[[], None]:
    """Plays the start of `count` processes, each in a thread with its own modules."""
    from recipes.common.checkpoint import integrity
    from recipes.common.runtime import agreement, processes

    facts = agreement.facts()

    def copy(module, **its):
        spec = importlib.util.find_spec(module.__name__)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        vars(made).update(its)
        return made

    def process(number: int) -> Callable[[], None]:
        # Its keys come after those of this run.
        one = copy(processes, _id=number, _count=count, _calls=1000)
        alike = copy(agreement, processes=one, facts=lambda: facts)
        hashing = copy(integrity, processes=one, _check_hashes=lambda *share: "")

        def start() -> None:
            alike.check()
            assert hashing.check_hashes_on_all("w") == ""

        return start

    starts = [process(number) for number in range(count)]

    def all_of_them() -> None:
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda start: start(), starts))

    return all_of_them
