"""Checkpoint directories: reading what trainers write, and writing what engines load."""

from deltad.checkpoint.baseline import drop_replaced, keep_baseline, open_baseline
from deltad.checkpoint.directory import Checkpoint, check_complete, open_checkpoint
from deltad.checkpoint.files import FileStamp, Fingerprint, fingerprint
from deltad.checkpoint.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "FileStamp",
    "Fingerprint",
    "check_complete",
    "drop_replaced",
    "fingerprint",
    "keep_baseline",
    "open_baseline",
    "open_checkpoint",
]
