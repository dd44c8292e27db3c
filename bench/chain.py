"""Fifty consecutive versions, as a region sees them pass: the demo's trainer from the model as it is shipped.

    python -m bench.chain        train it into the cache: 50 steps, half a minute each on two quiet cores

Kept as the first state and what each step changed, about 30 MB beside the 270 MB of the state. The same learner as in
`bench.pairs`, at the demo's learning rate. Without it, a chain is *replayed*: the changes of one real step at other
places in every step, which has the step's density and differences, and not the habit of weights to change again.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import msgspec
import numpy as np

from bench.pairs import Bits, Extent, Run, States, appearing, cache, made, read_table, state
from bench.slices import Changed, apply, difference

STEPS = 50
CHAIN = Run("chain-1e-6", "grid", 1e-6, (0,), seed=8)
COMMAND = "python -m bench.chain"
_CHANGES = "changes"


def is_made() -> bool:
    """Whether the chain is in the cache."""
    return made(CHAIN)


def tensors() -> tuple[Extent, ...]:
    """The tensors of all states. Raises FileNotFoundError for a chain that was not made."""
    return read_table(CHAIN).tensors


def states() -> Iterator[Bits]:
    """The first state and the one after each step, in order; each is valid until the next is asked for."""
    bits = np.array(state(CHAIN, 0), np.uint16)
    yield bits
    for step in range(1, STEPS + 1):
        data = (cache() / CHAIN.name / f"{_CHANGES}_{step:06d}.msgpack").read_bytes()
        bits = apply(bits, msgspec.msgpack.decode(data, type=Changed))
        yield bits


def replayed(pair: States, steps: int, seed: int = 8) -> Iterator[Bits]:
    """A state and `steps` more, each with the changes of one step at other places. As `states`."""
    positions = np.flatnonzero(pair.old != pair.new)
    differences = pair.new[positions] - pair.old[positions]
    bits, rng = np.array(pair.old, np.uint16), np.random.default_rng(seed)
    yield bits
    for shift in rng.integers(0, bits.size, steps):
        bits = bits.copy()
        bits[(positions + shift) % bits.size] += differences
        yield bits


def make() -> None:
    """Train the chain into the cache."""
    from bench.training import trained

    shutil.rmtree(cache() / CHAIN.name, ignore_errors=True)
    with appearing(CHAIN, {"numpy": np.__version__}) as keeper:
        before: Bits | None = None
        for step, found, line in trained(CHAIN, STEPS):
            now = np.concatenate([bits.reshape(-1) for _, bits in found])
            if before is None:
                keeper.keep(0, found)
            else:
                data = msgspec.msgpack.encode(difference(before, now))
                (keeper.directory / f"{_CHANGES}_{step:06d}.msgpack").write_bytes(data)
                keeper.say(f"{line}, {100 * np.count_nonzero(before != now) / now.size:.4f} % changed")
            before = now


if __name__ == "__main__":
    make()
    sys.exit(0)
