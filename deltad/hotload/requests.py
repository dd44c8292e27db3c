"""What both faces need: who may do what with which deployment, and bodies as types of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from aiohttp import web

from deltad.errors import DeniedError, LimitError, NotFoundError, UsageError
from deltad.hotload.loading import HotLoads
from deltad.protocol.access import Principal, Right

Handler = Callable[[web.Request, Principal], Awaitable[web.StreamResponse]]
Body = TypeVar("Body", bound=msgspec.Struct)

BODY_SECONDS = 30.0


class Route(NamedTuple):
    """A route of a face, and the right without which nobody gets to it."""

    method: str
    path: str
    handler: Handler
    right: Right


class Deployments:
    """The deployments of a daemon. What a caller may not see is refused in the same words whatever there is."""

    def __init__(self, deployments: Sequence[HotLoads]) -> None:
        self._by_id = {each.deployment: each for each in deployments}

    def seen_by(self, caller: Principal) -> list[HotLoads]:
        return [each for each in self._by_id.values() if caller.may(Right.READ, each.run)]

    def find(self, name: str, caller: Principal, right: Right) -> HotLoads:
        """Raises DeniedError, or NotFoundError for somebody who may know what there is."""
        found = self._by_id.get(name)
        if found is not None and caller.may(right, found.run):
            return found
        if found is None and caller.sees_all and caller.may(right):
            raise NotFoundError(f"deployment {name[:120]!r}", expected="one of a [[hot_load]]", found="none of that id")
        raise DeniedError("hot loads", expected="an identity that may do this", found="one that may not")

    def of_load(self, load_id: str, caller: Principal, right: Right) -> HotLoads:
        """The deployment that a load was made in. Raises as `find` does."""
        for each in self._by_id.values():
            if each.ledger.find(load_id) is not None and caller.may(right, each.run):
                return each
        if caller.sees_all and caller.may(right):
            raise NotFoundError(f"hot load {load_id[:120]!r}", found="none of that id")
        raise DeniedError("hot loads", expected="an identity that may do this", found="one that may not")


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """Raises UsageError, LimitError."""
    thing = f"body of {request.method} {request.rel_url.raw_path[:200]}"
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await request.read()
    except TimeoutError:
        raise UsageError(thing, expected=f"the whole body within {BODY_SECONDS:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise LimitError(thing, expected="a body within json_body_bytes") from None
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(thing, expected=f"a {kind.__name__} in JSON", found=str(error)[:200]) from None


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
