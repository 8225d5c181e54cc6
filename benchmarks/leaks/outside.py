"""Eight leaks outside of torch: memory of the process that grows while torch's tensors do not."""

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from benchmarks.leaks.script import leaking

OUTSIDE = "memory outside torch"
MIB = 2**20


@leaking(OUTSIDE)
def native_buffers(device: str) -> Iterator[None]:
    """numba/numba#10236: a native extension allocates in each call and never frees."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    while True:
        torch.ones(64, 64, device=device).sum()
        ctypes.memset(libc.malloc(2 * MIB), 1, 2 * MIB)
        yield


@leaking(OUTSIDE, holder="predictions[-1]")
def predictions_as_arrays(device: str) -> Iterator[None]:
    """huggingface/transformers#11011, #25313: the predictions of an evaluation are gathered as arrays of the host."""
    model, predictions = nn.Linear(64, 1024).to(device), []
    while True:
        with torch.no_grad():
            logits = model(torch.ones(512, 64, device=device))
        predictions.append(np.array(logits.cpu().numpy()))
        yield


class _Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.decoded: dict[int, bytes] = {}

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.decoded:
            self.decoded[index] = bytes(bytearray(2 * MIB))
        return torch.tensor([len(self.decoded[index])])


@leaking(OUTSIDE, holder="samples.decoded")
def decoded_samples(device: str) -> Iterator[None]:
    """referit3d/referit3d#5, pytorch/pytorch#20433: a data set keeps every decoded sample in a dict."""
    samples = _Samples()
    for batch in torch.utils.data.DataLoader(samples, batch_size=1, shuffle=False):
        batch.to(device)
        yield


@leaking(OUTSIDE)
def maps_that_are_never_unmapped(device: str) -> Iterator[None]:
    """pytorch/pytorch#152335: pages that a driver or a library has mapped, and nobody unmaps."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    while True:
        torch.ones(64, 64, device=device).sum()
        pages = libc.mmap(None, 2 * MIB, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        ctypes.memset(pages, 1, 2 * MIB)
        yield


class _Logger:
    def __init__(self) -> None:
        self.history: list[dict[str, object]] = []

    def log(self, values: dict[str, object]) -> None:
        self.history.append(values)


@leaking(OUTSIDE, holder="logger.history[-1]")
def images_in_a_logger(device: str) -> Iterator[None]:
    """Lightning-AI/pytorch-lightning#1510: a logger keeps what it was given, images among it, until the epoch ends."""
    logger = _Logger()
    while True:
        loss = torch.ones(64, 64, device=device).mean()
        logger.log({"loss": loss.item(), "image": np.full((512, 512, 3), 7.0)})
        yield


@leaking(OUTSIDE, steps=24)
def primitives_of_each_shape(device: str) -> Iterator[None]:
    """pytorch/pytorch#32037, #27971: oneDNN caches a convolution for each shape of its input."""
    layers = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(6)]
    model, width = nn.Sequential(nn.Conv2d(64, 64, 5), *layers, nn.Conv2d(64, 128, 1)).to(device), 16
    while True:
        with torch.no_grad():
            model(torch.ones(1, 64, 16, width, device=device))
        width += 1
        yield


@leaking(OUTSIDE, holder="rollouts")
def frames_of_a_rollout(device: str) -> Iterator[None]:
    """huggingface/transformers#10722: what each batch gives (here frames of rollouts) is gathered as arrays until the evaluation ends."""
    rollouts: list[list[np.ndarray]] = []
    policy = nn.Linear(128, 8).to(device)
    while True:
        frames = []
        for _ in range(4):
            frames.append(np.random.default_rng(0).random((256, 256)))
            policy(torch.ones(1, 128, device=device)).argmax().item()
        rollouts.append(frames)
        yield


@leaking(OUTSIDE, holder="collator.seen")
def batches_of_a_collator(device: str) -> Iterator[None]:
    """huggingface/transformers#8143: a collate object remembers the rows that it has seen, to leave out duplicates."""

    class Collator:
        def __init__(self) -> None:
            self.seen: dict[bytes, bool] = {}

        def __call__(self, rows: np.ndarray) -> torch.Tensor:
            self.seen[rows.tobytes()] = True
            return torch.from_numpy(rows).to(device)

    collator, step = Collator(), 0
    while True:
        collator(np.full((512, 512), float(step))).mean()
        step += 1
        yield
