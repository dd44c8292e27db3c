"""A deployment as a client meets it: a real daemon over TLS, a real replica, and a bucket behind S3."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import boto3

from deltad.checkpoint import CheckpointWriter, open_checkpoint
from deltad.client.messages import RegisterRequest, ReplicaReport
from tests.interop.peers import run_peer
from tests.kit.authority import Authority
from tests.kit.buckets import NAME, S3Server
from tests.kit.daemons import TOKEN, Daemon, free_port
from tests.kit.weights import ArrayWeights

HERE = Path(__file__).parent
WAIT = 60.0
DEPLOYMENT = "3c6f4a52-8a7e-4f5e-9d0b-2f9c5b1f7a10"


class Site:
    """Deployment `DEPLOYMENT` of run `policy`, in the bucket `policies` below `prefix`."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home = home
        self.model = model
        self.prefix = home.name  # what servers of one process hold is one
        self.s3 = S3Server()
        self.s3.__enter__()
        credentials = home / "credentials"
        credentials.touch(0o600)
        credentials.write_text("".join(f"{name}={value}\n" for name, value in self.s3.settings().items()))
        self.authority = Authority(home / "authority")
        issued = self.authority.issue("localhost")
        self.port = free_port()
        self.daemon = Daemon(
            home / "d",
            "d",
            f"""
[[run]]
id = "policy"
[[run]]
id = "other"
[local]
listen = "127.0.0.1:{self.port}"
certificate = "{issued.certificate}"
key = "{issued.key}"
[[token]]
file = "token"
scope = ["read", "publish"]
runs = ["policy"]
name = "trainer"
[[hot_load]]
deployment = "{DEPLOYMENT}"
run = "policy"
url = "s3://{NAME}/{self.prefix}"
account = "lab"
credentials_file = "{credentials}"
""",
        ).start()
        self.replicas: dict[str, subprocess.Popen[bytes]] = {}
        self.state = _weights(model)

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def environment(self) -> dict[str, str]:
        """What a client's process is told: whom to trust, who it is, and where the bucket is."""
        certificate = str(self.authority.certificate)
        return {
            **self.s3.settings(),
            "SSL_CERT_FILE": certificate,
            "REQUESTS_CA_BUNDLE": certificate,
            "COREWEAVE_API_TOKEN": TOKEN,
            "CW_S3_ENDPOINT": self.s3.endpoint,
            "FIREWORKS_API_KEY": TOKEN,
        }

    def start_replica(self, name: str = "r1") -> None:
        command = [sys.executable, "-m", "rollout_plugin", "--socket", str(self.daemon.home / "deltad.sock")]
        with (self.home / f"{name}.log").open("wb") as log:
            self.replicas[name] = subprocess.Popen(
                [*command, "--run", "policy", "--name", name], stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def register(self, name: str) -> None:
        """A replica that is known and serves nothing."""
        self.daemon.client.register_replica(RegisterRequest(name, "policy", "bf16", boot=name))

    def next_state(self, name: str) -> Path:
        """A full checkpoint with other weights than the last."""
        self.state = self.state.changed(0.01, seed=len(list(self.home.iterdir())))
        directory = self.home / name
        with open_checkpoint(self.model) as before:
            layout = before.layout
            with CheckpointWriter(directory, layout) as writer:
                for i, spec in enumerate(layout.tensors):
                    if spec.lanes and not spec.alias_of:
                        writer.lanes(i, 0, spec.lanes)[:] = self.state.arrays[i]
                for file in layout.files:
                    writer.write_file(file.name, before.file_bytes(file.name))
                writer.finish()
        return directory

    def delta(self, base: Path, new: Path, version: str, base_version: str) -> Path:
        """A delta that cwtrain made of two checkpoints."""
        out = self.home / f"delta-{version}"
        run_peer(HERE / "cwtrain_deltas.py", "write", base, new, out, version, base_version)
        return out

    def upload(self, directory: Path, identity: str) -> None:
        """Put a snapshot into the deployment's bucket, its index last."""
        settings = self.s3.settings()
        client = boto3.client(
            "s3",
            endpoint_url=settings["AWS_ENDPOINT_URL"],
            region_name=settings["AWS_REGION"],
            aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
        )
        for path in sorted(directory.iterdir(), key=lambda path: path.name.endswith(".index.json")):
            client.upload_file(str(path), NAME, f"{self.prefix}/{identity}/{path.name}")
        client.close()

    def fireworks(self, *steps: tuple[str, Mapping[str, Any]]) -> list[Any]:
        """What steps through the SDK of Fireworks gave."""
        return self._drive("fireworks_steps.py", steps)

    def cwtrain(self, *steps: tuple[str, Mapping[str, Any]]) -> list[Any]:
        """What steps through cwtrain gave."""
        return self._drive("cwtrain_steps.py", steps)

    def _drive(self, script: str, steps: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
        said = run_peer(
            HERE / script,
            self.url,
            DEPLOYMENT,
            env=self.environment(),
            stdin=json.dumps([[verb, dict(words)] for verb, words in steps], default=str),
        )
        found: list[Any] = json.loads(said)
        return found

    def report(self, right: Callable[[ReplicaReport], bool], name: str = "r1") -> ReplicaReport:
        """What a replica last said, once it is `right`."""
        deadline = time.monotonic() + WAIT
        while True:
            run = self.daemon.client.status().region.runs["policy"]
            for found in run.replicas:
                if found.replica == name and right(found):
                    return found
            assert time.monotonic() < deadline, (run.replicas, (self.home / f"{name}.log").read_text()[-2000:])
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self.replicas.values():
            process.kill()
            process.wait()
        self.daemon.stop()
        self.s3.__exit__(None, None, None)


def _weights(directory: Path) -> ArrayWeights:
    with open_checkpoint(directory) as checkpoint:
        return ArrayWeights(
            [checkpoint.lanes(i, 0, spec.lanes).copy() for i, spec in enumerate(checkpoint.layout.tensors)]
        )


def copy_of(directory: Path, name: str) -> Path:
    there = directory.with_name(name)
    shutil.copytree(directory, there)
    return there
