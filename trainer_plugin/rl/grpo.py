"""GRPO on two cores: fp32 master weights under AdamW, and the bf16 policy that is published and sampled.

For a group of answers to one prompt with rewards r, the advantage of answer i is (r_i - mean r) / std r
(Shao et al. 2024, DeepSeekMath, §4.1). The loss is the clipped surrogate over whole answers,

    -mean_i min(s_i A_i, clip(s_i, 1-ε, 1+ε) A_i),   s_i = exp(mean_t (log π(t) - log μ(t))),

with π the published policy, μ what sampled the answer, and the ratio s_i taken per answer and normalised
by its length (Zheng et al. 2025, GSPO). As in any mixed-precision training the gradient is taken at the
bf16 weights and applied to the masters: most steps are smaller than a bf16 rounding, and add up there.
A group with equal rewards has no advantage; where all groups are so there is nothing to learn, and the
weights stay as they are to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

_CLIP = 0.2
_GRADIENT_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer; `behaviour` has the log-prob of each token under what sampled it."""

    token_ids: tuple[int, ...]
    behaviour: tuple[float, ...]
    reward: float


@dataclass(frozen=True, slots=True)
class Group:
    """All answers to one prompt."""

    prompt_ids: tuple[int, ...]
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step did. `ratio_mean` and `clipped` (a share) are over the answers of groups that teach something."""

    loss: float
    grad_norm: float
    zero_advantage: bool
    ratio_mean: float
    clipped: float


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group, centred and scaled to standard deviation 1; all zero if they are equal."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / deviation for reward in rewards]


class Learner:
    """Owns all copies of the weights. `policy` is always the masters rounded to bf16, to nearest even."""

    def __init__(self, model: Path, *, learning_rate: float) -> None:
        self.policy: Any = _load(model, torch.bfloat16).requires_grad_(False)
        # The policy's own values in fp32, in which two cores compute gradients faster than in bf16.
        self._model: Any = _load(model, torch.float32)
        self.masters = [parameter.detach().clone().requires_grad_() for parameter in self._model.parameters()]
        # Also writes every element once, after which nothing aliases the file that safetensors maps.
        self._publish()
        self._optimizer = torch.optim.AdamW(self.masters, lr=learning_rate, weight_decay=0.0)

    @property
    def parameters(self) -> int:
        """Elements; tied ones count once."""
        return sum(parameter.numel() for parameter in self.policy.parameters())

    def step(self, groups: Sequence[Group]) -> Outcome:
        """One optimiser step on one batch of groups, after which the policy is the masters, rounded."""
        weighted = [(group, advantages([answer.reward for answer in group.answers])) for group in groups]
        weighted = [(group, each) for group, each in weighted if any(each)]
        if not weighted:
            return Outcome(loss=0.0, grad_norm=0.0, zero_advantage=True, ratio_mean=1.0, clipped=0.0)
        total = sum(len(group.answers) for group in groups)
        loss = 0.0
        ratios: list[float] = []
        self._model.zero_grad(set_to_none=True)
        for group, each in weighted:
            ratio, advantage = self.ratios(group), torch.tensor(each)
            bounded = ratio.clamp(1 - _CLIP, 1 + _CLIP)
            part = -torch.minimum(ratio * advantage, bounded * advantage).sum() / total
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
            ratios += ratio.tolist()
        for master, parameter in zip(self.masters, self._model.parameters(), strict=True):
            master.grad = parameter.grad
        norm = torch.nn.utils.clip_grad_norm_(self.masters, _GRADIENT_NORM)
        self._optimizer.step()
        self._publish()
        outside = sum(not 1 - _CLIP <= ratio <= 1 + _CLIP for ratio in ratios)
        return Outcome(loss, float(norm), False, sum(ratios) / len(ratios), outside / len(ratios))

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """What the published policy gives each token after the first, float32 log-softmax over its bf16 logits."""
        ids = torch.tensor([list(token_ids)])
        with torch.inference_mode():
            scores = torch.log_softmax(self.policy(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
        found: list[float] = scores.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        return found

    def _publish(self) -> None:
        with torch.no_grad():
            copies = zip(self.masters, self.policy.parameters(), self._model.parameters(), strict=True)
            for master, published, computed in copies:
                published.copy_(master)
                computed.copy_(published)

    def ratios(self, group: Group) -> torch.Tensor:
        """s_i of every answer, with its gradient. Shape [answers]."""
        lengths = torch.tensor([len(answer.token_ids) for answer in group.answers])
        longest = int(lengths.max())
        answers = torch.zeros(len(group.answers), longest, dtype=torch.long)
        behaviour = torch.zeros(len(group.answers), longest)
        for row, answer in enumerate(group.answers):
            answers[row, : len(answer.token_ids)] = torch.tensor(answer.token_ids)
            behaviour[row, : len(answer.behaviour)] = torch.tensor(answer.behaviour)
        prompt = torch.tensor([group.prompt_ids]).expand(len(group.answers), -1)
        # Attention is causal, so what pads an answer on the right changes nothing before it.
        output = self._model(
            input_ids=torch.cat([prompt, answers[:, :-1]], dim=1), use_cache=False, logits_to_keep=longest
        )
        scores = torch.log_softmax(output.logits.float(), dim=-1).gather(-1, answers[:, :, None])[:, :, 0]
        present = torch.arange(longest) < lengths[:, None]
        return torch.exp(((scores - behaviour) * present).sum(dim=1) / lengths)


def _load(model: Path, dtype: torch.dtype) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return loaded.train(False)
