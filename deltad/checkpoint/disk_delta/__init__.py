"""Disk-delta directories: the differences between checkpoints as slime, miles, stitch and cwtrain exchange them.

    <name>/model-00000-of-00001.safetensors    one U8 vector for each changed tensor: a zstd frame of its difference
    <name>/model.safetensors.index.json        which shard holds which, from which version to which, and how encoded

The index is written last. Nothing in these directories is believed: sizes are bounded before anything is decoded, and
each tensor's new bytes are compared with the checksum that its trainer wrote.
"""

from deltad.checkpoint.disk_delta.applying import apply_disk_delta
from deltad.checkpoint.disk_delta.checksums import Checksum
from deltad.checkpoint.disk_delta.index import DiskDelta, Encoding, find_disk_delta, is_named
from deltad.checkpoint.disk_delta.writing import WrittenDelta, write_disk_delta

__all__ = [
    "Checksum",
    "DiskDelta",
    "Encoding",
    "WrittenDelta",
    "apply_disk_delta",
    "find_disk_delta",
    "is_named",
    "write_disk_delta",
]
