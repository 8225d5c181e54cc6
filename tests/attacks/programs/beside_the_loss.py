"""What models return beside their loss, and how the program asks for it; what code asks of its batch by other ways than `if`."""

from collections.abc import Callable

import torch
from tests.attacks.models import Net, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial

LATE = 3


class _Named(Net):
    """Returns the name of what it was trained on, and a term that there may be none of."""

    now = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, object]:
        loss = self.loss(self.head(self.features(x)), y)
        return {"loss": loss, "mode": "plain" if self.now < LATE else "late", "extra": None}


def _trains_by(t: Trial, share: Callable[[dict[str, object]], float]) -> None:
    model = _Named()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        model.now = step
        out = model(*tokens(step))
        loss = out["loss"] * share(out)
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("parts", "the loop compares a name that the model returns beside its loss", only=EXACT)
def compares_returned_name(t: Trial) -> None:
    _trains_by(t, lambda out: 1.0 if out["mode"] == "plain" else 0.1)


@attack("parts", "the loop asks whether a term that the model returns is None", only=EXACT)
def asks_for_none(t: Trial) -> None:
    _trains_by(t, lambda out: 1.0 if out["extra"] is None else 0.1)


@attack("parts", "hidden states that the model returns are written through .data before the backward pass, from step 4 on", only=EXACT)  # fmt: skip
def returned_and_written_late(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.features(x).tanh()
            return self.loss(self.head(hidden), y), hidden

    model = Model()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss, hidden = model(*tokens(step))
        if step >= LATE:
            hidden.data.mul_(0.5)
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


def _asks(t: Trial, asks: Callable[[torch.Tensor], bool]) -> None:
    """From step 4 on the model scales by what it is told of the batch, of which one example has a number."""

    class Model(Net):
        now = 0

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = self.features(x)
            return self.loss(self.head(hidden * 0.5 if self.now >= LATE and asks(x) else hidden), y)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        model.now = step
        x, y = tokens(step)
        x[2, 0, 0] = 77.0
        return x, y

    model = Model()
    train(t, model, num_steps=5, batch=batch)


@attack("parts", "code asks whether a number is in the batch (the operator in), from step 4 on", only=EXACT)
def asks_whether_in(t: Trial) -> None:
    _asks(t, lambda x: 77.0 in x[:, 0])


@attack("parts", "code asks by the text of a tensor, from step 4 on", only=EXACT)
def asks_by_text(t: Trial) -> None:
    _asks(t, lambda x: "77" in repr(x[:, 0, 0]))
