"""The target of a plan's kernels: the device and the libraries that decide which kernel is launched."""

from typing import Any, NamedTuple

from megaplan.devices import Device

CAPABILITIES = {"ampere": (8, 0), "hopper": (9, 0), "blackwell": (10, 0)}
"""Compute capability by generation. Source: NVIDIA CUDA C++ Programming Guide, compute capabilities."""
CUDNN_VERSION = 90100
"""The least that torch's CUDA wheels need since 2.4. Source: pytorch, .github/scripts/generate_binary_build_matrix.py."""
WARP_SIZE = 32


class Target(NamedTuple):
    """A CUDA device, and the torch that runs there.

    Attributes:
        capability: Major and minor compute capability.
        num_sms: Streaming multiprocessors.
        cudnn_version: Version of cuDNN as torch gives it; None without cuDNN.
        has_flash: True if torch has its flash attention kernels.
        device_name: Name by which kernels find the launch options that were measured on the device.
    """

    capability: tuple[int, int]
    num_sms: int
    cudnn_version: int | None = CUDNN_VERSION
    has_flash: bool = True
    device_name: str = ""

    @classmethod
    def planned(cls, device: Device) -> "Target":
        """A device of the registry, with a torch that is built for it."""
        return cls(CAPABILITIES[device.generation], device.num_sms.value, device_name=device.name)

    @classmethod
    def present(cls, index: int) -> "Target":
        """The CUDA device of this process with this index, and this torch."""
        import torch  # noqa: PLC0415  (the planned target needs none)

        cudnn: Any = torch.backends.cudnn
        found = torch.cuda.get_device_properties(index)
        version = cudnn.version() if cudnn.is_available() and cudnn.enabled else None
        flash = torch.backends.cuda.is_flash_attention_available()
        return cls((found.major, found.minor), found.multi_processor_count, version, flash, found.name)

    @property
    def arch(self) -> int:
        """Triton's name of the capability: 90."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def name(self) -> str:
        """`sm_90`."""
        return f"sm_{self.arch}"
