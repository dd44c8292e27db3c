"""File systems by the magic numbers that statfs(2) gives them."""

from __future__ import annotations

_NAMES = {
    0xEF53: "ext4",
    0x58465342: "XFS",
    0x9123683E: "btrfs",
    0xCA451A4E: "bcachefs",
    0xF2F52010: "F2FS",
    0x2FC12FC1: "ZFS",
    0x794C7630: "overlayfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x5346414F: "AFS",
    0x01021997: "9p",
    0x6A656A63: "virtiofs",
    0x65735546: "FUSE",
}
IN_MEMORY = frozenset({0x01021994, 0x858458F6})
NETWORK = frozenset(
    magic
    for magic, name in _NAMES.items()
    if name in {"NFS", "SMB", "CIFS", "SMB2", "Ceph", "Lustre", "GPFS", "BeeGFS", "GFS2", "OCFS2", "AFS", "9p"}
)
"""Those on which other hosts write, too, unseen by events of this one."""


def name_of(magic: int | None) -> str:
    """The usual name; the number of one that has none here."""
    if magic is None:
        return "an unknown file system"
    return _NAMES.get(magic, f"a file system of type {magic:#x}")
