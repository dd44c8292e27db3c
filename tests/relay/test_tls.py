"""Two ends over TLS 1.3: both show certificates of a private authority, and whoever has none gets nowhere."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from deltad.config import TlsFiles
from deltad.errors import ConfigError, DeniedError, UnavailableError
from deltad.protocol.access import Doorkeeper, Principal, Right
from deltad.relay.client import ClientTls, RelayClient
from deltad.relay.server import RelayServer
from deltad.store.announce import Announcements
from deltad.store.store import Store
from tests.kit.authority import Authority, Issued
from tests.kit.versions import Lineage

READER = Principal("rollout-1", frozenset({Right.READ}), ("policy",))


class Relay:
    """A relay over TLS on loopback; `door` may be changed."""

    def __init__(self, home: Path) -> None:
        self.authority = Authority(home / "ca")
        self.end = self.authority.issue("trainer-1")
        self.files = TlsFiles(self.end.certificate, self.end.key, self.authority.certificate)
        self.context = self.files.server()
        self.store = Store.open(home / "store")
        self.door = Doorkeeper(lambda: (), {"rollout-1": READER})
        self.port = 0

    def client(
        self, shown: Issued | None, *, ca: Path | None = None, name: str | None = None, host: str = "127.0.0.1"
    ) -> RelayClient:
        files = TlsFiles(
            shown.certificate if shown else None, shown.key if shown else None, ca or self.authority.certificate
        )
        url = f"https://{host}:{self.port}"
        return RelayClient(url, None, count=lambda count: None, tls=ClientTls(files, name), connect_seconds=5.0)


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    async with serving(Relay(tmp_path)) as relay:
        yield relay


@asynccontextmanager
async def serving(relay: Relay) -> AsyncIterator[Relay]:
    server = RelayServer(
        relay.store,
        daemon="trainer-1",
        boot="boot-1",
        door=relay.door,
        announcements=Announcements(),
        on_report=lambda report: None,
    )
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=relay.context).start()
    relay.port = runner.addresses[0][1]
    try:
        yield relay
    finally:
        await runner.cleanup()
        relay.store.close()


async def test_a_certificate_with_a_pinned_name_reads_what_it_may_and_nothing_else(relay: Relay) -> None:
    for run in ("policy", "secret"):
        Lineage(run, tensors=1).publish().commit_into(relay.store)
    async with relay.client(relay.authority.issue("rollout-1")) as client:
        assert await client.runs() == ("policy",)
        assert await client.latest("policy", after=None, wait=0.0)
        for run in ("secret", "no-such-run"):
            with pytest.raises(DeniedError, match="HTTP 403"):
                await client.latest(run, after=None, wait=0.0)


async def test_a_certificate_that_nobody_pinned_reads_nothing(relay: Relay) -> None:
    async with relay.client(relay.authority.issue("rollout-2", "also-rollout-1.example")) as client:
        with pytest.raises(DeniedError, match="HTTP 401"):
            await client.hello()


async def test_without_a_certificate_of_the_authority_no_connection_stands(relay: Relay, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "other").issue("rollout-1")
    for shown in (None, stranger, relay.authority.issue("rollout-1", expired=True)):
        async with relay.client(shown) as client:
            # Who listens tells so after the handshake, and may cut the connection before that is heard.
            with pytest.raises(
                (DeniedError, UnavailableError), match=r"certificate of this daemon|a certificate is not accepted"
            ):
                await client.hello()


async def test_a_peer_that_is_not_whom_its_url_names_is_refused_before_anything_is_said(
    relay: Relay, tmp_path: Path
) -> None:
    shown = relay.authority.issue("rollout-1")
    async with relay.client(shown, ca=Authority(tmp_path / "other").certificate) as client:
        with pytest.raises(DeniedError, match=r"expected a certificate for 127.0.0.1 by an authority"):
            await client.hello()
    async with relay.client(shown, name="trainer-2") as client:
        with pytest.raises(DeniedError, match="expected a certificate for trainer-2 by an authority"):
            await client.hello()
    async with relay.client(shown, name="trainer-1") as client:
        assert (await client.hello()).daemon == "trainer-1"


async def test_nothing_older_than_tls_1_3_is_spoken(relay: Relay) -> None:
    shown = relay.authority.issue("rollout-1")
    old = TlsFiles(shown.certificate, shown.key, relay.authority.certificate).client()
    assert old.minimum_version is ssl.TLSVersion.TLSv1_3
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", relay.port, ssl=old)


async def test_a_renewed_certificate_is_shown_to_those_who_connect_from_then_on(relay: Relay) -> None:
    shown = relay.authority.issue("rollout-1")
    files = TlsFiles(shown.certificate, shown.key, relay.authority.certificate)

    async def serial() -> object:
        _, writer = await asyncio.open_connection("127.0.0.1", relay.port, ssl=files.client())
        found = writer.get_extra_info("peercert")["serialNumber"]
        writer.transport.abort()
        return found

    before = await serial()
    relay.authority.issue("trainer-1")
    relay.files.load(relay.context)
    assert await serial() != before


@pytest.mark.parametrize("flaw", ["absent", "writable", "another key", "no certificate"])
def test_files_that_cannot_be_used_are_refused_by_name(tmp_path: Path, flaw: str) -> None:
    authority = Authority(tmp_path)
    end, other = authority.issue("a"), authority.issue("b")
    match flaw:
        case "absent":
            end.key.unlink()
        case "writable":
            end.key.chmod(0o620)
        case "another key":
            end.key.write_bytes(other.key.read_bytes())
        case _:
            end.certificate.write_text("nothing")
    with pytest.raises(ConfigError, match=str(end.key)) as refused:
        TlsFiles(end.certificate, end.key).server()
    assert "PRIVATE" not in str(refused.value)


def test_a_certificate_that_ends_soon_is_warned_of(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    fine, ended = authority.issue("a"), authority.issue("b", expired=True)
    assert TlsFiles(fine.certificate, fine.key).doubts() == ()
    (doubt,) = TlsFiles(ended.certificate, ended.key).doubts()
    assert doubt.startswith(f"certificate {ended.certificate}: it has ended")
    fine.key.chmod(0o604)
    (doubt,) = TlsFiles(fine.certificate, fine.key).doubts()
    assert "everybody on this host may read it" in doubt
