"""Mamba-2's scan beside transformers, Mamba-3's beside mamba-ssm's own kernels. Nobody else publishes the M²RNN recurrence on the index."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from upstream_checks import compare, normal, note, rms_ratio, run

pytest.importorskip("transformers")
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from megakernels import mamba3, ssd


@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.1, 1.0)])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 16), (37, 16), (70, 64)])
def test_mamba2(length: int, chunk_size: int, limits: tuple[float, float]) -> None:
    inputs = {"x": normal(0, 2, length, 4, 5), "dt": normal(1, 2, length, 4), "A_log": normal(2, 4).abs()}
    inputs |= {"B": normal(3, 2, length, 2, 7), "C": normal(4, 2, length, 2, 7), "D": normal(5, 4), "dt_bias": normal(6, 4)}

    def theirs(x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        found = mamba2_chunk_scan(x, dt, -A_log.exp(), B, C, chunk_size, D, dt_bias=dt_bias, dt_softplus=True, dt_limit=limits)
        return found[0] if isinstance(found, tuple) else found

    compare(
        f"ssd {'limited' if limits[0] else ''}",
        "transformers NemotronH mamba2_chunk_scan",
        lambda **given: ssd(**given, chunk_size=chunk_size, dt_limits=limits),
        theirs,
        inputs,
    )


HEADS, GROUPS, WIDTH, STATE, ANGLES = 2, 1, 16, 16, 4
LENGTH = 19


def inputs_of(rank: int) -> dict[str, Tensor]:
    """Inputs of `mamba3`, one sequence."""
    rows, groups = (1, LENGTH), (rank, GROUPS, STATE)
    made = {
        "x": normal(0, *rows, HEADS, WIDTH),
        "z": normal(1, *rows, HEADS, WIDTH),
        "B": normal(2, *rows, *groups),
        "C": normal(3, *rows, *groups),
    }
    made |= {name: normal(4 + index, *rows, HEADS) for index, name in enumerate(("dt", "A", "trapezoid"))}
    made |= {"angles": normal(8, *rows, ANGLES), "B_bias": normal(9, HEADS, rank, STATE), "C_bias": normal(10, HEADS, rank, STATE)}
    made |= {"D": normal(11, HEADS), "dt_bias": normal(12, HEADS)}
    return made | (
        {name: normal(13 + index, HEADS, rank, WIDTH) for index, name in enumerate(("mimo_x", "mimo_z", "mimo_o"))} if rank > 1 else {}
    )


class Published(torch.autograd.Function):
    """mamba-ssm's scan of several operand sets, gradients included, from one process that interprets it."""

    @staticmethod
    def forward(ctx, folder: Path, names: tuple[str, ...], count: int, *tensors: Tensor):
        sets = [dict(zip(names, tensors[index * len(names) :], strict=False)) for index in range(count)]
        ctx.sets, ctx.folder, ctx.names = [{name: each.detach().clone() for name, each in one.items()} for one in sets], folder, names
        return tuple(each for each, _ in interpreted(folder, [(one, None) for one in ctx.sets]))

    @staticmethod
    def backward(ctx, *seeds: Tensor):
        found = interpreted(ctx.folder, list(zip(ctx.sets, [seed.contiguous() for seed in seeds], strict=True)))
        return None, None, None, *(gradients[name] for _, gradients in found for name in ctx.names)


