"""Every ceiling in one place, checked before anything is allocated.

Sizes are planned for 200,000 tensors and 500,000 chunks a version: a one-trillion-parameter
mixture-of-experts model has about 70,000 tensors. Sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB

DEVICE_MEMORY_BYTES = 2048 * MIB
"""What may be taken of a GPU's memory unless something else is configured. Two of the largest frames take three
quarters of it at worst: both states, room for what each lane may turn into, streams."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The ceilings that parsers and servers respect. Defaults suit every model known today."""

    tensors: int = 200_000
    tensor_name_bytes: int = 1024
    tensor_dims: int = 16
    tensor_bytes: int = 1 << 46
    layout_bytes: int = 64 * MIB
    files: int = 64
    file_bytes: int = 64 * MIB
    record_bytes: int = 1 * MIB
    heartbeat_bytes: int = 4 * KIB
    manifest_bytes: int = 64 * MIB
    page_bytes: int = 4 * MIB
    page_chunks: int = 4096
    chunks: int = 500_000
    coders: int = 64
    chunk_bytes: int = 8 * MIB
    pack_bytes: int = 256 * MIB
    frame_header_bytes: int = 1 * MIB
    frame_rects: int = 4096
    frame_lanes: int = 32 * MIB
    frame_plain_bytes: int = 64 * MIB
    safetensors_header_bytes: int = 100 * MIB
    checkpoint_files: int = 20_000
    index_bytes: int = 64 * MIB
    json_body_bytes: int = 1 * MIB
    report_bytes: int = 1 * MIB
    variants: int = 16
    runs: int = 1024
    ranks: int = 65_536
    join_bytes: int = 256 * MIB
    long_poll_seconds: float = 60.0
    connections: int = 4096
    """Of one server, at a time."""
    address_connections: int = 1024
    """Of those, from one address: two hundred daemons may stand behind it."""
    idle_seconds: float = 150.0
    """How long a connection may stand without a request; a puller keeps its own warm for 120 s."""
    header_line_bytes: int = 8190
    headers: int = 128
    """Of one request or reply."""
    disk_reserve_bytes: int = 64 * MIB

    @property
    def object_bytes(self) -> int:
        """The largest object that a store or a relay handles in one piece."""
        return max(self.chunk_bytes, self.page_bytes, self.layout_bytes, self.manifest_bytes, self.file_bytes)


DEFAULT_LIMITS = Limits()
