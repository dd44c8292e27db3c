"""Simulated pairs: a Llama-like layer whose fp32 master makes one step of Adam with noisy gradients.

Normal weights, one spread per matrix between 0.012 and 0.03; the first moment is at its stationary spread for
β1 = 0.9, so that |dw| is about a quarter of the learning rate. The master's bits below bf16 are uniform, as in
a run that has been going for long ("warm"): the pessimistic case. Nothing here has seen a real gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bench.pairs import Bits, Extent, Run, appearing

F32 = npt.NDArray[np.float32]

_WIDTH, _INNER, _KEYS = 2048, 5632, 512
_LAYER = (
    ("input_layernorm.weight", (_WIDTH,)),
    ("mlp.down_proj.weight", (_WIDTH, _INNER)),
    ("mlp.gate_proj.weight", (_INNER, _WIDTH)),
    ("mlp.up_proj.weight", (_INNER, _WIDTH)),
    ("post_attention_layernorm.weight", (_WIDTH,)),
    ("self_attn.k_proj.weight", (_KEYS, _WIDTH)),
    ("self_attn.o_proj.weight", (_WIDTH, _WIDTH)),
    ("self_attn.q_proj.weight", (_WIDTH, _WIDTH)),
    ("self_attn.v_proj.weight", (_KEYS, _WIDTH)),
)
_STATIONARY = 0.1 / (1 - 0.9**2) ** 0.5
_DRIFT = 0.05
_TINY = 64


def tensors(*, part: int = 1) -> tuple[Extent, ...]:
    """One layer of 45 M weights, or a `part`-th of the rows of each of its matrices."""
    return tuple(
        Extent(f"model.layers.0.{name}", (shape[0] // part, *shape[1:]) if len(shape) > 1 else shape)
        for name, shape in _LAYER
    )


def states(run: Run, *, part: int = 1) -> Iterator[tuple[str, Bits, Bits]]:
    """Each tensor's bf16 patterns before and after the step. About 6 s for the whole layer."""
    rng = np.random.default_rng(run.seed)
    for extent in tensors(part=part):
        master = rng.standard_normal(extent.shape, np.float32)
        if len(extent.shape) == 1:
            master = np.float32(1) + np.float32(0.1) * master
        else:
            master *= np.float32(rng.uniform(0.012, 0.03))
        moment = np.float32(_STATIONARY) * rng.standard_normal(extent.shape, np.float32)
        moment += np.float32(_DRIFT) * rng.standard_normal(extent.shape, np.float32)
        moment /= rng.uniform(0.75, 1.25, extent.shape).astype(np.float32)
        yield extent.name, to_bf16(master), to_bf16(master - np.float32(run.learning_rate) * moment)


def walk(run: Run, steps: int, *, part: int = 1) -> Iterator[Bits]:
    """The states before and after each of so many steps, all tensors of one state as a flat array.

    As in `states`, and from one step to the next as Adam has it: noise that fades by β1 and is made anew, a drift of
    each weight's own that lasts, and a spread that does not change.
    """
    rng = np.random.default_rng(run.seed)
    parts = [extent.shape for extent in tensors(part=part)]
    masters, drifts, spreads, noises = [], [], [], []
    for shape in parts:
        master = rng.standard_normal(shape, np.float32)
        if len(shape) == 1:
            master = np.float32(1) + np.float32(0.1) * master
        else:
            master *= np.float32(rng.uniform(0.012, 0.03))
        masters.append(master)
        drifts.append(np.float32(_DRIFT) * rng.standard_normal(shape, np.float32))
        spreads.append(np.float32(run.learning_rate) / rng.uniform(0.75, 1.25, shape).astype(np.float32))
        noises.append(np.float32(_STATIONARY) * rng.standard_normal(shape, np.float32))
    yield _flat(masters)
    for _ in range(steps):
        for i, shape in enumerate(parts):
            masters[i] -= spreads[i] * (noises[i] + drifts[i])
            noises[i] = np.float32(0.9) * noises[i] + np.float32(0.1) * rng.standard_normal(shape, np.float32)
        yield _flat(masters)


def _flat(masters: list[F32]) -> Bits:
    return np.concatenate([to_bf16(master).reshape(-1) for master in masters])


def to_bf16(values: F32) -> Bits:
    """Round finite float32 values to bf16 patterns, to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def simulate(run: Run, *, tiny: bool = False) -> None:
    """Make one simulated run into the cache."""
    made = list(states(run, part=_TINY if tiny else 1))
    with appearing(run, {"numpy": np.__version__}, tiny=tiny) as keeper:
        keeper.keep(0, ((name, old) for name, old, _ in made))
        keeper.keep(1, ((name, new) for name, _, new in made))
        changed = sum(int(np.count_nonzero(old != new)) for _, old, new in made)
        keeper.say(f"{run.name}: {100 * changed / sum(old.size for _, old, _ in made):.3f} % changed")