def interpreted(folder: Path, cases: list[tuple[dict[str, Tensor], Tensor | None]]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    torch.save(cases, folder / "from.pt")
    worker = Path(__file__).parent / "siso_scan.py"
    done = subprocess.run([sys.executable, "-O", worker, folder / "from.pt", folder / "to.pt"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[tuple[Tensor, dict[str, Tensor]]] = torch.load(folder / "to.pt")
    return found


def published(folder: Path, rate_of: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Mamba-3 around mamba-ssm's scan, as `mamba_ssm/modules/mamba3.py` prepares its operands.

    Its kernels for several ranks need a GPU; but rank r reads what every rank s wrote, so a scan of queries r, keys and values s for each
    pair adds up to them. Such heads turn dims i and i + S / 2, which are taken side by side for the scan of one rank.
    """

    def call(x, z, B, C, dt, A, trapezoid, angles, B_bias, C_bias, D, dt_bias, mimo_x=None, mimo_z=None, mimo_o=None):
        rank = B.shape[2]
        step = functional.softplus(dt + dt_bias)
        shared = {
            "ADT": (-rate_of(A).clamp(min=1e-4) * step).mT.contiguous(),
            "DT": step.mT.contiguous(),
            "Trap": trapezoid.mT.contiguous(),
        }
        shared["Angles"] = angles.unsqueeze(2).expand(-1, -1, HEADS, -1).contiguous()
        if mimo_x is None:
            mimo_x = mimo_z = mimo_o = torch.ones(HEADS, 1, WIDTH)
        order = torch.arange(STATE) if rank == 1 else torch.arange(STATE).view(2, -1).T.flatten()
        sets = [
            {
                **shared,
                "Q": C[:, :, r, :, order].contiguous(),
                "K": B[:, :, s, :, order].contiguous(),
                "V": (x * mimo_x[:, s]).contiguous(),
                "Q_bias": C_bias[:, r, order].contiguous(),
                "K_bias": B_bias[:, s, order].contiguous(),
            }
            for r in range(rank)
            for s in range(rank)
        ]
        names = tuple(sets[0])
        scans = Published.apply(folder, names, len(sets), *(one[name] for one in sets for name in names))
        y = torch.zeros_like(x)
        for r in range(rank):
            read = sum(scans[r * rank : (r + 1) * rank]) + D[:, None] * x * mimo_x[:, r]
            y = y + mimo_o[:, r] * read * functional.silu(z * mimo_z[:, r])
        return y

    return call


def heavy_tail(x: Tensor) -> Tensor:
    return x.clamp(min=0) + 1 / (1 - x.clamp(max=0))


@pytest.mark.parametrize(("rank", "rate"), [(1, "softplus"), (2, "heavy_tail")])
def test_mamba3(rank: int, rate: str, tmp_path: Path) -> None:
    pytest.importorskip("einops")
    absent = {} if rank > 1 else dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"))
    inputs = inputs_of(rank)
    ours = run(lambda **given: mamba3(**given, **absent, chunk_size=7, save_every=14, heavy_tail=rate == "heavy_tail"), inputs, ())
    theirs = run(published(tmp_path, functional.softplus if rate == "softplus" else heavy_tail), inputs, ())
    name = f"mamba3 {'mimo, rank 2' if rank > 1 else 'siso'} {rate}"
    note(name, "mamba-ssm mamba3_siso_combined, interpreted", {key: rms_ratio(ours[key], theirs[key]) for key in theirs})


@pytest.mark.parametrize("pairwise", [True, False])
def test_which_dims_an_angle_turns(pairwise: bool) -> None:
    """One position: its query and key are turned alike, so the score is plain; two positions show the turn."""
    reference = pytest.importorskip("upstream_mamba").apply_rotary_qk_inference_reference
    rank = 1 if pairwise else 2
    given = inputs_of(rank)
    from megakernels.ops.mamba3.chunk import Mamba3Inputs, make_chunk, make_steps  # noqa: PLC0415

    mimo = [given.get(name) for name in ("mimo_x", "mimo_z", "mimo_o")]
    tensors = [given[name] for name in ("x", "z", "B", "C", "dt", "A", "trapezoid", "angles", "B_bias", "C_bias", "D", "dt_bias")]
    scan = Mamba3Inputs(*tensors, *mimo, None, LENGTH, LENGTH, False)
    chunk = make_chunk(scan, make_steps(scan, torch.zeros(1, HEADS)), slice(0, LENGTH), torch.zeros(1, HEADS, ANGLES))
    step = functional.softplus(given["dt"] + given["dt_bias"])
    state = torch.zeros(1, HEADS, ANGLES)
    ratios = {}
    for t in range(LENGTH):
        rows = [given[name][:, t].expand(-1, -1, HEADS, -1) for name in ("C", "B")]
        biases = [given[name].transpose(0, 1) for name in ("C_bias", "B_bias")]
        projected = given["angles"][:, t, None].expand(-1, HEADS, -1)
        q, k, state = reference(*rows, state, projected, step[:, t], *biases, rotate_pairwise=pairwise)
        for name, found, expected in (("queries", chunk.queries, q), ("keys", chunk.keys, k)):
            here = found.unflatten(2, (LENGTH, rank))[:, :, t]
            ratios[f"{name} {t}"] = rms_ratio(here, expected.transpose(1, 2))
    note(f"mamba3 rotation {'siso' if pairwise else 'mimo'}", "mamba-ssm apply_rotary_qk_inference_reference", ratios)
