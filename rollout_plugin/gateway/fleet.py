"""What the gateway knows of the fleet: asked of the daemon again and again, and told to whoever waits for a version.

A daemon that is away only makes this older: the last roster stays, since replicas serve without their daemon.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from deltad.client.messages import FleetView
from deltad.errors import DeltadError, ReplicaError, UnavailableError
from rollout_plugin.gateway.roster import Member, Roster, pick, roster_of
from rollout_plugin.gateway.wanted import Wanted

Look = Callable[[], FleetView]
"""Asks the daemon; blocks, and may raise any DeltadError."""


class Fleet:
    """The roster of now, and how many requests each of its replicas has from here."""

    def __init__(self, look: Look, *, variant: str, every: float, told: Callable[[str], None]) -> None:
        """`every`: seconds between two looks. `told` hears once of each new reason why looking fails, and '' after."""
        self._look = look
        self._variant = variant
        self._every = every
        self._told = told
        self._changed = asyncio.Event()
        self.roster = Roster()
        self.loads: Counter[str] = Counter()
        self.trouble = ""

    async def follow(self) -> None:
        """Keep the roster. Ends only by being cancelled."""
        while True:
            try:
                roster = roster_of(await asyncio.to_thread(self._look), self._variant)
            except DeltadError as error:
                self._tell(str(error))
            else:
                self._tell("")
                if roster != self.roster:
                    self.roster = roster
                    self.wake()
            await asyncio.sleep(self._every)

    def wake(self) -> None:
        """Let all that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, seconds: float) -> bool:
        """Wait until something is different; false once so many seconds are over."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def choose(
        self, wanted: Wanted, prompt: Sequence[int], *, without: Collection[str] = (), until: float
    ) -> Member:
        """Who answers. Waits for one that may until the loop's time is `until`; raises what `refusal` says."""
        while True:
            if fit := self.roster.fit(wanted, without):
                return pick(fit, prompt, self.loads)
            left = until - asyncio.get_running_loop().time()
            if left <= 0 or not await self.changed(left):
                raise self.refusal(wanted)

    def refusal(self, wanted: Wanted) -> DeltadError:
        """Why nobody can answer now. Retryable, unless the version was passed."""
        roster = self.roster
        if not roster.members:
            return UnavailableError("gateway", expected="a replica that serves", found="none", hint="try again")
        if wanted.exact is not None and all(member.version > wanted.exact for member in roster.members):
            hint = "it was passed: ask for `min`, or roll the fleet back"
            return ReplicaError("weight_version", expected=str(wanted), found=roster.said(), hint=hint)
        newer = roster.latest is not None and all(member.version < roster.latest for member in roster.members)
        coming = f"{roster.latest} is coming" if newer else "nothing newer is coming yet"
        error = ReplicaError(
            "weight_version", expected=str(wanted), found=roster.said(), hint=f"{coming}; try again, or ask to wait"
        )
        error.retryable = True
        return error

    @contextmanager
    def load(self, member: Member) -> Iterator[None]:
        """A request is at this replica."""
        self.loads[member.name] += 1
        try:
            yield
        finally:
            self.loads[member.name] -= 1
            if not self.loads[member.name]:
                del self.loads[member.name]

    def _tell(self, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._told(trouble)
