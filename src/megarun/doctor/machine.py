"""Devices, memory and folders of this machine, and the setting of torch's allocator."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaplan.terminal.versions import installed
from megaplan.units import format_bytes
from megarun.doctor.findings import Finding, ok, problem, warning
from megarun.launch.allocator import allocator_setting

DEVICES, MEMORY, FOLDERS = "devices", "memory", "folders"
LEAST_SHARED_BYTES = 1 << 30
"""NCCL's transports on one machine take some tens of MiB a pair of ranks from /dev/shm; containers often give 64 MiB in all."""
LEAST_FREE = 0.9
"""Free memory of an idle GPU, less its driver's: below this part another process has some."""
MEMINFO = Path("/proc/meminfo")


def devices() -> Iterator[Finding]:
    """CUDA devices with their capability and free memory, the driver, and the allocator's setting."""
    if installed("torch") is None:
        yield warning(DEVICES, "CUDA", "unknown without torch", "install torch")
        return
    import torch  # noqa: PLC0415  (it may not be there)

    if not torch.cuda.is_available():
        yield _none(torch)
    else:
        yield ok(DEVICES, "driver", _driver(torch), version=_driver(torch))
        for index in range(torch.cuda.device_count()):
            yield _device(torch, index)
    setting = allocator_setting()
    yield ok(DEVICES, "allocator", setting.text, expandable_segments=setting.expandable_segments, source=setting.source, raw=setting.raw)


def _none(torch: Any) -> Finding:
    if torch.version.cuda is None:
        advice = "plans, traces and `megarun compile` need none; to train on a GPU install a torch wheel for CUDA"
        return warning(DEVICES, "CUDA", "no GPU can be used: this torch was built without CUDA; megarun trains on the CPU", advice, count=0)
    advice = "plans, traces and `megarun compile` need no GPU; if the machine has one, check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    return warning(DEVICES, "CUDA", "no GPU is visible; megarun trains on the CPU", advice, count=0)


def _driver(torch: Any) -> str:
    """The CUDA version of the driver: 13000 is 13.0."""
    number = int(torch._C._cuda_getDriverVersion())
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def _device(torch: Any, index: int) -> Finding:
    found = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    text = f"{found.name}, sm_{found.major}{found.minor}, {format_bytes(free)} of {format_bytes(total)} free"
    values = {"name": found.name, "capability": [found.major, found.minor], "num_sms": found.multi_processor_count}
    values |= {"free_bytes": free, "total_bytes": total}
    name = f"GPU {index}"
    if free < LEAST_FREE * total:
        return warning(DEVICES, name, text, "another process has memory there: `nvidia-smi` names it", **values)
    return ok(DEVICES, name, text, **values)


def memory() -> Iterator[Finding]:
    """Memory of the host, and shared memory."""
    amounts = host_amounts()
    if amounts:
        free, total = amounts["MemAvailable"], amounts["MemTotal"]
        yield ok(MEMORY, "host", f"{format_bytes(free)} of {format_bytes(total)} available", free_bytes=free, total_bytes=total)
    shared = Path("/dev/shm")
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        text = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
        values = {"free_bytes": usage.free, "total_bytes": usage.total}
        if usage.free < LEAST_SHARED_BYTES:
            advice = "give a container more (`--shm-size 8g`): several ranks on a machine exchange through it"
            yield warning(MEMORY, "/dev/shm", text, advice, **values)
        else:
            yield ok(MEMORY, "/dev/shm", text, **values)
    yield ok(MEMORY, "CPUs", f"{len(os.sched_getaffinity(0))} that this process may use", count=len(os.sched_getaffinity(0)))


def host_amounts() -> dict[str, int]:
    """Amounts of host memory in bytes, by the names of /proc/meminfo; empty if the system does not provide them."""
    try:
        lines = MEMINFO.read_text(encoding="utf-8").splitlines()
        return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    except (OSError, ValueError, IndexError):
        return {}


def folders(out: Path | None) -> Iterator[Finding]:
    """The folders of a run, of compiled kernels and of temporary files."""
    if out is not None:
        yield _writable("out", out, problem, "give an --out that this user can write")
    if installed("triton") is not None:
        from megarun.kernels.cache import VARIABLE, cache_folder  # noqa: PLC0415  (needs triton)

        yield _writable("compiled kernels", cache_folder(), warning, f"set {VARIABLE} to a folder that can be written")
    yield _writable("temporary files", Path(tempfile.gettempdir()), problem, "set TMPDIR to a folder that can be written")


def _writable(name: str, folder: Path, failed: Any, advice: str) -> Finding:
    """True if a file can be made in the folder, or in the nearest above it that exists."""
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = shutil.disk_usage(nearest).free
    except OSError as error:
        return failed(FOLDERS, name, f"{folder} cannot be written: {error.strerror or error}", advice, path=str(folder))  # type: ignore[no-any-return]
    return ok(FOLDERS, name, f"{folder} can be written, {format_bytes(free)} free", path=str(folder), free_bytes=free)
