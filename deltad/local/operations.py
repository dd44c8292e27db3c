"""What the local API asks of the daemon: a port. The daemon implements it; tests have their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from deltad.client.handover import HandedOver, HandOver, HandOverReply, JoinReply, JoinRequest
from deltad.client.messages import (
    CollectReply,
    CollectRequest,
    ExportReply,
    ExportRequest,
    NextReply,
    PinReply,
    PlanReply,
    PublishReply,
    PublishRequest,
    StatusView,
    TargetReply,
    TargetRequest,
    TargetsReply,
    VerifyReply,
    VerifyRequest,
    VersionInfo,
)
from deltad.types import RunId, Variant, Version


class Operations(Protocol):
    """The daemon's deeds and views. All is called on the event loop; what is not async must not block.

    Errors are those of `deltad.errors`; anything else that is raised is a bug and is reported as one.
    """

    async def publish(self, run: RunId, request: PublishRequest) -> PublishReply:
        """Publish a checkpoint directory; returns once the version is durable."""
        ...

    async def join(self, run: RunId, request: JoinRequest) -> JoinReply:
        """A rank joins those that publish from memory; answers once all have."""
        ...

    async def hand_over(
        self, run: RunId, head: HandOver, chunks: AsyncIterator[bytes], tail: Callable[[], Awaitable[HandedOver]]
    ) -> HandOverReply:
        """Take a rank's share of a step; answers once the version that all ranks make is durable.

        `tail` is asked for once `chunks` is at its end. What ends early in an error never happened.
        """
        ...

    async def pull(self, run: RunId, wait: float) -> VersionInfo | None:
        """Pull from the upstreams for at most `wait` seconds; the newest version then, if there is one."""
        ...

    async def export(self, run: RunId, request: ExportRequest) -> ExportReply:
        """Write a version as a loadable checkpoint."""
        ...

    async def verify(self, run: RunId, request: VerifyRequest) -> VerifyReply:
        """Rebuild a version from what is stored and compare its root."""
        ...

    async def pin(self, run: RunId, version: Version, by: str, why: str) -> PinReply:
        """Keep a version whatever the retention says; durable on return. Raises NotFoundError."""
        ...

    async def unpin(self, run: RunId, version: Version) -> PinReply:
        """Leave a version to the retention again. Raises NotFoundError."""
        ...

    async def move_target(self, run: RunId, request: TargetRequest, by: str) -> TargetReply:
        """Move the target of a fleet; durable, and everybody here told, on return."""
        ...

    def targets(self, run: RunId) -> TargetsReply:
        """What stands about the targets of a run. Raises NotFoundError for a run that is neither declared nor held."""
        ...

    async def plan(self, run: RunId) -> PlanReply:
        """What would be folded, cut and dropped now, and why. Raises NotFoundError for an unknown run."""
        ...

    async def collect(self, request: CollectRequest) -> CollectReply:
        """Let go of what nobody needs, or say what that would be."""
        ...

    def versions(self, run: RunId) -> Sequence[VersionInfo]:
        """Ascending. Raises NotFoundError for a run that is neither declared nor held."""
        ...

    def next_for(self, run: RunId, variant: Variant, served: Version | None) -> NextReply | None:
        """What a replica should do that serves `served`; None while there is nothing newer."""
        ...

    def drop_export(self, replica: str) -> None:
        """Remove what was exported for a replica. Called in a worker thread: removing files may take a while."""
        ...

    def status(self) -> StatusView:
        """The whole daemon at a glance."""
        ...
