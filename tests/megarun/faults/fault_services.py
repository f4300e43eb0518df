"""Other storages on this machine: moto's S3 server and a folder behind FUSE, in the environment that scripts/storage_env.sh makes."""

import errno
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fault_launch import START_LIMIT_SECONDS, free_port

SERVER = Path(__file__).with_name("fuse_server.py")
LIBRARY = "fuse_python.libs/libfuse*.so*"
"""libfuse of the package fuse-python, under its folder of packages."""
BUCKET = "runs"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_server() -> Iterator[str]:
    """Name of a bucket of an S3 server, whose address and keys are in the environment of this process.

    Raises:
        AssertionError: The server does not start.
    """
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + START_LIMIT_SECONDS
            while not _listens(port):
                assert server.poll() is None, "moto's server has ended"
                assert time.monotonic() < end, "moto's server does not listen"
                time.sleep(0.05)
            os.environ.update({**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
            import boto3  # type: ignore[import-not-found]  # noqa: PLC0415  (of that environment)

            boto3.client("s3").create_bucket(Bucket=BUCKET)
            yield BUCKET
        finally:
            server.kill()


@contextmanager
def fuse_folder(folder: Path) -> Iterator[Path]:
    """A folder that FUSE serves from another one.

    Raises:
        OSError: This machine or environment has no FUSE; the text is the server's.
    """
    served, place = folder / "served", folder / "fuse"
    for each in (served, place):
        each.mkdir()
    library = [str(path) for path in Path(sysconfig.get_path("purelib")).glob(LIBRARY)]
    variables = {**os.environ, **({"FUSE_LIBRARY_PATH": library[0]} if library else {})}
    with subprocess.Popen([sys.executable, SERVER, served, place], stderr=subprocess.PIPE, text=True, env=variables) as server:
        end = time.monotonic() + START_LIMIT_SECONDS
        while not place.is_mount():
            if server.poll() is not None or time.monotonic() > end:
                server.kill()
                raise OSError(errno.ENODEV, f"no FUSE: {server.communicate()[1].strip()[-300:]}", str(place))
            time.sleep(0.02)
        try:
            yield place
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)
            server.kill()  # it ends by itself once nothing is open there


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
