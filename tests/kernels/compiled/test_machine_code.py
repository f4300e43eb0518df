"""No kernel writes a register that a product in flight still reads, in the machine code of this Triton and its assembler.

`sm90/compile.py` looks at every configuration that it compiles; here are the kernels whose left operand is made in a loop of products.
"""

import importlib
from typing import Any

import pytest
import triton
from compile import compiled_for_sm90, overwritten_by
from overwritten import overwritten

from megakernels._common.hazards import hazards_of

pytestmark = pytest.mark.jobs

HAZARD = "register operand of a product in flight"
LIKELY = {
    "ssd": ("ssd chunk 64x128 bf16", "ssd edge, of B 64x128 bf16", "ssd edge, of C 64x128 bf16"),
    "m2rnn": ("m2rnn walk 64x16 bf16", "m2rnn gradient 64x16 bf16"),
    "gated_delta": ("gated_delta walk 128x128 bf16", "gated_delta walk_gradient 128x128 bf16"),
    "mamba3": ("mamba3 pair 64x128 rank 4, 32 angles, bf16, plain",),
}
LOOP = """
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;  /* 0x0 */
        /*0010*/                   {between} ;  /* 0x0 */
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;  /* 0x0 */
        /*0030*/                   {behind} ;  /* 0x0 */
        /*0040*/              @!P0 BRA 0x0 ;  /* 0x0 */
        /*0050*/                   EXIT ;  /* 0x0 */
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("operation", [name if name == "ssd" else pytest.param(name, marks=pytest.mark.slow) for name in LIKELY])
def test_operands_in_registers_stay_until_they_are_read(operation: str) -> None:
    configurations = importlib.import_module(operation).CONFIGURATIONS
    for name in LIKELY[operation]:
        assert overwritten_by(compiled_for_sm90(*configurations[name])) == [], name


def test_the_check_finds_what_this_triton_does_wrong() -> None:
    """The pipelined form of the kernel, in versions that have the hazard."""
    function, types, constants, options = importlib.import_module("ssd").CONFIGURATIONS["ssd edge, of B 64x128 bf16"]
    found = overwritten_by(compiled_for_sm90(function, types, constants, {**options, "num_stages": 2}))
    assert bool(found) == (HAZARD in [each.name for each in hazards_of("triton", triton.__version__)])


@pytest.mark.parametrize(
    ("between", "left", "behind", "count"),
    [
        ("NOP", "0x0", "LDS R4, [R3]", 0),
        ("LDS R4, [R3]", "0x0", "NOP", 1),
        ("LDS.128 R0, [R3]", "0x0", "NOP", 0),
        ("LDS.128 R1, [R3]", "0x0", "NOP", 1),
        ("LDSM.16.M88.4 R7, [R3]", "0x0", "NOP", 1),
        ("IADD3 R8, P0, R4, R5, RZ", "0x0", "NOP", 0),
        ("SHFL.BFLY PT, R7, R9, 0x1, 0x1f", "0x0", "NOP", 1),
        ("@P1 MOV R5, R9", "0x0", "NOP", 1),
        ("ISETP.GE.AND P0, PT, R5, R4, PT", "0x0", "NOP", 0),
        ("STS [R4], R5", "0x0", "NOP", 0),
        ("NOP", "0x1", "MOV R6, R9", 1),
    ],
)
def test_what_counts_as_overwritten(between: str, left: str, behind: str, count: int) -> None:
    """Before the wait it does, and behind one that leaves a group in flight."""
    assert len(overwritten(LOOP.format(between=between, left=left, behind=behind))) == count


def test_a_write_in_the_next_turn_is_found() -> None:
    text = LOOP.format(between="NOP", left="0x1", behind="NOP").replace("/*0000*/", "/*0000*/ MOV R4, R9 ;  /* 0x0 */\n        /*0008*/")
    assert len(overwritten(text)) == 1
