"""Gradients, logits and attention scores read in every way that a program can read a tensor, one way after the other."""

import copy
import ctypes
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tests.attacks.models import WIDTH, Block, Net, sgd, tokens
from tests.attacks.places import BITWISE
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Own(torch.Tensor):
    """A subclass of the program's."""


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    return torch.load(io.BytesIO(file.getvalue()))


def _written_out(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(tensor)
    torch.mul(tensor.detach(), 2, out=out)
    return out


def _through_memory(tensor: torch.Tensor) -> float:
    held = tensor.detach().contiguous()
    address = held.data_ptr()
    return (ctypes.c_double * held.numel()).from_address(address)[0]


READS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda g: g.numpy(force=True).sum(),
    lambda g: np.asarray(g.detach()).mean(),
    lambda g: np.array(g.detach(), copy=True)[0].sum(),
    lambda g: g.tolist()[0],
    lambda g: [float(each.sum()) for each in g],
    lambda g: g.detach().flatten()[0].item(),
    lambda g: float(g.detach().flatten()[0]),
    lambda g: torch.as_tensor(g.detach()).sum(),
    lambda g: torch.stack([g.detach(), g.detach()]).sum(),
    lambda g: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(g.detach().clone())).sum(),
    lambda g: np.from_dlpack(g.detach().clone()).sum(),
    _saved,
    lambda g: pickle.loads(pickle.dumps(g.detach())).sum(),
    lambda g: copy.copy(g.detach()).sum(),
    lambda g: copy.deepcopy(g.detach()).sum(),
    lambda g: g.detach().as_subclass(_Own).sum().as_subclass(torch.Tensor),
    lambda g: g.detach().view(torch.int64).sum(),
    lambda g: g.detach().storage()[0],
    lambda g: bytes(g.detach().contiguous().untyped_storage())[:4].hex(),
    lambda g: torch.equal(g.detach(), g.detach().clone()),
    lambda g: torch.allclose(g, g.detach() * 2),
    lambda g: bool((g.detach() == g.detach()).all()),
    lambda g: torch.histc(g.detach(), 5),
    lambda g: torch.linalg.matrix_norm(g.detach().reshape(-1, g.shape[-1])),
    lambda g: g.detach().to_sparse().values().sum(),
    lambda g: torch.topk(g.detach().flatten(), 2).values,
    lambda g: torch.ops.aten.sum.default(g.detach()),
    lambda g: torch._C._VariableFunctions.sum(g.detach()),
    lambda g: g.detach().__array__().sum(),
    lambda g: torch.cat([g.detach().flatten(), torch.ones(1)]).sum(),
    lambda g: functional.softmax(g.detach(), -1).amax(),
    lambda g: torch.einsum("...i->...", g.detach()).sum(),
    lambda g: g.detach().unsafe_chunk(2, -1)[0].sum(),
    lambda g: str(g.detach().flatten()[:2].tolist()),
    lambda g: f"{g.detach().sum():.6f}",
    lambda g: round(float(g.detach().sum()), 6),
    lambda g: g.detach().sum() in [g.detach().sum()],
    lambda g: max(g.detach().flatten().tolist()),
    lambda g: torch.nn.utils.parameters_to_vector([g.detach()]).sum(),
    _written_out,
    _through_memory,
    lambda g: torch.frombuffer(bytearray(g.detach().contiguous().numpy().tobytes()), dtype=torch.float64).sum(),
    lambda g: hash(g.detach().contiguous().numpy().tobytes()) == hash(g.detach().contiguous().numpy().tobytes()),
    lambda g: torch.tensor(g.detach().tolist()).sum(),
    lambda g: g.detach().type(torch.float32).sum(),
    lambda g: torch.Tensor.sum(g.detach()),
    lambda g: g.detach().expand(2, *g.shape).sum(),
    lambda g: g.detach().T.sum() if g.dim() == 2 else g.detach().mT.sum(),
    lambda g: g.data.sum(),
    lambda g: g.data.clone().add_(1).sum(),
    lambda g: torch.quantile(g.detach().flatten(), 0.5),
    lambda g: (g.detach() > 0).nonzero().shape,
    lambda g: torch.where(g.detach() > 0)[0].sum(),
    lambda g: g.detach()[..., -1].contiguous().sum(),
    lambda g: g.detach().take(torch.tensor([0])),
    lambda g: torch.broadcast_tensors(g.detach(), torch.ones(1))[0].sum(),
    lambda g: torch.meshgrid(g.detach().flatten()[:2], torch.ones(2), indexing="ij")[0].sum(),
    lambda g: torch.Tensor.__getitem__(g.detach(), 0).sum(),
    lambda g: next(iter(g.detach())).sum(),
    lambda g: torch.Tensor.__reversed__(g.detach())[0].sum(),
    lambda g: len(g.detach()) + g.detach().numel() + g.detach().element_size(),
)


def _read(t: Trial, reads: Iterable[Callable[[torch.Tensor], Any]], tensor: torch.Tensor) -> None:
    for read in reads:
        t.note("read", read(tensor))


@attack(
    "gradients",
    "a gradient is read in sixty ways, two in each step (numpy, DLPack, pickle, storages, addresses, subclasses)",
    only=BITWISE,
)
def gradient_read_in_every_way(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model, 0.01)
    t.apply(model, optimizer)
    for step in range(len(READS) // 2):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        _read(t, READS[2 * step : 2 * step + 2], model.blocks[0].wide.weight.grad)
        optimizer.step()
        t.end_step()


@attack("gradients", "a gradient is read in sixty ways, one of them in every third step", only=BITWISE)
def gradient_read_seldom_in_every_way(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model, 0.01)
    t.apply(model, optimizer)
    for step in range(len(READS) // 3):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        if step % 3 == 0:
            _read(t, READS[3 * step : 3 * step + 3], model.head.weight.grad)
        if step % 3 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            _read(t, READS[3 * step : 3 * step + 1], model.stem.weight.grad)
        optimizer.step()
        t.end_step()


@attack(
    "parts",
    "logits are read in sixty ways before and after their loss",
    only=(*BITWISE, "chunked loss, gradients in forward", "chunked loss, gradients in backward"),
)
def logits_read_in_every_way(t: Trial) -> None:
    class Read(Net):
        returns_loss = False
        step = 0

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x))
            _read(t, READS[3 * self.step : 3 * self.step + 2], logits)
            loss = self.loss(logits, y)
            _read(t, READS[3 * self.step + 2 : 3 * self.step + 3], logits)
            return loss

    model = Read()
    optimizer = sgd(model, 0.01)
    t.apply(model, optimizer)
    for step in range(len(READS) // 3):
        model.step = step
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts", "scores of attention are read in sixty ways, before and after their softmax", only=(*BITWISE, "attention")
)
def scores_read_in_every_way(t: Trial) -> None:
    class Read(Block):
        is_attention = True
        step = 0

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
            scores = query @ key.transpose(-2, -1) / WIDTH**0.5
            if Read.step >= 0:
                _read(t, READS[2 * Read.step : 2 * Read.step + 1], scores)
            weights = functional.softmax(scores, -1)
            if Read.step >= 0:
                _read(t, READS[2 * Read.step + 1 : 2 * Read.step + 2], weights)
            return x + self.out(weights @ value)

    model = Net([Read()])
    optimizer = sgd(model, 0.01)
    t.apply(model, optimizer)
    for step in range(len(READS) // 2):
        Read.step = step
        loss = model(*tokens(step))
        optimizer.zero_grad()
        # What a second run reads is not noted.
        Read.step = -1
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
