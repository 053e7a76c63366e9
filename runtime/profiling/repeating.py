"""Something done again and again in a thread of its own, while something else is measured."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(work: Callable[[], object], name: str) -> Iterator[None]:
    """Call a function over and over in a thread of this name, until the block ends."""
    stop = threading.Event()

    def turn() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=turn, name=name)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
