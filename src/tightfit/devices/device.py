"""A GPU as numbers: capacity, bandwidths, FLOP/s, and the memory of a process on it before its first tensor.

A `Device` is plain frozen data. The catalogue reads them from TOML files that name their sources; simulation, cost model, planner and virtual GPU
are handed a `Device` and know nothing else about the hardware.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

Vendor = Literal["nvidia", "amd"]
Kind = Literal["desktop", "laptop", "workstation", "server", "module"]
DType = Literal["float64", "float32", "tf32", "float16", "bfloat16", "float8", "int8"]

VENDORS: tuple[str, ...] = get_args(Vendor)
KINDS: tuple[str, ...] = get_args(Kind)
DTYPES: tuple[str, ...] = get_args(DType)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The link between GPU and host. `bytes_per_second` is its limit in one direction, before protocol overhead."""

    kind: Literal["pcie", "nvlink-c2c", "shared"]
    generation: int
    num_lanes: int
    bytes_per_second: float

    def __str__(self) -> str:
        if self.kind == "pcie":
            return f"PCIe {self.generation} x{self.num_lanes}"
        return "NVLink-C2C" if self.kind == "nvlink-c2c" else "shared memory"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Device memory that a process holds besides its tensors: the driver's context with cuBLAS and cuDNN loaded.

    `low_bytes` to `high_bytes` is the range over drivers and libraries; `is_measured`: the three come from readings on such a GPU, and
    otherwise from the model in `tightfit.devices.context`.
    """

    num_bytes: int
    low_bytes: int
    high_bytes: int
    is_measured: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU.

    `capacity_bytes` is the total that the driver lets a process have (`cudaMemGetInfo`, torch's `total_memory`), which is less than the
    `nominal_bytes` it is sold with. `flops` are dense peaks at the boost clock, multiply-add counted as two, on tensor cores where the type
    has them and with float32 accumulation where that is slower; a type that the GPU lacks is absent. Register file and shared
    memory are per multiprocessor. For AMD a multiprocessor is a compute unit and `compute_capability` what torch reports.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: Vendor
    kind: Kind
    architecture: str
    isa: str
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    max_threads_per_multiprocessor: int
    max_clock_hertz: float
    nominal_bytes: int
    capacity_bytes: int
    register_file_bytes: int
    shared_memory_bytes: int
    l2_bytes: int
    l2_bytes_per_second: float | None
    dram: str
    dram_bytes_per_second: float
    # Left out of the hash, as dicts have none; the name tells devices apart.
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    # What the best matrix products reach of `flops`, where the board's power limit keeps them from what its architecture reaches.
    reached: Mapping[str, float] = dataclasses.field(hash=False)
    link: HostLink
    context: Context
    source: tuple[str, ...]
    system_bytes: int = 0
    """Of a memory that GPU and host share, what the machine's own programs hold of it; 0 where the GPU has its own."""

    @property
    def shares_host_memory(self) -> bool:
        """Whether its memory is the host's too, so that what a process keeps at the host takes the same bytes."""
        return self.system_bytes > 0

    @property
    def context_bytes(self) -> int:
        """The likely device memory of a process that has no tensor yet."""
        return self.context.num_bytes

    @property
    def context_low_bytes(self) -> int:
        """The lower bound of `context_bytes`."""
        return self.context.low_bytes

    @property
    def context_high_bytes(self) -> int:
        """The upper bound of `context_bytes`."""
        return self.context.high_bytes

    def flops_per_second(self, dtype: DType) -> float:
        """The dense peak for `dtype`, in FLOP/s; where the GPU has no such units, that of the type that libraries compute in instead.

        float8 falls back to bfloat16, every other type to float32.
        """
        while dtype not in self.flops:
            dtype = _COMPUTED_IN[dtype]
        return self.flops[dtype]


_COMPUTED_IN: Mapping[DType, DType] = {
    "tf32": "float32",
    "float16": "float32",
    "bfloat16": "float32",
    "float8": "bfloat16",
    "int8": "float32",
    "float64": "float32",
}
