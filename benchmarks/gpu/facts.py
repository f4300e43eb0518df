"""Facts of a device: versions, capacity, bytes of its context, and the two rates that others are compared with."""

import os
import platform
import subprocess
from typing import Any

import torch
from gpu.checks import Emit
from gpu.times import limits


def find_facts(emit: Emit, device: str, *, small: bool = False) -> None:
    """A line of versions and bytes, then one of rates."""
    before = driver()
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(), **before}
    if device.startswith("cuda"):
        import triton  # noqa: PLC0415  (not there without a GPU)

        torch.cuda.init()
        torch.empty(1, device=device)
        free, total = torch.cuda.mem_get_info()
        found |= {
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
            "triton": triton.__version__,
            "capacity_bytes": total,
            "outside_allocator_bytes": total - free - torch.cuda.memory_reserved(),
        }
    else:
        found["device"] = "cpu"
    emit(found)
    emit(limits(device, small=small))
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info()
        emit({"outside_allocator_after_products_bytes": total - free - torch.cuda.memory_reserved()})


def driver() -> dict[str, Any]:
    """The driver, and what the device holds before this process uses it: others' bytes are in every device number."""
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        version, total, used = (part.strip() for part in text.splitlines()[0].split(","))
        return {"driver": version, "smi_total_mib": int(total), "smi_used_before_mib": int(used)}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {"driver": None}
