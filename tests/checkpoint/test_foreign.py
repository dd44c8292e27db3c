"""Checkpoints in other layouts are refused by name, with the command that converts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltad.checkpoint import check_complete, open_checkpoint
from deltad.errors import CheckpointError
from tests.checkpoint.shards import bf16, write_single

FOREIGN = {
    "torch DCP": ([".metadata", "__0_0.distcp", "__1_0.distcp"], "torch distributed", "dcp_to_torch {dir} model.pt"),
    "torch DCP by accelerate": (
        ["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "config.json"],
        "torch distributed",
        "dcp_to_torch {dir}/pytorch_model_fsdp_0 model.pt",
    ),
    "Megatron": (["latest_checkpointed_iteration.txt", "iter_0000100/mp_rank_00/x.pt"], "Megatron", "--megatron-path"),
    "Megatron, one iteration": (["mp_rank_00_000/model_optim_rng.pt"], "Megatron", "convert_checkpoints.py export"),
    "Megatron on torch_dist": (["common.pt", ".metadata", "__0_0.distcp"], "Megatron", "--megatron-path {dir} "),
    "DeepSpeed": (
        ["zero_to_fp32.py", "latest", "global_step500/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "config.json"],
        "DeepSpeed ZeRO",
        "python zero_to_fp32.py . OUT --safe_serialization",
    ),
    "DeepSpeed without its script": (
        ["global_step12/zero_pp_rank_0_mp_rank_00_model_states.pt"],
        "DeepSpeed ZeRO",
        "--safe_serialization",
    ),
    "verl on FSDP": (
        ["actor/model_world_size_8_rank_0.pt", "actor/huggingface/config.json", "data.pt"],
        "verl FSDP",
        "verl.model_merger merge --backend fsdp --local_dir {dir}/actor --target_dir",
    ),
    "a pickle": (["pytorch_model.bin", "config.json"], "a pickle checkpoint", "never opened"),
    "a sharded pickle": (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "a pickle", "never"),
    "a torch file": (["policy.pt"], "a pickle checkpoint", "save_pretrained"),
    "an adapter": (["adapter_model.safetensors", "adapter_config.json"], "a LoRA adapter", "merge_and_unload"),
    "something else": (["notes.md", "config.json"], "only 'config.json', 'notes.md'", "model.safetensors"),
    "a trainer's state before its weights": (["optimizer.pt", "rng_state.pth"], "only 'optimizer.pt'", "model.safet"),
}


@pytest.mark.parametrize(("paths", "name", "command"), FOREIGN.values(), ids=FOREIGN.keys())
def test_it_is_refused_by_name_with_what_to_do(tmp_path: Path, paths: list[str], name: str, command: str) -> None:
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"\x80\x04.")
    for look in (open_checkpoint, check_complete):
        with pytest.raises(CheckpointError) as caught:
            look(tmp_path)
        sentence = str(caught.value)
        assert sentence.startswith(f"{tmp_path}: ")
        assert name in sentence
        assert command.format(dir=tmp_path) in sentence
        assert "\n" not in sentence


def test_weights_beside_a_foreign_layout_are_taken(tmp_path: Path) -> None:
    write_single(tmp_path, {"x": bf16(4)})
    (tmp_path / "zero_to_fp32.py").write_text("")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    open_checkpoint(tmp_path).close()
