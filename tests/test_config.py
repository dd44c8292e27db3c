"""The configuration file: what it means, what it refuses, and that no secret leaves its file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltad.config import Address, Config, FleetConfig, TokenFile, dump, explain, load_config, to_toml, warnings
from deltad.config.sections import LISTS, TABLES, brackets, keys
from deltad.delta.keys import SigningKey
from deltad.errors import ConfigError
from deltad.types import RunId
from tests.kit.authority import Authority

SECRET = "hunter2-hunter2"
KEY = SigningKey.from_seed(bytes(32))

FULL = """
[daemon]
name = "border-a"
store = "state/store"
socket = "/tmp/a.sock"

[relay]
listen = "127.0.0.1:7700"
token_file = "token"

[metrics]
listen = "[::1]:0"

[local]
listen = "127.0.0.1:7702"
certificate = "ca/a.pem"
key = "ca/a.key"
client_ca = "ca/ca.pem"

[[token]]
file = "trainer.token"
scope = ["publish", "control"]
runs = ["policy"]
name = "the trainer's ranks"

[[peer]]
name = "rollout-1.example"
runs = ["other"]

[signing]
key_file = "border.key"

[[run]]
id = "policy"
variant = "fp8-block128"
coder = "mid"
keep_versions = 100
keep_for = "24h"
keep_bytes = "500GiB"

[[watch]]
run = "policy"
directory = "../checkpoints"
pattern = "global_step_{number}/actor"
publish_as = "bf16"
quiet = "500ms"
rescan = "2m"
on_conflict = "new_epoch"

[[upstream]]
url = "http://border-b:7700/"
token_file = "token"
runs = ["other"]
connections = 8

[[bucket]]
url = "s3://policies/prod/"
publish = ["*"]
pull = ["third"]
credentials_file = "s3"
poll = "500ms"
grace = "24h"

[[pace]]
rate = "20MiB"
run = "other"
peer = "s3://policies/prod"
since = "08:30"
until = "20:00"

[[fleet]]
run = "other"

[[trust]]
key = "ed25519:11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="
scope = ["publish", "derive"]
runs = ["other"]
name = "trainer"

[backend]
kind = "cupy"
device = 3
memory_limit = "1536MiB"
threads = 3
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    token = tmp_path / "token"
    token.write_text(f"{SECRET}\n")
    token.chmod(0o600)
    (tmp_path / "trainer.token").write_text(f"{SECRET}{SECRET}")
    (tmp_path / "trainer.token").chmod(0o600)
    Authority(tmp_path / "ca").issue("a")
    credentials = tmp_path / "s3"
    credentials.write_text(f"AWS_SECRET_ACCESS_KEY={SECRET}\n")
    credentials.chmod(0o600)
    key = tmp_path / "border.key"
    key.write_bytes(KEY.pem())
    key.chmod(0o600)
    return tmp_path


def load(home: Path, text: str) -> Config:
    file = home / "deltad.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file)


