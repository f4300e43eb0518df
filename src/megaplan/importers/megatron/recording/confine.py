"""Limits of a recorded script's processes, set between fork and exec: Landlock for files and programs, seccomp for calls, rlimits.

Sources: `include/uapi/linux/{landlock,seccomp,prctl}.h` and the tables of system calls of x86_64 and of the generic ABI.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable

MAX_FILE_BYTES = 2**24
MAX_ADDRESS_BYTES = 2**33
MAX_OPEN_FILES = 256
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASKS_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READS = 1 << 0, 1 << 1, 0b1100
_BITS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of access rights by version of Landlock; later versions have the same number as 5."""
_CAPBSET_DROP, _SET_SECCOMP, _NO_NEW_PRIVS, _FILTER = 24, 22, 38, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_REFUSE, _ALLOW = 0x00050001, 0x7FFF0000  # errno EPERM
_X32 = 0x40000000
# limits sockets, signals to other processes, truncation by name, the memory of other processes, and modes, owners and attributes, which
# Landlock does not cover
_CALLS = {
    "x86_64": (
        0xC000003E,
        (41, 62, 200, 234, 424, 76, 90, 91, 92, 93, 94, 260, 268, 452, 188, 189, 190, 197, 198, 199, 101, 310, 311, 425),
    ),
    "aarch64": (0xC00000B7, (198, 129, 130, 131, 424, 45, 52, 53, 54, 55, 452, 5, 6, 7, 14, 15, 16, 117, 270, 271, 425)),
}


def missing() -> tuple[str, ...]:
    """Protections that this system lacks; empty if a script can be confined."""
    lacks = [] if _landlock_version() > 0 else ["Landlock (Linux 5.13 or newer), which keeps writes and programs in the temporary folder"]
    if not sys.platform.startswith("linux") or platform.machine() not in _CALLS:
        lacks.append("a filter of system calls for this processor, which refuses sockets")
    return tuple(lacks)


def _landlock_version() -> int:
    if not sys.platform.startswith("linux"):
        return 0
    return int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, _ASKS_VERSION))


def limit(seconds: int) -> None:
    """Resource limits of the calling process and its children: processor time, sizes of files and of memory, open files.

    A process may use twice the limit in processor time, so that the wall-clock limit, which reports its reason, comes first.
    """
    wanted = {
        resource.RLIMIT_CPU: 2 * seconds,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_AS: MAX_ADDRESS_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in wanted.items():
        hard = resource.getrlimit(kind)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails without ending the process


def confine(writable: Iterable[str], executable: Iterable[str]) -> None:
    """Refuse the calling process and its children every write, program and call but the listed ones; it cannot be undone.

    Args:
        writable: Folders, and devices.
        executable: Files, and folders.

    Raises:
        OSError: The kernel refuses a limit.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):  # root has no capabilities left after exec
        libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    _checked(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    version = _landlock_version()
    handled = ((1 << _BITS_BY_VERSION.get(version, 16)) - 1) & ~_READS
    attributes = struct.pack("=Q", handled)
    rules = _checked(libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    for paths, rights in ((writable, handled & ~_EXECUTE), (executable, _EXECUTE)):
        for path in paths:
            _allow(libc, rules, path, rights)
    _checked(libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)
    program = _filter(*_CALLS[platform.machine()])
    held = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
    _checked(libc.prctl(_SET_SECCOMP, _FILTER, header, 0, 0))


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    is_folder = os.path.isdir(path)
    rule = struct.pack("=Qi", rights if is_folder else rights & (_EXECUTE | _WRITE_FILE), place)
    _checked(libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0))
    os.close(place)


def _filter(architecture: int, calls: Iterable[int]) -> bytes:
    """Classic BPF: another architecture's calls, x32's and the listed ones fail, every other is allowed."""
    refuse = (_RETURN, 0, 0, _REFUSE)
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), refuse, (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), refuse]
    for number in calls:
        steps += [(_EQUAL, 0, 1, number), refuse]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, (_RETURN, 0, 0, _ALLOW)])


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
