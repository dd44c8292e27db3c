"""Runs of the demo's own learner, on this machine alone: a phase of text, then GRPO from its end.

The learner is the demo's; what differs is where the samples come from: a copy of the policy in this process,
and not a replica far away. Everything is drawn from the run's seed, so that the same versions of the libraries
on the same machine give the same weights.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from bench.pairs import Bits, Run, appearing, cache
from trainer_plugin.rl.arithmetic import Arithmetic
from trainer_plugin.rl.grpo import Answer, Group, Learner
from trainer_plugin.rl.model import prepare_smollm2, prepare_tiny
from trainer_plugin.rl.tasks import Prompt, Task
from trainer_plugin.rl.tokens import Tokens

TEXT_STEPS = 80
_TEXT_SEQUENCES, _TEXT_TOKENS = 2, 128
_HIGHEST_RATE, _LOWEST_RATE, _WARM_UP = 2e-4, 3e-5, 10
_SAMPLES, _NEW_TOKENS = 8, 16
_ATTEMPTS = 20


class PairLearner(Learner):
    """The demo's learner, which also reads text and can be set to a state that was kept."""

    def named(self) -> list[tuple[str, Any]]:
        """The master's parameters in ascending order of name, tied ones once."""
        return sorted(self._master.named_parameters())

    def policy_bits(self) -> Iterator[tuple[str, Bits]]:
        """The policy's tensors as 16-bit patterns, in ascending order of name."""
        for name, parameter in sorted(self.policy.named_parameters()):
            yield name, parameter.detach().contiguous().view(torch.int16).numpy().view(np.uint16)

    def read(self, token_ids: torch.Tensor, learning_rate: float) -> float:
        """One step of next-token prediction on a batch of shape [sequences, tokens]. The loss before it."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._master(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._master.parameters(), 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def moments(self) -> Iterator[tuple[str, npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
        """Adam's two moments of each tensor, in ascending order of name."""
        for name, parameter in self.named():
            kept = self._optimizer.state[parameter]
            yield name, kept["exp_avg"].numpy(), kept["exp_avg_sq"].numpy()

    @torch.no_grad()
    def start_from(self, text: Path, *, warm: bool, rounded: bool) -> None:
        """Continue from a phase of text: its master, its moments if `warm`, all through bf16 if `rounded`."""
        at = 0
        files = [np.memmap(text / name, np.float32, "r") for name in ("master.f32", "first.f32", "second.f32")]
        for _, parameter in self.named():
            end = at + parameter.numel()
            master, *moments = (torch.from_numpy(file[at:end].copy()).view_as(parameter) for file in files)
            parameter.copy_(master.bfloat16() if rounded else master)
            if warm:
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(TEXT_STEPS)),
                    "exp_avg": moments[0],
                    "exp_avg_sq": moments[1],
                }
            at = end
        for live, master in zip(self.policy.parameters(), self._master.parameters(), strict=True):
            live.copy_(master)


