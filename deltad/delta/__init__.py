"""The delta format and its arithmetic. Pure: bytes and arrays in, bytes and arrays out.

No files, sockets, clock or asyncio in here. `deltad/docs/FORMAT.md` is the format in words; a reader
refuses numbers that it does not know.
"""

FORMAT = 1
"""The number that every record, manifest and frame of this build carries."""
