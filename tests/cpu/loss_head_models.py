"""Small language models whose heads the loss technique is put on, and one of them as a workload for the virtual GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from tightfit.planner.plan import Choice
from tightfit.techniques.loss_head.chunked_loss import ChunkedLoss
from tightfit.techniques.session import Session

VOCABULARY = 307


class Plain(torch.nn.Module):
    """A model written by hand, with a head tied to its embedding; `loss` says how the logits come to the loss."""

    def __init__(
        self,
        loss: str = "flat",
        *,
        tied: bool = True,
        bias: bool = False,
        vocabulary: int = VOCABULARY,
        width: int = 32,
    ):
        super().__init__()
        self.loss = loss
        self.table = torch.nn.Embedding(vocabulary, width)
        self.middle = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.LayerNorm(width))
        self.head = torch.nn.Linear(width, vocabulary, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and loss."""
        logits = self.head(self.middle(self.table(tokens)))
        return logits, LOSSES[self.loss](logits, targets)


def _shifted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    kept = logits[..., :-1, :].contiguous()
    return functional.cross_entropy(
        kept.view(-1, kept.size(-1)), targets[..., 1:].contiguous().view(-1), ignore_index=-1
    )


def _capped(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    capped = torch.tanh(logits / 2.5) * 2.5
    return functional.cross_entropy(capped.float().flatten(0, 1), targets.flatten(), ignore_index=-1)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "flat": lambda x, y: functional.cross_entropy(x.view(-1, x.size(-1)), y.view(-1), ignore_index=-1),
    "by keyword": lambda x, y: functional.cross_entropy(input=x.flatten(0, 1), target=y.flatten(), ignore_index=-1),
    "classes second": lambda x, y: functional.cross_entropy(x.transpose(1, 2), y, ignore_index=-1),
    "permuted": lambda x, y: functional.cross_entropy(x.permute(0, 2, 1), y, ignore_index=-1),
    "shifted": _shifted,
    "capped": _capped,
    "smoothed": lambda x, y: functional.cross_entropy(
        x.flatten(0, 1), y.flatten(), ignore_index=-1, label_smoothing=0.1
    ),
    "summed": lambda x, y: (
        functional.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum") / 37
    ),
    "unreduced": lambda x, y: (
        functional.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none")
        * torch.linspace(0, 1, y.numel())
    ).sum(),
    "as a module": lambda x, y: torch.nn.CrossEntropyLoss(ignore_index=-1)(x.flatten(0, 1), y.flatten()),
    "two losses": lambda x, y: LOSSES["flat"](x, y) + 0.5 * LOSSES["smoothed"](x, y),
}

WHOLE_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "class weights": lambda x, y: functional.cross_entropy(
        x.flatten(0, 1), y.flatten(), torch.linspace(0.5, 1, x.size(-1)), ignore_index=-1
    ),
    "probabilities": lambda x, y: functional.cross_entropy(
        x.flatten(0, 1), functional.one_hot(y.flatten().clamp(0), x.size(-1)).to(x.dtype)
    ),
    "changed in place": lambda x, y: LOSSES["flat"](x.div_(1.5), y),
    "masked": lambda x, y: LOSSES["flat"](x.masked_fill(torch.arange(x.size(-1)) == 3, -50.0), y),
    "a squared term": lambda x, y: LOSSES["flat"](x, y) + 1e-4 * x.square().mean(),
    "read before": lambda x, y: x.float().softmax(-1).max() + LOSSES["flat"](x, y),
    "through autograd": lambda x, y: LOSSES["flat"](_Identity.apply(x), y),
}
LOSSES |= WHOLE_LOSSES


class _Identity(torch.autograd.Function):
    """Gives on what it is given, as far as autograd can see in C++ only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        return grad_outputs[0]


def choice(where: str, **settings: Any) -> Choice:
    """A choice as a plan carries it."""
    return Choice(technique="chunked_loss", where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)


def batch(
    step: int, *, vocabulary: int = VOCABULARY, shape: tuple[int, int] = (3, 21)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, every fifth of which is ignored."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    targets = torch.randint(vocabulary, shape, generator=generator)
    return tokens, targets.masked_fill(torch.arange(shape[1]) % 5 == 0, -1)


def workload(
    num_chunks: int = 0,
    gradients_in: str = "forward",
    dtype: str = "float32",
    loss: str = "flat",
    evaluates: bool = False,
) -> Iterator[torch.Tensor]:
    """`Plain` with many classes on the virtual GPU, in chunks if `num_chunks` is given; `evaluates`: it is called without gradients behind each step."""
    model = Plain(loss, vocabulary=30011, width=256).to(getattr(torch, dtype)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    if num_chunks:
        session = Session(model=model, optimizers=[optimizer])
        ChunkedLoss().apply(session, [choice("Plain.head", num_chunks=num_chunks, gradients_in=gradients_in)])
    while True:
        tokens, targets = batch(0, vocabulary=30011, shape=(4, 1024))
        _logits, value = model(tokens.cuda(), targets.cuda())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                model(tokens[:1].cuda(), targets[:1].cuda())
        yield value


def classifier() -> Iterator[torch.Tensor]:
    """A model whose head is nothing beside the rest."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10)).cuda()
    while True:
        out = model(torch.randn(256, 512, device="cuda"))
        loss = functional.cross_entropy(out, torch.zeros(256, dtype=torch.int64, device="cuda"))
        loss.backward()
        yield loss


def ends_before_the_head() -> Iterator[torch.Tensor]:
    """The last that runs forward is an embedding, while the logits of the last step are still there."""
    model = Plain(vocabulary=30011, width=64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        tokens, targets = (part.cuda() for part in batch(0, vocabulary=30011, shape=(4, 256)))
        with torch.autocast("cuda", torch.bfloat16):
            _logits, value = model(tokens, targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.table(tokens)
        yield value
