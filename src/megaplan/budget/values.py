"""The values of a budget: cells of a rank, its device, and the whole job."""

from typing import Any, NamedTuple

from megaplan.columns import Basis, Column, Phase
from megaplan.devices import Device
from megaplan.hosts.values import HostBytes
from megaplan.spec.host import device_of
from megaplan.spec.models import Spec

Cells = dict[Phase, dict[Column, int]]
ACTIVATIONS, COMMUNICATION, GRADIENTS = Column.ACTIVATIONS, Column.COMMUNICATION, Column.GRADIENTS
MATRIX_OPTIMIZER, OTHER_OPTIMIZER = Column.MATRIX_OPTIMIZER, Column.OTHER_OPTIMIZER
OVERHEAD, WORKSPACE = Column.OVERHEAD, Column.WORKSPACE
FEATURES, ROUTING = Column.FEATURE_ACTIVATIONS, Column.ROUTING
"""The columns of sums, by name: a lookup on the class costs Python 3.11 more than the sum."""
NO_BYTES: dict[Column, int] = dict.fromkeys(Column, 0)
"""Every column at 0, as a template."""


class ReserveItem(NamedTuple):
    """Device memory outside torch's allocator, with the number's source."""

    name: str
    bytes: int
    basis: Basis
    source: str


class DeviceBudget(NamedTuple):
    """The device's memory as torch reports it, and memory outside torch's allocator."""

    name: str
    capacity_bytes: int
    capacity_basis: Basis
    reserve: tuple[ReserveItem, ...]

    @property
    def reserve_bytes(self) -> int:
        """Sum of the reserve's items."""
        return sum(item.bytes for item in self.reserve)

    @property
    def usable_bytes(self) -> int:
        """Bytes that torch's allocator may take."""
        return self.capacity_bytes - self.reserve_bytes


OF_PEERS = "nccl"
"""The item of the reserve that only jobs with several ranks have: NCCL's communicators. It is not divided among the axes of the mesh
(R-41).
"""


def device_budget(device: Device, num_ranks: int) -> DeviceBudget:
    """Capacity and itemised reserve (R-45) of a device, as the data file states them; items of a spec apply to one rank too.

    Args:
        device: The device, with the spec's figures.
        num_ranks: Number of ranks of the job.
    """
    reserve = [
        ReserveItem(name, figure.value, figure.basis, figure.source)
        for name, figure in device.reserve
        if name != OF_PEERS or num_ranks > 1 or figure.basis is Basis.GIVEN
    ]
    return DeviceBudget(device.name, device.capacity.value, device.capacity.basis, tuple(reserve))


def spec_device(spec: Spec, num_ranks: int) -> DeviceBudget:
    """The device of a spec, or of one of its pools, with the memory of the host's libraries; `num_ranks` are all ranks of the job."""
    device, items = device_budget(device_of(spec.device), num_ranks), spec.host.kind.reserve
    return device if items is None else device._replace(reserve=(*device.reserve, *items(spec)))


def checked(cells: Cells) -> Cells:
    """Checks that no cell is negative.

    Raises:
        RuntimeError: A cell is negative: bytes were subtracted from the wrong column, which is a defect.
    """
    init, first_step, first_update, step, update = cells.values()
    if min([*init.values(), *first_step.values(), *first_update.values(), *step.values(), *update.values()]) < 0:
        wrong = [f"{phase}.{column.key} = {size:,}" for phase, columns in cells.items() for column, size in columns.items() if size < 0]
        raise RuntimeError(f"{', '.join(wrong)}; a budget holds no negative bytes")
    return cells


NOTHING_OFFLOADED = HostBytes(0, 0)


class RankBudget(NamedTuple):
    """The budget that several ranks share.

    Attributes:
        ranks: All ranks with these cells, ascending.
        coordinate: Coordinate of the first of them, by mesh axis.
        parameters: Parameters of the first of them after TP and EP, before state sharding, shared copies included.
        cells: Bytes by phase and column; every phase and column is present.
        peak_places: Description of the place of each phase's peak.
        usable_bytes: Usable bytes of the device.
        host: Bytes in the host's memory that each of them offloads.
    """

    ranks: tuple[int, ...]
    coordinate: dict[str, int]
    parameters: int
    cells: Cells
    peak_places: dict[Phase, str]
    usable_bytes: int
    host: HostBytes = NOTHING_OFFLOADED

    @property
    def phases(self) -> dict[Phase, int]:
        """Bytes of each phase at its own peak: the sum of its cells."""
        return {phase: sum(cells.values()) for phase, cells in self.cells.items()}

    @property
    def peak_phase(self) -> Phase:
        """The phase with the largest sum; among equal phases the earliest, in which a run that does not fit would fail."""
        phases = self.phases
        return max(Phase, key=lambda phase: phases[phase])

    @property
    def peak_bytes(self) -> int:
        """The largest phase."""
        return max([sum(cells.values()) for cells in self.cells.values()])

    @property
    def columns(self) -> dict[Column, int]:
        """The cells of the peak phase; they sum to the peak."""
        return self.cells[self.peak_phase]

    @property
    def allocated_bytes(self) -> int:
        """Most bytes that torch's allocator has allocated at a time: the largest phase without allocator overhead."""
        return max([sum(cells.values()) - cells[Column.OVERHEAD] for cells in self.cells.values()])

    @property
    def headroom_bytes(self) -> int:
        """Usable bytes less the peak; negative if the rank does not fit."""
        return self.usable_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        """True if the peak is within usable memory."""
        return self.headroom_bytes >= 0


