"""Numbers and memory that few programs have: complex weights, lazily conjugated and negated views, Fourier transforms, weights in other orders and of no elements."""

import torch
from tests.attacks.models import TOKENS, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import BITWISE, EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _complex() -> torch.dtype:
    return torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64


class _Turned(Block):
    """Complex weights, of which the forward takes the conjugate lazily."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=_complex()) * 0.2)
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=_complex()))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(self.norm(x), x) @ self.turn.conj().t() * self.phase.conj()
        return super().inner((z.conj() * z.roll(1, -1)).imag)


@attack("recomputation", "complex weights, conjugated lazily, and the imaginary part of a conjugate", only=EXACT)
def conjugated_weights(t: Trial) -> None:
    train(t, Net([_Turned(), _Turned()]))


@attack(
    "recomputation",
    "the negated imaginary part of complex weights is a factor, of which no more is trained",
    only=EXACT,
)
def negated_weights(t: Trial) -> None:
    class Negated(Block):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=_complex()) * 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + (x * x) @ self.turn.conj().imag)

    train(t, Net([Negated(), Negated()]))


@attack("gradients", "complex weights under AdamW and clipping, whose gradients are conjugated by hand", only=EXACT)
def conjugated_gradients(t: Trial) -> None:
    model = Net([_Turned(), _Turned()])

    def turn(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        for p in model.parameters():
            if p.is_complex() and p.grad is not None:
                # torch's Adam takes none that is conjugated lazily, as the engine leaves some.
                p.grad = (p.grad.conj() if step % 2 else p.grad).resolve_conj()

    train(t, model, adamw(model), between=turn, num_steps=5)


@attack("recomputation", "features are mixed by a learned filter between two real Fourier transforms", only=EXACT)
def filtered_features(t: Trial) -> None:
    class Filtered(Block):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = torch.fft.rfft(x, dim=-1) * torch.view_as_complex(self.filter)
            return super().forward(torch.fft.irfft(z, n=WIDTH, dim=-1))

    train(t, Net([Filtered(), Filtered()]))


@attack("parts", "tokens are mixed by a Fourier transform over them, of which the real part is taken", only=EXACT)
def transformed_tokens(t: Trial) -> None:
    class Mixed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.fft.fft2(x, dim=(1, 2)).real / TOKENS)

    train(t, Net([Mixed(), Mixed()]))


@attack(
    "gradients", "weights lie transposed, with gaps, and flipped in their memory; some have no elements", only=EXACT
)
def weights_in_other_orders(t: Trial) -> None:
    class Laid(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide.weight = nn.Parameter(self.wide.weight.detach().t().contiguous().t())
            self.narrow.weight = nn.Parameter(self.narrow.weight.detach().repeat_interleave(2, 1)[:, ::2])
            self.nothing = nn.Parameter(torch.zeros(0, WIDTH))
            self.scale = nn.Parameter(torch.ones(()))
            self.one = nn.Parameter(torch.ones(1, WIDTH, 1).transpose(0, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale + self.one.reshape(-1) + self.nothing.sum(0)

    model = Net([Laid(), Laid()])
    train(t, model, adamw(model), num_steps=5)


@attack("gradients", "gradients are exchanged for ones of other strides, and for slices of a larger tensor", only=EXACT)
def gradients_in_other_orders(t: Trial) -> None:
    model = Net()

    def lay(step: int) -> None:
        for p in model.parameters():
            if p.grad is not None and p.dim() == 2:
                p.grad = p.grad.t().contiguous().t() if step % 2 else torch.cat([p.grad, p.grad])[: len(p.grad)]

    train(t, model, adamw(model), between=lay, num_steps=5)


@attack(
    "recomputation", "a block saves slices, expanded rows and a diagonal of one activation, and its signs", only=EXACT
)
def slices_of_one_activation(t: Trial) -> None:
    class Sliced(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = functional.pad(x, (1, 1))
            left, right = whole[..., :-2], whole[..., 2:]
            row = whole[:, :1, 1:-1].expand_as(x)
            return super().forward(left * right + row * x + x.sign() * x.abs().sqrt())

    train(t, Net([Sliced(), Sliced()]))


@attack(
    "recomputation", "activations are unfolded into overlapping windows (as_strided), multiplied and folded", only=EXACT
)
def windows_that_overlap(t: Trial) -> None:
    class Windows(Block):
        def __init__(self) -> None:
            super().__init__()
            self.taps = nn.Parameter(torch.randn(3) * 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            windows = functional.pad(x, (1, 1)).unfold(-1, 3, 1)
            return super().forward((windows * windows.flip(-1)) @ self.taps + x)

    train(t, Net([Windows(), Windows()]))


@attack(
    "recomputation",
    "masks of bytes and of booleans, indices of 32 bits and counts are saved beside activations",
    only=EXACT,
)
def integers_are_saved(t: Trial) -> None:
    class Routed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values, places = x.topk(3, -1)
            kept = torch.zeros_like(x, dtype=torch.uint8).scatter_(-1, places, 1)
            sorted_, order = torch.sort(x, dim=-1, descending=True, stable=True)
            order = order.to(torch.int32).long()
            y = torch.where(kept.bool(), x * values.mean(-1, keepdim=True), sorted_.cumsum(-1).gather(-1, order))
            return super().forward(y / (1 + kept.sum(-1, keepdim=True)))

    train(t, Net([Routed(), Routed()]))


@attack(
    "gradients",
    "weights of three types in one model: half precision, bfloat16 and the default, cast where they are used",
    only=BITWISE,
)
def weights_of_three_types(t: Trial) -> None:
    class Typed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
            self.half_ = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.low.to(x.dtype) + self.half_.to(x.dtype))

    model = Net([Typed(), Typed()])
    train(t, model, sgd(model), num_steps=5)


@attack(
    "recomputation",
    "a solve, a determinant and eigenvalues of a small matrix that each block keeps definite",
    only=EXACT,
)
def small_matrices(t: Trial) -> None:
    class Solved(Block):
        def __init__(self) -> None:
            super().__init__()
            self.root = nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            matrix = self.root @ self.root.mT + 0.1 * torch.eye(WIDTH, dtype=x.dtype)
            lower = torch.linalg.cholesky(matrix)
            y = torch.linalg.solve_triangular(lower, x.mT, upper=False).mT
            return super().forward(y * torch.linalg.slogdet(matrix)[1] + torch.linalg.eigvalsh(matrix))

    model = Net([Solved(), Solved()])
    train(t, model, sgd(model, 0.01))


@attack(
    "gradients", "complex states: momentum of complex weights is read, halved and conjugated by the loop", only=EXACT
)
def complex_momentum(t: Trial) -> None:
    model = Net([_Turned(), _Turned()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p in model.parameters():
            held = optimizer.state[p].get("momentum_buffer") if p in optimizer.state else None
            if held is not None and p.is_complex():
                t.note("momentum", held)
                held.mul_(0.5)
                if step == 3:
                    optimizer.state[p]["momentum_buffer"] = held.conj().resolve_conj()
        t.note("loss", loss)
        t.end_step()