class Sampler:
    """A float32 copy of the policy that answers prompts. Its log-probs are those of the policy's weights."""

    def __init__(self, learner: PairLearner, model: Path) -> None:
        self._learner = learner
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).train(False)
        for parameter in self._model.parameters():
            parameter.data = parameter.data.clone()

    def answers(self, prompt: Prompt, seed: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Tokens and their log-probs, at temperature 1."""
        with torch.inference_mode():
            for mine, live in zip(self._model.parameters(), self._learner.policy.parameters(), strict=True):
                mine.copy_(live)
            torch.manual_seed(seed)
            ids = torch.tensor([prompt.token_ids])
            end = self._model.config.eos_token_id
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=_SAMPLES,
                max_new_tokens=_NEW_TOKENS,
                pad_token_id=end,
                output_logits=True,
                return_dict_in_generate=True,
            )
            tokens = output.sequences[:, ids.shape[1] :]
            scores = torch.log_softmax(torch.stack(output.logits, dim=1).float(), dim=-1)
            given = scores.gather(-1, tokens[:, :, None])[:, :, 0]
        found = []
        for row, probs in zip(tokens.tolist(), given.tolist(), strict=True):
            length = row.index(end) + 1 if end in row else len(row)
            found.append((tuple(row[:length]), tuple(probs[:length])))
        return found


def versions() -> dict[str, str]:
    """What the weights of a run depend on beside its seed."""
    return {
        name: str(module.__version__)
        for name, module in (("torch", torch), ("transformers", transformers), ("numpy", np))
    }


def train(run: Run, *, tiny: bool = False) -> None:
    """Make one run into the cache, and the phase of text before it if it is the first that needs one."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        _train(run, tiny=tiny)
    finally:
        torch.use_deterministic_algorithms(before)


def trained(run: Run, steps: int) -> Iterator[tuple[int, list[tuple[str, Bits]], str]]:
    """A training, step by step, from step 0: the state, which changes with the next, and a line about the step."""
    torch.use_deterministic_algorithms(True)
    learner, advance = _begin(run, tiny=False)
    yield 0, list(learner.policy_bits()), f"{run.name} step 0"
    for step in range(1, steps + 1):
        line = advance(step)
        yield step, list(learner.policy_bits()), line


def _train(run: Run, *, tiny: bool) -> None:
    learner, advance = _begin(run, tiny=tiny)
    with appearing(run, versions(), tiny=tiny) as keeper:
        if 0 in run.kept:
            keeper.keep(0, learner.policy_bits())
        for step in range(1, run.steps + 1):
            keeper.say(advance(step))
            if step in run.kept:
                keeper.keep(step, learner.policy_bits())


def _begin(run: Run, *, tiny: bool) -> tuple[PairLearner, Callable[[int], str]]:
    """The learner of a run, and what makes one step and tells of it in a line."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, tokenizer = _model(tiny=tiny)
    text = None if run.kind == "grid" else _text(model, tokenizer, tiny=tiny)
    learner = PairLearner(model, learning_rate=run.learning_rate)
    if text is not None:
        learner.start_from(text, warm=run.warm, rounded=run.kind == "restart")
    sampler = Sampler(learner, model)
    # The tiny model can spell no sum, and is taught to prefer some tokens instead.
    task: Task = Tokens(tokenizer, run.seed) if tiny else Arithmetic(tokenizer, run.seed)

    def advance(step: int) -> str:
        begun = time.monotonic()
        answers, gradient = _learn(learner, sampler, task, tokenizer, f"{run.seed} {step}", step)
        reward = sum(answer.reward for answer in answers) / len(answers)
        seconds = time.monotonic() - begun
        return f"{run.name} step {step}: mean reward {reward:.3f}, gradient {gradient:.2f}, {seconds:.0f} s"

    return learner, advance


def _learn(  # noqa: PLR0917
    learner: PairLearner, sampler: Sampler, task: Task, tokenizer: Any, seed: str, step: int
) -> tuple[tuple[Answer, ...], float]:
    """One step on the first group whose answers differ in reward. Its answers and the norm of the gradient."""
    for attempt in range(_ATTEMPTS):
        prompt = task.prompts(step + 1000 * attempt, 1)[0]
        answers = tuple(
            Answer(tokens, logprobs, task.reward(prompt, tokens) + _length(tokenizer, tokens))
            for tokens, logprobs in sampler.answers(prompt, random.Random(f"{seed} {attempt}").getrandbits(31))
        )
        outcome = learner.step([Group(prompt.token_ids, answers)])
        if not outcome.zero_advantage:
            return answers, outcome.grad_norm
    raise RuntimeError(f"step {step}: {_ATTEMPTS} groups in a row had equal rewards")


def _length(tokenizer: Any, tokens: tuple[int, ...]) -> float:
    """A tenth for long answers, so that the samples of a group differ where all or none have the right sum."""
    return 0.1 * min(len(tokenizer.decode(list(tokens), skip_special_tokens=True)), 40) / 40


def _model(*, tiny: bool) -> tuple[Path, Any]:
    models = cache().parents[1] / "models"
    model = prepare_tiny(models / "tiny-0") if tiny else prepare_smollm2(models / "SmolLM2-135M-Instruct")
    return model, transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)


def _text(model: Path, tokenizer: Any, *, tiny: bool) -> Path:
    """The end of the phase of text: master and Adam's moments as flat float32 files. Made once."""
    directory = cache(tiny=tiny) / "text"
    if directory.exists():
        return directory
    learner = PairLearner(model, learning_rate=_HIGHEST_RATE)
    ids = torch.tensor(tokenizer.encode(_docstrings(), add_special_tokens=False))
    rng = random.Random("text")
    for step in range(TEXT_STEPS):
        begun = time.monotonic()
        starts = [rng.randrange(len(ids) - _TEXT_TOKENS) for _ in range(_TEXT_SEQUENCES)]
        loss = learner.read(torch.stack([ids[at : at + _TEXT_TOKENS] for at in starts]), text_rate(step))
        print(f"text step {step}: loss {loss:.3f}, {time.monotonic() - begun:.0f} s", flush=True)
    making = directory.with_name(f".text.{os.getpid()}")
    making.mkdir(parents=True)
    try:
        with (making / "master.f32").open("wb") as file:
            for _, parameter in learner.named():
                file.write(parameter.detach().contiguous().numpy().data)
        with (making / "first.f32").open("wb") as one, (making / "second.f32").open("wb") as two:
            for _, first, second in learner.moments():
                one.write(np.ascontiguousarray(first).data)
                two.write(np.ascontiguousarray(second).data)
        making.rename(directory)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return directory


def text_rate(step: int) -> float:
    """The learning rate of a text step: up to 2e-4 in ten steps, then along a cosine down to 3e-5."""
    if step < _WARM_UP:
        return _HIGHEST_RATE * (step + 1) / _WARM_UP
    return max(_LOWEST_RATE, _HIGHEST_RATE * 0.5 * (1 + math.cos(math.pi * step / TEXT_STEPS)))


def _docstrings() -> str:
    """Text that is at hand without a network: the docstrings of torch.nn, about 0.7 MB."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    found: list[str] = []
    for path in sorted((Path(spec.origin).parent / "nn").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        found += filter(None, map(ast.get_docstring, documented))
    return "\n\n".join(found)
