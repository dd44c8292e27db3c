"""Work on several threads whose results come in order.

Kernels, zstd and hashing let go of the interpreter's lock, so that frames are worked on side by side. Owns one
invariant: what comes out does not depend on the number of threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_AHEAD = 4  # enough that no thread waits for a caller that is slow to wake up
_MOST_BY_DEFAULT = 2  # together they hold 96 MiB of both checkpoints


def default_threads() -> int:
    """As many threads as this process has processors, at most two."""
    return max(1, min(_MOST_BY_DEFAULT, len(os.sched_getaffinity(0))))


def in_order(
    work: Callable[[_Item], _Result],
    items: Iterable[_Item],
    threads: int,
    *,
    clash: Callable[[_Item, _Item], bool] = lambda one, other: False,
) -> Generator[_Result, None, None]:
    """`work` on every item, by `threads` threads; the results in the order of the items.

    An item is asked for in the caller's thread, and only when fewer than four times as many as there are threads
    have been begun and not been given. It is begun when those before it that it clashes with are done. An error
    is raised where its result would come, one of `items` itself after the results of all items before it. Then, and
    when the iterator is closed, nothing is begun any more, and what was begun is waited for. With one thread all
    happens in the caller's, when it is asked for.
    """
    if threads <= 1:
        yield from map(work, items)
        return
    begun: deque[tuple[_Item, Future[_Result]]] = deque()
    ends: list[Exception] = []
    with ThreadPoolExecutor(threads, thread_name_prefix="deltad-frames") as pool:
        try:
            for item in _until_error(items, ends):
                while len(begun) == _AHEAD * threads or any(clash(item, other) for other, _ in begun):
                    yield begun.popleft()[1].result()
                begun.append((item, pool.submit(work, item)))
            while begun:
                yield begun.popleft()[1].result()
        finally:
            for _, future in begun:
                future.cancel()
    for error in ends:
        raise error


def _until_error(items: Iterable[_Item], ends: list[Exception]) -> Iterator[_Item]:
    """The items, up to the error that they may end in, which goes to `ends`."""
    try:
        yield from items
    except Exception as error:  # it is raised when its turn comes
        ends.append(error)
