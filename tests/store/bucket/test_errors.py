"""What goes wrong at a bucket is said in our words, without anything secret, and costs bounded memory and time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from deltad.config.credentials_file import CredentialsFile
from deltad.errors import ConfigError, DeltadError, DeniedError, NotFoundError, PeerError, UnavailableError
from deltad.store.bucket.obstore import ObstoreBucket
from tests.kit.buckets import KEY_ID, SECRET, S3Server

Answer = Callable[[web.Request], web.StreamResponse]


@asynccontextmanager
async def endpoint(answer: Answer) -> AsyncIterator[str]:
    """A server that answers every request so."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def at(url: str, **settings: str) -> ObstoreBucket:
    known = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "x", "AWS_ENDPOINT_URL": url}
    return ObstoreBucket("s3://policies/p", lambda: known | settings, stall_seconds=0.5, connect_seconds=0.5)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, UnavailableError),
        (401, DeniedError),
        (403, DeniedError),
        (404, NotFoundError),
        (500, UnavailableError),
        (503, UnavailableError),
    ],
)
async def test_a_refusal_is_named_and_what_it_echoes_is_not_repeated(status: int, kind: type[DeltadError]) -> None:
    def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(
            status=status, text=f"{request.headers['Authorization']} {SECRET} {request.url}?sig={SECRET}"
        )

    async with endpoint(answer) as url:
        with pytest.raises(kind) as caught:
            await at(url).read("owner", 100)
    said = f"{caught.value!s} {caught.value!r} {caught.value.__cause__}"
    assert "s3://policies/p" in said
    assert KEY_ID not in said
    assert SECRET not in said


async def test_nobody_there_and_nobody_who_answers_are_unavailable_and_say_the_same_each_time() -> None:
    bucket = at("http://127.0.0.1:9")
    said = set()
    for _ in range(3):
        with pytest.raises(UnavailableError) as caught:
            await bucket.read("owner", 100)
        said.add(str(caught.value))
    assert len(said) == 1, "a reason that is told once must not change by the milliseconds it took"


async def test_a_bucket_that_does_not_exist_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    with S3Server() as server:
        bucket = ObstoreBucket("s3://nowhere/p", server.settings)
        with pytest.raises(PeerError, match="expected a bucket of that name, found none"):
            await bucket.read("owner", 100)


async def test_an_endless_body_is_cut_off_where_it_should_end() -> None:
    def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=bytes(1 << 20), headers={"ETag": '"x"', "Last-Modified": "Tue, 01 Dec 2026 01:00:00 GMT"}
        )

    async with endpoint(answer) as url:
        with pytest.raises(PeerError, match="at most 100 bytes"):
            await at(url).read("owner", 100)


async def test_replaced_credentials_are_picked_up_after_a_refusal(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    seen: list[str] = []

    def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["Authorization"])
        if "ANEWKEY" not in request.headers["Authorization"]:
            return web.Response(status=403)
        return web.Response(body=b"hi", headers={"ETag": '"x"', "Last-Modified": "Tue, 01 Dec 2026 01:00:00 GMT"})

    async with endpoint(answer) as url:
        lines = f"AWS_SECRET_ACCESS_KEY={SECRET}\nAWS_REGION=x\nAWS_ENDPOINT_URL={url}\n"
        file.write_text(f"AWS_ACCESS_KEY_ID=ANOLDKEY\n{lines}")
        file.chmod(0o600)
        bucket = ObstoreBucket("s3://policies/p", CredentialsFile(file).read)
        file.write_text(f'export AWS_ACCESS_KEY_ID="ANEWKEY"\n{lines}')
        with pytest.raises(DeniedError, match="see the provider's variables"):
            await bucket.read("owner", 100)
        found = await bucket.read("owner", 100)
        assert found is not None
        assert found[0] == b"hi"
    assert len(seen) == 2


def test_settings_that_the_provider_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="settings that go together"):
        ObstoreBucket("s3://policies/p", lambda: {"NONSENSE": SECRET})


@pytest.mark.parametrize("content", ["AWS_ACCESS_KEY_ID", f"{SECRET}", "=x", "A B=c"])
def test_a_credentials_file_with_anything_but_settings_is_refused_and_not_repeated(
    tmp_path: Path, content: str
) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"\n# a comment\n{content}\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="found another in line 3") as caught:
        CredentialsFile(file).read()
    assert SECRET not in str(caught.value)