def refusal(home: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(home, text)
    return caught.value


def test_a_name_is_all_that_a_daemon_needs(home: Path) -> None:
    config = load(home, '[daemon]\nname = "a"\n')
    assert config.daemon.store == Path("/var/lib/deltad")
    assert config.daemon.socket == Path("/run/deltad/deltad.sock")
    assert config.relay is None
    assert config.metrics is None
    assert (config.runs, config.watches, config.upstreams, config.fleets) == ((), (), (), ())
    assert (config.backend.kind, config.backend.device, config.backend.memory_limit) == ("auto", 0, 2 * 1024**3)
    assert config.backend.threads == 0


def test_every_key_is_understood(home: Path) -> None:
    config = load(home, FULL)
    assert config.path == home / "deltad.toml"
    assert config.daemon.name == "border-a"
    assert config.daemon.socket == Path("/tmp/a.sock")
    assert config.relay
    assert config.relay.listen == Address("127.0.0.1", 7700)
    assert config.relay.token_file
    assert config.relay.token_file.read() == SECRET
    assert config.relay.tls is None
    assert config.local
    assert config.local.tls.ca == home / "ca" / "ca.pem"
    ([token], [peer]) = config.tokens, config.peers
    assert (token.scope, token.runs, token.name) == (("publish", "control"), ("policy",), "the trainer's ranks")
    assert (peer.name, peer.scope, peer.runs) == ("rollout-1.example", ("read",), ("other",))
    assert config.metrics
    assert config.metrics.listen == Address("::1", 0)
    assert str(config.metrics.listen) == "[::1]:0"
    [run], [watch], [upstream], [fleet] = config.runs, config.watches, config.upstreams, config.fleets
    assert (run.id, run.variant, run.coder) == ("policy", "fp8-block128", "mid")
    assert (run.keep_versions, run.keep_for, run.keep_bytes) == (100, 86_400.0, 500 << 30)
    assert (watch.run, watch.pattern, watch.publish_as) == ("policy", "global_step_{number}/actor", "bf16")
    assert (watch.quiet, watch.rescan, watch.on_conflict) == (0.5, 120.0, "new_epoch")
    assert (upstream.url, upstream.runs, upstream.connections) == ("http://border-b:7700", ("other",), 8)
    [bucket], [pace] = config.buckets, config.paces
    assert (bucket.url, bucket.publish, bucket.pull) == ("s3://policies/prod", ("*",), ("third",))
    assert (bucket.poll, bucket.grace) == (0.5, 86_400.0)
    assert bucket.credentials_file
    assert bucket.credentials_file.read() == {"AWS_SECRET_ACCESS_KEY": SECRET}
    assert (pace.rate, pace.run, pace.peer, pace.since, pace.until) == (20 << 20, "other", bucket.url, 510, 1200)
    assert (fleet.policy, fleet.verify) == ("each", "after_resume")
    assert config.signing
    assert config.signing.key_file.read().public == KEY.public
    [trust] = config.trusts
    assert str(trust.key) == "ed25519:11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="
    assert (trust.scope, trust.runs, trust.name) == (("publish", "derive"), ("other",), "trainer")
    assert (config.backend.kind, config.backend.device, config.backend.memory_limit) == ("cupy", 3, 1536 * 1024**2)
    assert config.backend.threads == 3


def test_relative_paths_are_relative_to_the_file_and_not_to_the_process(home: Path) -> None:
    config = load(home, FULL)
    assert config.daemon.store == home / "state/store"
    assert config.watches[0].directory == home.parent / "checkpoints"


def test_every_key_is_explained_with_the_default_that_it_has() -> None:
    sections = {section.name: section for section in explain()}
    told = {(name, key.name): key for name, section in sections.items() for key in section.keys}
    kinds = {**TABLES, **LISTS}
    assert set(told) == {(brackets(name), key.name) for name, kind in kinds.items() for key in keys(kind)}
    assert all(section.text for section in sections.values())
    for (_, name), key in told.items():
        assert len(key.text) > 10, name
        assert "Default" not in key.text, name
    assert told["[[watch]]", "quiet"].default == '"1s"'
    assert told["[backend]", "memory_limit"].default == '"2GiB"'
    assert told["[daemon]", "name"].required
    for name, kind in kinds.items():
        written = re.findall(r"^ *`(\w+)`(?:(?!^ *`\w+`:).)*?Default `?([^ `]+)`?\.$", kind.__doc__ or "", re.M | re.S)
        for key, default in written:
            assert default == told[brackets(name), key].default.strip('"'), (name, key)


def test_a_relay_without_an_address_is_off(home: Path) -> None:
    assert load(home, '[daemon]\nname = "a"\n[relay]\ntoken_file = "token"\n').relay is None


def test_a_run_without_a_fleet_section_has_the_default_fleet(home: Path) -> None:
    config = load(home, FULL)
    assert config.fleet(RunId("policy")) == FleetConfig(RunId("policy"))
    assert config.run(RunId("policy")) == config.runs[0]
    assert config.run(RunId("other")) is None
    assert config.pulls(RunId("other"))
    assert not config.pulls(RunId("policy"))


def test_what_is_shown_loads_again_to_the_same_tree(home: Path) -> None:
    config = load(home, FULL)
    shown = to_toml(config)
    assert load(home, shown) == config
    assert load(home, to_toml(load(home, shown))) == config


@given(
    path=st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1, max_size=20),
    milliseconds=st.integers(10, 10**9 - 1),
    kibibytes=st.integers(2**20, 10**9 - 1),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_path_duration_and_size_survive_being_shown(
    home: Path, path: str, milliseconds: int, kibibytes: int
) -> None:
    config = load(home, FULL)
    config = replace(
        config,
        daemon=replace(config.daemon, store=Path(os.path.normpath(f"/{path}"))),
        watches=(replace(config.watches[0], quiet=milliseconds / 1000, rescan=milliseconds / 1000),),
        backend=replace(config.backend, memory_limit=kibibytes * 1024),
    )
    assert load(home, to_toml(config)) == config


def test_no_secret_is_in_what_is_shown_or_printed(home: Path) -> None:
    config = load(home, FULL)
    assert SECRET not in repr(config) + str(config) + to_toml(config) + json.dumps(dump(config))
    assert str(home / "token") in to_toml(config)


def test_a_rotated_token_is_read_anew(home: Path) -> None:
    token = TokenFile(home / "token")
    (home / "token").write_text("another")
    assert token.read() == "another"


NAME = '[daemon]\nname = "a"\n'
RUN = NAME + '[[run]]\nid = "r"\n'
WATCH = RUN + '[[watch]]\nrun = "r"\ndirectory = "d"\n'
UPSTREAM = NAME + '[[upstream]]\nurl = "http://b:1"\ntoken_file = "token"\n'
LEAD = NAME + '[[lead]]\nrun = "policy"\nurl = "http://trainer-1:7702"\n'
BUCKET = NAME + '[[bucket]]\nurl = "s3://b/p"\n'
PACE = NAME + '[[pace]]\nrate = "1MiB"\n'
FLEET = RUN + '[[fleet]]\nrun = "r"\n'


@pytest.mark.parametrize(
    ("text", "key", "advice"),
    [
        ("", "daemon.name", "no such key"),
        ("[daemon]\n", "daemon.name", "no such key"),
        (NAME + "[dameon]\n", "dameon", "the nearest valid one is [daemon]"),
        (NAME + '[[runs]]\nid = "r"\n', "runs", "the nearest valid one is [[run]]"),
        (NAME + "[foo]\n", "foo", "valid here: [backend], [[bucket]], [daemon], [[fleet]], [[hot_load]]"),
        (LEAD + 'token_file = "t"\n', "lead[0].url", "a URL of https"),
        (LEAD.replace("http:", "https:"), "lead[0].token_file", "or a `certificate`"),
        (LEAD.replace("http:", "https:") + 'certificate = "c"\n', "lead[0].key", "or neither"),
        (LEAD.replace("policy", "r") + RUN.removeprefix(NAME), "lead[0].run", "no [[run]] here"),
        (NAME + 'metrics = "x"\n', "daemon.metrics", "valid here: 'derive_rate', 'group', 'name', 'socket'"),
        (NAME + 'storage = "x"\n', "daemon.storage", "the nearest valid one is 'store'"),
        (WATCH + 'quite = "1s"\n', "watch[0].quite", "the nearest valid one is 'quiet'"),
        (WATCH + "quiet = 1\n", "watch[0].quiet", "'500ms'"),
        (WATCH + 'quiet = "1"\n', "watch[0].quiet", "'500ms'"),
        (WATCH + 'quiet = "1 s"\n', "watch[0].quiet", "'500ms'"),
        (WATCH + 'quiet = "-1s"\n', "watch[0].quiet", "'500ms'"),
        (WATCH + 'quiet = "1.5s"\n', "watch[0].quiet", "'500ms'"),
        (WATCH + 'quiet = "1sec"\n', "watch[0].quiet", "'500ms'"),
        (WATCH + 'quiet = "1MiB"\n', "watch[0].quiet", "'500ms'"),
        (WATCH + 'quiet = "٣s"\n', "watch[0].quiet", "'500ms'"),
        (WATCH + 'rescan = "0s"\n', "watch[0].rescan", "at least 10ms"),
        (WATCH + 'publish_as = "fp16"\n', "watch[0].publish_as", "'source' or 'bf16'"),
        (WATCH + "publish_as = []\n", "watch[0].publish_as", "'source' or 'bf16'"),
        (WATCH + 'on_conflict = "overwrite"\n', "watch[0].on_conflict", "'refuse' or 'new_epoch'"),
        (WATCH + 'pattern = "{number}_{number}"\n', "watch[0].pattern", "at most one '{number}'"),
        (WATCH + 'pattern = "../{number}"\n', "watch[0].pattern", "a relative path"),
        (WATCH + 'pattern = "/x/{number}"\n', "watch[0].pattern", "a relative path"),
        (WATCH + 'pattern = "a//{number}"\n', "watch[0].pattern", "a relative path"),
        (WATCH + 'pattern = "{number}/"\n', "watch[0].pattern", "a relative path"),
        (WATCH + 'pattern = "{step}"\n', "watch[0].pattern", "'{number}'"),
        (WATCH + 'pattern = ""\n', "watch[0].pattern", "a relative path"),
        (WATCH + '[[watch]]\nrun = "r"\ndirectory = "e"\n', "watch[1].run", "'r' again"),
        (RUN + '[[watch]]\nrun = "rr"\ndirectory = "d"\n', "watch[0].run", "the nearest declared one is 'r'"),
        (NAME + '[[watch]]\nrun = "r"\ndirectory = "d"\n', "watch[0].run", "a run that a [[run]] declares"),
        (RUN + '[[watch]]\nrun = "other"\ndirectory = "d"\n', "watch[0].run", "declared here: 'r'"),
        (RUN + '[[watch]]\nrun = "r"\n', "watch[0].directory", "no such key"),
        (RUN + '[[watch]]\nrun = "r"\ndirectory = ""\n', "watch[0].directory", "a path"),
        (RUN + '[[watch]]\nrun = "r"\ndirectory = "a\\u0000b"\n', "watch[0].directory", "without NUL"),
        (RUN + '[[run]]\nid = "r"\n', "run[1].id", "'r' again"),
        (NAME + '[[run]]\nid = "R"\n', "run[0].id", "a-z"),
        (NAME + "[[run]]\nid = 7\n", "run[0].id", "a string"),
        (RUN + 'variant = "a/b"\n', "run[0].variant", "a-z"),
        (RUN + 'coder = "context"\n', "run[0].coder", "'auto' or 'blind' or 'fast' or 'mid' or 'dense'"),
        (RUN + "keep_versions = -1\n", "run[0].keep_versions", "whole number from 0"),
        (RUN + "keep_for = 24\n", "run[0].keep_for", "a duration such as"),
        (NAME + '[run]\nid = "r"\n', "run", "sections written [[run]]"),
        ("run = [1]\n" + NAME, "run", "sections written [[run]]"),
        ('[[daemon]]\nname = "a"\n', "daemon", "one section [daemon]"),
        ('[daemon]\nname = "Border A"\n', "daemon.name", "a-z"),
        (NAME + "store = 1\n", "daemon.store", "a string"),
        (NAME + '[metrics]\nlisten = "7701"\n', "metrics.listen", "'127.0.0.1:7700'"),
        (NAME + "[metrics]\nlisten = 7701\n", "metrics.listen", "'127.0.0.1:7700'"),
        (NAME + '[metrics]\nlisten = "h:70000"\n', "metrics.listen", "'127.0.0.1:7700'"),
        (NAME + '[metrics]\nlisten = ":7701"\n', "metrics.listen", "'127.0.0.1:7700'"),
        (NAME + '[metrics]\nport = "h:1"\n', "metrics.port", "valid here: 'listen'"),
        (NAME + '[relay]\nlisten = "h:1"\n', "relay.token_file", "no such key"),
        (NAME + '[relay]\ntoken = "x"\n', "relay.token", "the nearest valid one is 'token_file'"),
        (NAME + '[relay]\nlisten = "h:1"\ncertificate = "a.pem"\n', "relay.key", "`certificate` and `key`, or neither"),
        (NAME + '[relay]\nlisten = "h:1"\nclient_ca = "a.pem"\n', "relay.client_ca", "a `certificate` beside it"),
        (NAME + '[[peer]]\nname = "b"\n', "peer[0].name", "a `client_ca` in [relay] or [local]"),
        (NAME + '[[peer]]\nname = "*.b"\n', "peer[0].name", "a DNS name"),
        (NAME + '[[token]]\nfile = "token"\nscope = "write"\n', "token[0].scope", "'read' or 'publish'"),
        (NAME + 2 * '[[token]]\nfile = "token"\n', "token[1].file", "again"),
        (NAME + '[local]\nlisten = "h:1"\n', "local.certificate", "no such key"),
        (UPSTREAM + 'ca = "a.pem"\n', "upstream[0].url", "a URL of https"),
        (NAME + '[[upstream]]\nurl = "http://b:1"\n', "upstream[0].token_file", "or a `certificate`"),
        (UPSTREAM.replace("http:", "https:") + 'ca = "no.pem"\n', "", "authority "),
        (UPSTREAM + "connections = 0\n", "upstream[0].connections", "from 1 to 64"),
        (UPSTREAM + "connections = -4\n", "upstream[0].connections", "from 1 to 64"),
        (UPSTREAM + "connections = 65\n", "upstream[0].connections", "from 1 to 64"),
        (UPSTREAM + "connections = true\n", "upstream[0].connections", "from 1 to 64"),
        (UPSTREAM + "connections = 4.0\n", "upstream[0].connections", "from 1 to 64"),
        (UPSTREAM + "runs = []\n", "upstream[0].runs", "a list of run ids"),
        (UPSTREAM + 'runs = "r"\n', "upstream[0].runs", "a list of run ids"),
        (UPSTREAM + 'runs = ["*", "r"]\n', "upstream[0].runs", "not both"),
        (UPSTREAM + 'runs = ["/"]\n', "upstream[0].runs", "a-z"),
        (UPSTREAM + UPSTREAM.removeprefix(NAME), "upstream[1].url", "again"),
        (UPSTREAM.replace("http:", "ftp:"), "upstream[0].url", "a URL such as"),
        (UPSTREAM.replace("http://b:1", "b:1"), "upstream[0].url", "a URL such as"),
        (UPSTREAM.replace("b:1", "b:99999"), "upstream[0].url", "a URL such as"),
        (UPSTREAM.replace("b:1", "b:1/?x=1"), "upstream[0].url", "a URL such as"),
        (UPSTREAM.replace("b:1", "[b"), "upstream[0].url", "found 'http://[b'"),
        (UPSTREAM.replace("http:", "htp:"), "upstream[0].url", "found 'htp://b:1'"),
        (UPSTREAM.replace("b:1", "b /"), "upstream[0].url", "a URL such as"),
        (BUCKET, "bucket[0]", "`publish` or `pull`, or both, found neither"),
        (BUCKET + 'pull = ["r"]\n' + BUCKET.removeprefix(NAME), "bucket[1].url", "again"),
        (BUCKET + 'pull = "r"\n', "bucket[0].pull", "a list of run ids"),
        (BUCKET + 'publish = ["r"]\n', "bucket[0].publish", "a run that a [[run]] declares"),
        (RUN + BUCKET.removeprefix(NAME) + 'publish = ["*"]\npull = ["r"]\n', "bucket[0].pull", "other runs than"),
        (RUN + BUCKET.removeprefix(NAME) + 'publish = ["r"]\npull = ["*"]\n', "bucket[0].pull", "other runs than"),
        (BUCKET.replace("s3:", "http:"), "bucket[0].url", "'s3://bucket/prefix'"),
        (BUCKET.replace("s3:", "memory:"), "bucket[0].url", "'s3://bucket/prefix'"),
        (BUCKET.replace("/p", "/../p"), "bucket[0].url", "'s3://bucket/prefix'"),
        (BUCKET.replace("s3://b/p", "file://"), "bucket[0].url", "'s3://bucket/prefix'"),
        (BUCKET + 'pull = ["r"]\ncredentials_file = "nowhere"\n', "", "expected a readable file"),
        (NAME + "[[pace]]\n", "pace[0].rate", "no such key"),
        (PACE.replace("1MiB", "1023KiB"), "pace[0].rate", "a size of at least 1MiB"),
        (PACE + 'run = "R"\n', "pace[0].run", "a-z"),
        (PACE + 'peer = "http://b:1"\n', "pace[0].peer", "the url of an [[upstream]] or [[bucket]]"),
        (UPSTREAM + PACE.removeprefix(NAME) + 'peer = "http://b:2"\n', "pace[0].peer", "is 'http://b:1'"),
        (PACE + 'since = "8:00"\n', "pace[0].since", "'08:30'"),
        (PACE + 'until = "24:00"\n', "pace[0].until", "'08:30'"),
        (FLEET + 'policy = "all"\n', "fleet[0].policy", "'each'"),
        (FLEET + 'verify = "never"\n', "fleet[0].verify", "'after_resume'"),
        (NAME + '[[fleet]]\nrun = "r"\n', "fleet[0].run", "a run that a [[run]] declares"),
        (NAME + '[backend]\nkind = "gpu"\n', "backend.kind", "'auto' or 'cupy'"),
        (NAME + "[backend]\ndevice = -1\n", "backend.device", "from 0 to"),
        (NAME + '[backend]\ndevice = "0"\n', "backend.device", "from 0 to"),
        (NAME + "[backend]\nmemory_limit = 2147483648\n", "backend.memory_limit", "'512MiB'"),
        (NAME + '[backend]\nmemory_limit = "2GB"\n', "backend.memory_limit", "'512MiB'"),
        (NAME + '[backend]\nmemory_limit = "2.5GiB"\n', "backend.memory_limit", "'512MiB'"),
        (NAME + '[backend]\nmemory_limit = "1GiB "\n', "backend.memory_limit", "'512MiB'"),
        (NAME + '[backend]\nmemory_limit = "1023MiB"\n', "backend.memory_limit", "at least 1GiB"),
        (NAME + "[backend]\nthreads = -1\n", "backend.threads", "from 0 to 256"),
        ("[daemon\n", "", "expected TOML in UTF-8"),
        ("a = 1\na = 2\n", "", "expected TOML in UTF-8"),
        (f"a = {'9' * 5000}\n", "", "expected TOML in UTF-8"),
        ("a = " + "[" * 5000, "", "expected TOML in UTF-8"),
    ],
)
def test_what_is_not_understood_is_refused_with_file_key_and_advice(
    home: Path, text: str, key: str, advice: str
) -> None:
    error = refusal(home, text)
    assert error.exit_code == 78
    assert str(home / "deltad.toml") in str(error)
    assert f": {key}: " in str(error) or not key
    assert advice in str(error)
    assert len(str(error)) < 600


@pytest.mark.parametrize(
    "url", [f"http://user:{SECRET}@b:1", f"http://user:{SECRET}@b:99999", f"user:{SECRET}@b", f"http://b/?t={SECRET}"]
)
def test_what_may_be_a_secret_in_a_url_is_refused_without_repeating_it(home: Path, url: str) -> None:
    error = refusal(home, UPSTREAM.replace("http://b:1", url))
    assert "upstream[0].url" in str(error)
    assert SECRET not in str(error)
    error = refusal(home, BUCKET.replace("s3://b/p", url.replace("http:", "s3:").replace(":99999", "")))
    assert "bucket[0].url" in str(error)
    assert SECRET not in str(error)


def test_relay_and_metrics_cannot_listen_on_one_address(home: Path) -> None:
    both = NAME + '[relay]\nlisten = "h:{0}"\ntoken_file = "token"\n[metrics]\nlisten = "h:{0}"\n'
    error = refusal(home, both.format(7700))
    assert "metrics.listen: expected another address than relay.listen, found 'h:7700'" in str(error)
    assert load(home, both.format(0)).metrics


@pytest.mark.parametrize(
    ("token", "mode", "said"),
    [
        (SECRET * 2, 0o600, ()),
        (SECRET * 2, 0o640, ()),
        (SECRET * 2, 0o644, ("everybody on this host may read it (mode 0644)",)),
        ("sesame", 0o600, ("a token of fewer than 16 characters can be guessed",)),
        ("sesame", 0o604, ("(mode 0604)", "openssl rand -hex 32")),
    ],
)
def test_a_token_that_others_may_read_or_guess_is_warned_of_once(
    home: Path, token: str, mode: int, said: tuple[str, ...]
) -> None:
    (home / "token").write_text(token)
    (home / "token").chmod(mode)
    found = warnings(load(home, UPSTREAM + '[relay]\nlisten = "h:1"\ntoken_file = "token"\n'))
    assert len(found) == len(said)
    for sentence, words in zip(found, said, strict=True):
        assert words in sentence
        assert str(home / "token") in sentence
        assert token not in sentence


def test_a_file_that_is_not_there_or_not_text_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(home / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(home)
    (home / "latin.toml").write_bytes(b'[daemon]\nname = "\xe9"\n')
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(home / "latin.toml")


@pytest.mark.parametrize(
    ("content", "mode", "found"),
    [
        (b"", 0o600, "an empty file"),
        (b" \n", 0o600, "an empty file"),
        (b"two words", 0o600, "printable ASCII"),
        (b"two\r\nlines", 0o600, "printable ASCII"),
        (b"t\xc3\xb6ken", 0o600, "printable ASCII"),
        (b"x" * 5000, 0o600, "at most 4096"),
        (b"token", 0o620, "mode 0620"),
        (b"token", 0o602, "mode 0602"),
    ],
)
def test_an_unfit_token_file_is_refused_before_the_daemon_starts(
    home: Path, content: bytes, mode: int, found: str
) -> None:
    (home / "token").write_bytes(content)
    (home / "token").chmod(mode)
    for text in (UPSTREAM, NAME + '[relay]\nlisten = "127.0.0.1:0"\ntoken_file = "token"\n'):
        error = refusal(home, text)
        assert found in str(error)
        assert str(home / "token") in str(error)
        assert str(home / "deltad.toml") in str(error)
        assert "x" * 100 not in str(error)


def test_a_token_path_that_is_no_file_is_refused_and_never_waited_for(home: Path) -> None:
    (home / "token").unlink()
    assert "No such file" in str(refusal(home, UPSTREAM))
    os.mkfifo(home / "token", 0o600)
    assert "a regular file" in str(refusal(home, UPSTREAM))
    (home / "token").unlink()
    (home / "token").mkdir(mode=0o700)
    assert "a regular file" in str(refusal(home, UPSTREAM))


@given(text=st.text(max_size=200))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_other_text_gives_a_config_error_and_nothing_else(home: Path, text: str) -> None:
    file = home / "deltad.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


def test_reading_a_configuration_loads_no_server() -> None:
    code = "import sys, deltad.config; print(*(set(sys.modules) & {'aiohttp', 'numpy', 'torch', 'numba'}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
