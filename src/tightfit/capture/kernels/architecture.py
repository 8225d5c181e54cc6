"""The properties of a card and of its libraries that kernel choice and scratch memory depend on.

The capture builds one from a catalogue device. Library versions are those that the torch wheel brings, because rules such as the choice of
an attention kernel depend on them.
"""

import dataclasses

import torch

from tightfit.devices.cublas_workspaces import Version, torch_version

# Shared memory that one block may opt in to (cudaDevAttrMaxSharedMemoryPerBlockOptin) and threads resident on one multiprocessor, by
# compute capability: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
_SHARED_MEMORY_PER_BLOCK = {
    (7, 0): 96,
    (7, 2): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}
_THREADS_PER_MULTIPROCESSOR = {
    (7, 5): 1024,
    (8, 6): 1536,
    (8, 7): 1536,
    (8, 9): 1536,
    (12, 0): 1536,
    (12, 1): 1536,
    (11, 0): 1536,
}


# CUDA and cuDNN of PyPI's wheels for Linux, from a version of torch on: the package requirements of these wheels.
_WHEELS: tuple[tuple[Version, tuple[int, int], int], ...] = (
    ((2, 11), (13, 0), 92000),
    ((2, 8), (12, 8), 91002),
    ((2, 7), (12, 6), 90501),
    ((0, 0), (12, 4), 90100),
)


def wheel_libraries(version: Version) -> tuple[tuple[int, int], int]:
    """The versions of CUDA and of cuDNN that PyPI's wheel of a torch brings."""
    return next((cuda, cudnn) for first, cuda, cudnn in _WHEELS if version >= first)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card as the kernels see it.

    `cudnn_version` is what `torch.backends.cudnn.version()` returns. The defaults are those of the Linux wheels of torch 2.11 to 2.13
    (CUDA 13.0, cuDNN 9.19 and 9.20: the package requirements of these wheels); `of_build` has those of the torch that is installed.
    """

    compute_capability: tuple[int, int]
    num_multiprocessors: int
    cuda_version: tuple[int, int] = (13, 0)
    cudnn_version: int = 92000
    torch: Version = (2, 13)

    @classmethod
    def of_build(cls, compute_capability: tuple[int, int], num_multiprocessors: int) -> "Card":
        """A card with the libraries that the installed torch brings; a build without CUDA has those of PyPI's wheel of the same version.

        To be asked before a virtual card answers for torch (`tightfit.capture.patches.cuda_api`).
        """
        installed = torch_version(torch.__version__)
        cuda, cudnn = wheel_libraries(installed)
        if torch.version.cuda is not None:
            major, minor = torch.version.cuda.split(".")[:2]
            cuda, cudnn = (int(major), int(minor)), torch.backends.cudnn.version() or cudnn
        return cls(
            compute_capability=compute_capability,
            num_multiprocessors=num_multiprocessors,
            cuda_version=cuda,
            cudnn_version=cudnn,
            torch=installed,
        )

    @property
    def num_threads_per_multiprocessor(self) -> int:
        """Threads that one multiprocessor can hold at a time."""
        # 2048 for the data-centre parts (7.0, 8.0, 9.0, 10.x) and older cards; the table has the others.
        return _THREADS_PER_MULTIPROCESSOR.get(self.compute_capability, 2048)

    @property
    def shared_memory_per_block_bytes(self) -> int:
        """Shared memory that a block may ask for; cards before compute capability 7.0 have 48 KiB."""
        return (
            _SHARED_MEMORY_PER_BLOCK.get(self.compute_capability, 48 if self.compute_capability < (7, 0) else 99) * 1024
        )

    def between(self, low: tuple[int, int], high: tuple[int, int]) -> bool:
        """Whether the compute capability lies in the closed range."""
        return low <= self.compute_capability <= high
