"""Serves a folder of this machine at another place through FUSE, as a network file system does; its own program.

python fuse_server.py FOLDER PLACE

libfuse's defaults stay: a file has the inode number that the server gives it when it is looked up, which is another one after the kernel
has forgotten it, and a file that is removed while it is open is renamed to `.fuse_hidden…` until it is closed.
It needs /dev/fuse, the right to mount, and the package `mfusepy`, which reads the path of libfuse from FUSE_LIBRARY_PATH.
"""
# ruff: noqa: ARG002  (libfuse gives a file's path and its handle)

import errno
import os
import sys
from typing import Any

import mfusepy  # type: ignore[import-not-found]

STAT = ("st_gid", "st_mode", "st_nlink", "st_size", "st_uid", "st_blocks", "st_ino")
STATFS = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize", "f_namemax")


class Loopback(mfusepy.Operations):  # type: ignore[misc]
    """Every operation is the operating system's own on the folder."""

    use_ns = True

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.fstat(fh) if fh is not None else os.lstat(self._folder + path)
        times = {f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in "acm"}
        return {name: getattr(found, name) for name in STAT} | times

    def readdir(self, path: str, fh: int) -> Any:
        return [".", "..", *os.listdir(self._folder + path)]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._folder + path)
        return {name: getattr(found, name) for name in STATFS}

    def open(self, path: str, flags: int) -> int:
        return os.open(self._folder + path, flags & ~os.O_APPEND)

    def create(self, path: str, mode: int, fi: int = 0) -> int:
        return os.open(self._folder + path, fi & ~os.O_APPEND | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._folder + path if fh is None else fh, length)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def access(self, path: str, amode: int) -> None:
        if not os.access(self._folder + path, amode):
            raise mfusepy.FuseOSError(errno.EACCES)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._folder + path, mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.chown(self._folder + path, uid, gid)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._folder + path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._folder + path)

    def unlink(self, path: str) -> None:
        os.unlink(self._folder + path)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._folder + old, self._folder + new)

    def link(self, target: str, source: str) -> None:
        os.link(self._folder + source, self._folder + target)

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, self._folder + target)

    def readlink(self, path: str) -> str:
        return os.readlink(self._folder + path)

    def mknod(self, path: str, mode: int, dev: int) -> None:
        os.mknod(self._folder + path, mode, dev)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(self._folder + path, ns=times)


if __name__ == "__main__":
    options = {"foreground": True, "nothreads": False, "default_permissions": True, "allow_other": True, "big_writes": True}
    mfusepy.FUSE(Loopback(sys.argv[1]), sys.argv[2], **options)
