"""Versions of a run's software, and known hazards of its compilers."""

import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megakernels.libraries import LIBRARIES, installed_version
from megaplan import __version__
from megaplan.terminal.versions import commit, installed
from megarun.doctor.findings import Finding, ok, problem, warning

SECTION = "versions"
HAZARDS = "compilers"
INSTALL = 'pip install "megaplan[run]" with the constraints of the project'


def versions() -> Iterator[Finding]:
    """Versions of this project, Python, torch with the libraries of its build, and Triton."""
    found = commit()
    text = f"{__version__}{f' (commit {found})' if found else ', installed as a package'}"
    yield ok(SECTION, "megaplan, megarun", text, version=__version__, commit=found)
    yield ok(SECTION, "python", f"{platform.python_version()}, {platform.system()} {platform.machine()}", version=platform.python_version())
    for package in ("numpy", "pydantic"):
        number = installed(package)
        yield ok(SECTION, package, number, version=number) if number else problem(SECTION, package, "not installed", INSTALL)
    number = installed("torch")
    if number is None:
        yield problem(SECTION, "torch", "not installed", INSTALL)
        return
    import torch  # noqa: PLC0415  (it may not be there)

    cuda: Any = torch.version.cuda
    yield ok(
        SECTION, "torch", f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'built without CUDA'}", version=torch.__version__, cuda=cuda
    )
    yield _nccl(torch, cuda)


def _nccl(torch: Any, cuda: str | None) -> Finding:
    if not cuda:
        return ok(SECTION, "NCCL", "none in a torch without CUDA; processes connect by gloo", version=None)
    if not torch.distributed.is_nccl_available():
        return problem(SECTION, "NCCL", "this torch has none", "install a torch wheel for CUDA", version=None)
    number = ".".join(map(str, torch.cuda.nccl.version()))
    return ok(SECTION, "NCCL", number, version=number)


def compilers() -> Iterator[Finding]:
    """Triton and its assembler with their known hazards."""
    number = installed("triton")
    if number is None:
        yield warning(
            HAZARDS,
            "triton",
            "not installed: plans with host.kernels: triton do not run on a GPU",
            "pip install triton, in the version that this torch requires",
            version=None,
        )
        return
    for package, known in LIBRARIES.items():
        found = installed_version(package)
        text = f"{found}; plans whose host.libraries names it use {known.version}" if found else "not installed; it is optional"
        yield ok(HAZARDS, package, text, version=found)
    yield from _with_hazards("triton", number)
    path, assembler = ptxas()
    if assembler is None:
        yield warning(HAZARDS, "ptxas", f"{path or 'no assembler'} does not say its version", "set TRITON_PTXAS_PATH to one that runs")
    else:
        yield from _with_hazards("ptxas", assembler, path=path)


def _with_hazards(tool: str, number: str, **values: Any) -> Iterator[Finding]:
    """The tool, and for each hazard of its version a line that says how it is handled."""
    if installed("torch") is None:
        yield ok(HAZARDS, tool, number, version=number, **values)
        return
    from megakernels._common.hazards import hazards_of  # noqa: PLC0415  (the package needs torch)

    known = hazards_of(tool, number)
    text = f"{number}, {len(known) or 'no'} known hazard{'s' * (len(known) != 1)}"
    yield ok(HAZARDS, tool, text, version=number, **values)
    for each in known:
        named = f"hazard of {tool} {number}"
        yield ok(HAZARDS, named, f"{each.name}: {each.measure}", hazard=each.name, symptom=each.symptom, measure=each.measure)


def ptxas() -> tuple[str | None, str | None]:
    """The assembler that Triton starts for Hopper, and its version."""
    try:
        from triton import knobs  # noqa: PLC0415  (it may not be there)
        from triton.backends.nvidia import compiler  # noqa: PLC0415

        tool: Any = compiler.get_ptxas(90) if hasattr(compiler, "get_ptxas") else knobs.nvidia.ptxas
        path = str(tool.path)
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (ImportError, OSError, RuntimeError, TypeError, subprocess.TimeoutExpired):
        return None, None
    found = re.search(r"V([0-9.]+)", text) or re.search(r"release ([0-9.]+)", text)
    return str(Path(path)), found.group(1) if found else None
