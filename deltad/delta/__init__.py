"""The delta format and its arithmetic. Pure: bytes and arrays in, bytes and arrays out.

No files, sockets, clock or asyncio in here. Format number 0 is the reference of the first releases;
`deltad/docs/FORMAT.md` will describe format 1, and a reader refuses numbers that it does not know.
"""

FORMAT = 0
"""The number that every record, manifest and frame of this build carries."""
