"""The one error tree of deltad.

Every error names the thing, what was expected, what was found and what to do about it, and knows
three facts about itself that a caller may branch on: whether trying again can help (`retryable`),
the exit code of a command that ends with it (`exit_code`, after sysexits.h) and the HTTP status of a
reply that carries it (`http_status`). This module imports nothing of the project.
"""

from __future__ import annotations


class DeltadError(Exception):
    """Base of all errors that deltad raises on purpose.

    `thing` is what the message is about (a path, a URL, a version); `expected` and `found` are the two
    sides of the conflict; `hint` says what to do next. All but `thing` may be empty.
    """

    retryable = False
    exit_code = 1
    http_status = 500

    def __init__(self, thing: str, *, expected: str = "", found: str = "", hint: str = "") -> None:
        self.thing = thing
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        parts = [self.thing]
        if self.expected and self.found:
            parts.append(f": expected {self.expected}, found {self.found}")
        elif self.expected:
            parts.append(f": expected {self.expected}")
        elif self.found:
            parts.append(f": {self.found}")
        if self.hint:
            parts.append(f"; {self.hint}")
        return "".join(parts)

    @property
    def kind(self) -> str:
        """A stable name for logs, metrics and JSON: the class name without `Error`."""
        return type(self).__name__.removesuffix("Error")


class ConfigError(DeltadError):
    """The configuration cannot be used. Nothing has been bound or opened."""

    exit_code = 78
    http_status = 400


class UsageError(DeltadError):
    """A caller asked for something that can never work, such as a malformed version name."""

    exit_code = 64
    http_status = 400


class NotFoundError(DeltadError):
    """A run, version, object or file that was named does not exist here."""

    exit_code = 66
    http_status = 404


class BaseMissingError(NotFoundError):
    """A difference whose base is not held here. Nothing was touched; it can be taken once the base is there."""

    retryable = True
    http_status = 409


class FormatError(DeltadError):
    """Bytes that are not in the format they claim: a lying length, an unknown field, a bad table."""

    exit_code = 65
    http_status = 422


class CoderError(FormatError):
    """An edge whose frames are in a coder that the reader does not know. The rest of its version is untouched."""


class LimitError(FormatError):
    """A size or count above its ceiling in `deltad.limits`; refused before anything is allocated."""

    http_status = 413


class IntegrityError(DeltadError):
    """Well-formed bytes that are not the bytes that were promised: a digest does not match."""

    exit_code = 65
    http_status = 422


class BaseMismatchError(IntegrityError):
    """A delta was offered on a base that it was not made for. Nothing was touched."""

    http_status = 409


class CheckpointError(DeltadError):
    """A checkpoint that cannot be published: incomplete, malformed, foreign, or not weights at all."""

    exit_code = 65
    http_status = 422


class CheckpointChangedError(CheckpointError):
    """A checkpoint changed between the moment it was judged complete and the end of reading it."""

    retryable = True
    http_status = 409


class ConflictError(DeltadError):
    """A write that contradicts what is already durable: other bytes under a known version, an old epoch."""

    exit_code = 65
    http_status = 409


class PreconditionError(ConflictError):
    """A request that what stands now does not admit, though another time it may. Nothing was changed."""

    http_status = 412


class StoreError(DeltadError):
    """The store cannot be opened or written."""

    exit_code = 74
    http_status = 503


class StoreBusyError(StoreError):
    """Another daemon holds the store."""

    retryable = True
    exit_code = 75


class StoreFullError(StoreError):
    """The disk is full. Nothing was published; work resumes when there is room."""

    retryable = True
    exit_code = 75
    http_status = 507


class UnavailableError(DeltadError):
    """A daemon or peer cannot be reached or does not answer in time."""

    retryable = True
    exit_code = 69
    http_status = 503


class PeerError(DeltadError):
    """A peer answered with something that the protocol does not allow. The sentence names the peer."""

    retryable = True
    exit_code = 76
    http_status = 502


class DeniedError(DeltadError):
    """The token, key or peer identity does not allow this. Says nothing about what exists."""

    exit_code = 77
    http_status = 403


class UntrustedError(IntegrityError):
    """No key that is trusted for it has signed a record or an edge. Nothing of it was believed."""


class ReplicaError(DeltadError):
    """A replica cannot take a version, or its served weights are not the version's."""

    exit_code = 70
    http_status = 409


class DeviceError(DeltadError):
    """A GPU that cannot be used, or that failed in the midst of work. The same work can go to another backend."""

    retryable = True
    exit_code = 69
    http_status = 503


class MissingPackageError(DeltadError):
    """A Python package that this part of deltad needs is not installed."""

    exit_code = 69
    http_status = 503
