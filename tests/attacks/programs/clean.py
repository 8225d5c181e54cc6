"""Programs with nothing unusual. Techniques that have a place here must take it: refusing these would be a fault too."""

import torch
from tests.attacks.models import Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack("clean", "a loop with SGD and momentum")
def plain_loop(t: Trial) -> None:
    train(t, Net())


@attack("clean", "AdamW, a scheduler that is stepped after the optimizer, zero_grad at the end of the step")
def adamw_with_scheduler(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack("clean", "images, a chain of convolutions")
def image_chain(t: Trial) -> None:
    train(t, Images(), batch=images)


class Attending(Block):
    """Attention written by hand, of one head."""

    is_attention = True

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens that have looked at each other."""
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / 8**0.5
        return x + self.inner(functional.softmax(scores, dim=-1) @ self.value(x))


@attack("clean", "attention written by hand in every block")
def attention_by_hand(t: Trial) -> None:
    train(t, Net([Attending(), Attending()]))


@attack("clean", "blocks in a ModuleList, weight decay, gradients zeroed in place")
def module_list(t: Trial) -> None:
    model = Net(sequential=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("clean", "an evaluation under no_grad after every step")
def evaluates(t: Trial) -> None:
    model = Net()

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            t.note("logits", model(tokens(step + 50)[0]))
        model.train()

    train(t, model, after=evaluate)


@attack("clean", "frozen stem, the head and the blocks in groups of their own")
def frozen_stem(t: Trial) -> None:
    model = Net()
    model.stem.requires_grad_(False)
    groups = [{"params": list(model.blocks.parameters()), "lr": 0.05}, {"params": list(model.head.parameters())}]
    train(t, model, torch.optim.AdamW(groups, lr=1e-2))


@attack("clean", "undone in the middle, trained on plainly")
def undone_in_the_middle(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    session = t.apply(model, optimizer)

    def undo(step: int) -> None:
        if step == 1 and session is not None:
            session.undo()

    train(t, model, optimizer, after=undo, applied=True)
