"""transformers' Trainer, and what builds on it.

trainer.add_callback(PublishCallback(Publisher("my-run", files=model_directory)))
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from trainer_plugin.publisher import Handle, Publisher


class PublishCallback(TrainerCallback):
    """Publishes the model after every `every`-th optimizer step, under the number of that step.

    The next step's optimizer waits until the weights have been read; see `Publisher.fence`. `handles` are those of
    the steps that were published or skipped, the last `keep` of them.
    """

    def __init__(self, publisher: Publisher, *, every: int = 1, keep: int = 100) -> None:
        self.publisher = publisher
        self.handles: list[Handle] = []
        self._every = every
        self._keep = keep

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._every:
            return
        model = kwargs["model"]
        self.handles.append(self.publisher.publish(state.global_step, getattr(model, "module", model)))
        del self.handles[: -self._keep]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.publisher.fence()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.publisher.close()
