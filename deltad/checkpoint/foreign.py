"""Checkpoints that are not Hugging Face ones: recognised by their file names, refused by name.

Reads names only; opens nothing. The rules are a table: the first that matches says what the directory
is and which command makes of it something that can be published.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deltad.checkpoint.files import INDEX_NAME, SINGLE_NAME
from deltad.errors import CheckpointError

_DEPTH = 3
_ENTRIES = 5000

_SAVE = "`save_pretrained(OUT, safe_serialization=True)`"


@dataclass(frozen=True, slots=True)
class ForeignLayout:
    """One layout: its name, the relative paths that give it away, and what converts it.

    In `convert`, `{directory}` stands for the checkpoint's directory and `{folder}` for the one in it that
    the telltale path is in.
    """

    name: str
    paths: re.Pattern[str]
    convert: str


LAYOUTS = (
    ForeignLayout(
        "a DeepSpeed ZeRO checkpoint",
        re.compile(r"(.*/)?(zero_to_fp32\.py|\w*zero_pp_rank_\d+_mp_rank_\d+_\w+\.pt|mp_rank_\d+_model_states\.pt)"),
        "convert it with `python zero_to_fp32.py . OUT --safe_serialization`, run in {directory}",
    ),
    ForeignLayout(
        "a verl FSDP checkpoint",
        re.compile(r"(.*/)?model_world_size_\d+_rank_\d+\.pt"),
        "convert it with `python -m verl.model_merger merge --backend fsdp --local_dir {folder}"
        " --target_dir OUT`, or let verl save hf_model too",
    ),
    ForeignLayout(
        "a Megatron checkpoint",
        re.compile(r"latest_checkpointed_iteration\.txt|(.*/)?(iter_\d+|mp_rank_\d+(_\d+)*|common\.pt)"),
        "convert it with Megatron Bridge: `python examples/conversion/convert_checkpoints.py export"
        " --hf-model MODEL --megatron-path {directory} --hf-path OUT`",
    ),
    ForeignLayout(
        "a torch distributed checkpoint (DCP)",
        re.compile(r"(.*/)?(\.metadata|__\d+_\d+\.distcp)"),
        "convert it with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} model.pt`,"
        f" load model.pt into the model and call {_SAVE}",
    ),
    ForeignLayout(
        "a LoRA adapter without its model",
        re.compile(r"adapter_model\.safetensors"),
        f"merge it with `merge_and_unload()` and call {_SAVE}",
    ),
    ForeignLayout(
        "a pickle checkpoint",
        re.compile(r"(?!.*(optimizer|optim|scheduler|scaler|rng_state|training_args))[^/]+\.(bin|pt|pth|ckpt|pkl)"),
        f"a pickle can run code and is never opened: load it where you trust it and call {_SAVE}",
    ),
)


def recognise(paths: Iterable[str]) -> tuple[ForeignLayout, str] | None:
    """The foreign layout that these relative paths belong to, and the first path that tells. Pure."""
    ordered = sorted(paths)
    for layout in LAYOUTS:
        for path in ordered:
            if layout.paths.fullmatch(path):
                return layout, path
    return None


def no_checkpoint(directory: Path) -> CheckpointError:
    """The error for a directory in which there are no weights that can be published."""
    expected = f"{SINGLE_NAME} or {INDEX_NAME}"
    if not os.path.exists(directory):
        return CheckpointError(f"{directory}", expected="a checkpoint directory", found="nothing of that name")
    if not os.path.isdir(directory):
        return CheckpointError(f"{directory}", expected="a checkpoint directory", found="a file")
    paths = sorted(_walk(directory))
    if (recognised := recognise(paths)) is not None:
        layout, telltale = recognised
        hint = layout.convert.format(directory=directory, folder=(directory / telltale).parent)
        return CheckpointError(f"{directory}", expected="a Hugging Face checkpoint", found=layout.name, hint=hint)
    if not paths:
        return CheckpointError(f"{directory}", expected=expected, found="an empty directory")
    names = ", ".join(repr(path[:60]) for path in paths[:3]) + (", …" if len(paths) > 3 else "")
    return CheckpointError(f"{directory}", expected=expected, found=f"only {names}")


def _walk(directory: Path) -> Iterator[str]:
    """Relative paths below a directory, a bounded number of them, without following links."""
    waiting = [("", 1)]
    left = _ENTRIES
    while waiting:
        prefix, depth = waiting.pop()
        try:
            with os.scandir(directory / prefix) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        return
                    yield prefix + entry.name
                    if depth < _DEPTH and entry.is_dir(follow_symlinks=False):
                        waiting.append((f"{prefix}{entry.name}/", depth + 1))
        except OSError:
            continue  # what cannot be listed cannot be recognised