def merged_ranks(ranks: list[RankBudget]) -> tuple[RankBudget, ...]:
    """Budgets, least headroom first (on one device: largest peak first); equal budgets of different pipeline ranks are merged."""
    by_room: dict[tuple[int, int], list[RankBudget]] = {}  # only equal peaks can have equal cells
    for rank in sorted(ranks, key=lambda rank: rank.ranks):
        equal = by_room.setdefault((rank.headroom_bytes, rank.usable_bytes), [])
        for index, twin in enumerate(equal):
            if twin.cells == rank.cells and twin.parameters == rank.parameters and twin.host == rank.host:
                equal[index] = twin._replace(ranks=tuple(sorted((*twin.ranks, *rank.ranks))))
                break
        else:
            equal.append(rank)
    return tuple(rank for room in sorted(by_room) for rank in by_room[room])


class PoolBudget(NamedTuple):
    """The half-open range of ranks whose stages are on one type of device, and that device."""

    ranks: tuple[int, int]
    device: DeviceBudget


class StageBudget(NamedTuple):
    """One slot: its place, its layers, and the parameters of its full tensors, shared copies included."""

    stage: int
    pp_rank: int
    chunk: int
    start: int
    stop: int
    parameters: int


class KeptBytes(NamedTuple):
    """Bytes that one microbatch keeps on a slot, all columns, the stage's output included.

    Attributes:
        full: Bytes from the start of F to the end of B, or of I if the backward is split.
        pending: Bytes from the end of I to the end of W; 0 if no backward is split.
    """

    full: int
    pending: int = 0


class Budget(NamedTuple):
    """Every rank of a job.

    Attributes:
        device: Device of every rank; with pools that of the first stages.
        stages: Slots in model order.
        ranks: Distinct budgets, least headroom first; together they name every rank once.
        parameters: Unique parameters of the model.
        active_parameters: Parameters that one token uses.
        pools: Ranks on each type of device, in the order of the pipeline; empty if all are on `device`.
    """

    device: DeviceBudget
    stages: tuple[StageBudget, ...]
    ranks: tuple[RankBudget, ...]
    parameters: int
    active_parameters: int
    pools: tuple[PoolBudget, ...] = ()

    def device_of_rank(self, rank: int) -> DeviceBudget:
        """The device of one rank."""
        return next((pool.device for pool in self.pools if pool.ranks[0] <= rank < pool.ranks[1]), self.device)

    @property
    def fits(self) -> bool:
        """True if every rank fits."""
        return all(rank.fits for rank in self.ranks)

    @property
    def worst(self) -> RankBudget:
        """The ranks with the least headroom."""
        return self.ranks[0]

    def of_rank(self, rank: int) -> RankBudget:
        """The budget of one rank.

        Raises:
            KeyError: The job has no such rank.
        """
        for budget in self.ranks:
            if rank in budget.ranks:
                return budget
        raise KeyError(rank)


class ServingStage(NamedTuple):
    """A rank of one stage of the model that is served; all ranks of a stage are equal.

    Attributes:
        first: First layer.
        end: Layer after the last one.
        kv_cache_bytes: Keys and values (or latents) of its attention layers.
        recurrent_state_bytes: State pool of its recurrent layers.
        parameters_bytes: Part of the parameters in the compute dtype.
    """

    first: int
    end: int
    kv_cache_bytes: int
    recurrent_state_bytes: int
    parameters_bytes: int

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.kv_cache_bytes + self.recurrent_state_bytes + self.parameters_bytes


class ServingBudget(NamedTuple):
    """Memory of the served model, on one device and by rank; never added to training (R-48).

    Attributes:
        kv_cache_bytes: Keys and values (or latents) of the attention layers.
        recurrent_state_bytes: State pool of M and R layers.
        parameters_bytes: The model's parameters in the compute dtype.
        usable_bytes: Usable bytes of the device.
        blocks: Cache blocks per sequence, 0 for a contiguous cache.
        degrees: Ranks of a tensor group, stages, and ranks of the experts.
        stages: One rank of each stage; empty where the degrees are 1.
    """

    kv_cache_bytes: int
    recurrent_state_bytes: int
    parameters_bytes: int
    usable_bytes: int
    blocks: int = 0
    degrees: tuple[int, int, int] = (1, 1, 1)
    stages: tuple[ServingStage, ...] = ()

    @property
    def total(self) -> int:
        """Sum of the three."""
        return self.kv_cache_bytes + self.recurrent_state_bytes + self.parameters_bytes

    @property
    def fits(self) -> bool:
        """True if the total is within usable memory."""
        return self.total <= self.usable_bytes

    @property
    def ranks_fit(self) -> bool:
        """True if every rank is within usable memory."""
        return all(stage.total <= self.usable_bytes for stage in self.stages)

    def as_document(self) -> dict[str, Any]:
        """The JSON object; `ranks` has one rank of each stage, and is absent if one rank holds the whole model."""
        whole = {
            "kv_cache_bytes": self.kv_cache_bytes,
            "recurrent_state_bytes": self.recurrent_state_bytes,
            "parameters_bytes": self.parameters_bytes,
            "total": self.total,
            "fits": self.fits,
        }
        if not self.stages:
            return whole
        ranks = [
            {"pp_rank": rank, **stage._asdict(), "total": stage.total, "fits": stage.total <= self.usable_bytes}
            for rank, stage in enumerate(self.stages)
        ]
        return {**whole, **dict(zip(("tp", "pp", "ep"), self.degrees, strict=True)), "ranks": ranks}
