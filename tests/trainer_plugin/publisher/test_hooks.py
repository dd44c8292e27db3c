"""Publishing out of real training loops: a plain one, and transformers' Trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from deltad.client.messages import ExportRequest
from tests.kit.daemons import Daemon
from tests.trainer_plugin.publisher.conftest import RUN
from trainer_plugin.hooks.transformers import PublishCallback
from trainer_plugin.publisher import Publisher


def tiny_llama(at: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.config.save_pretrained(at)
    return model


def exported(daemon: Daemon, version: str, at: Path) -> LlamaForCausalLM:
    daemon.client.export(RUN, ExportRequest(version=version, directory=str(at)))
    return LlamaForCausalLM.from_pretrained(at, dtype=torch.bfloat16)


def same(one: LlamaForCausalLM, other: LlamaForCausalLM) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_plain_loop_publishes_each_step_and_the_optimizer_waits_for_the_reading(
    daemon: Daemon, tmp_path: Path
) -> None:
    model = tiny_llama(tmp_path / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    publisher = Publisher(RUN, socket=daemon.home / "deltad.sock", files=tmp_path / "model")
    publisher.attach(optimizer)
    tokens = torch.arange(32).view(2, 16)
    for step in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert publisher.publish(step, model).wait(60).version is not None
    assert same(exported(daemon, "v000002", tmp_path / "export"), model)
    names = [tensor for tensor in model.state_dict() if "lm_head" in tensor]
    assert names, "the head is tied: it is published once, and comes out again"


def test_transformers_trainer_publishes_by_its_callback(daemon: Daemon, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    publisher = Publisher(RUN, socket=daemon.home / "deltad.sock", files=tmp_path / "model", on_busy="wait")
    callback = PublishCallback(publisher, every=2)
    arguments = TrainingArguments(
        str(tmp_path / "out"),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(8)]
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    versions = [handle.wait(60).version for handle in callback.handles]
    assert [version.version if version else None for version in versions] == ["v000002", "v000004"]
    assert same(exported(daemon, "v000004", tmp_path / "export"), model)
