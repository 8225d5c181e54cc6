"""Parts of a program that are compiled, or compiled anew, while gradients of the step before stand on the weights; by AOTAutograd, as torch's default backend does."""

import torch
from tests.attacks.models import Block, Net, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial


@attack("changes", "blocks are compiled in the middle (backend='aot_eager'), before gradients are cleared", only=EXACT)
def compiled_in_the_middle(t: Trial) -> None:
    torch._dynamo.reset()
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        if step == 3:
            model.blocks[0].compile(backend="aot_eager")
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        t.note("loss", loss)
        optimizer.step()
        t.end_step()


@attack(
    "changes",
    "the model was compiled (backend='aot_eager') and is so anew for batches of another size, before gradients are cleared",
    only=EXACT,
)
def compiled_anew_for_other_sizes(t: Trial) -> None:
    torch._dynamo.reset()
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss = compiled(*tokens(step, batch=2 + 2 * (step % 3)))
        optimizer.zero_grad()
        loss.backward()
        t.note("loss", loss)
        optimizer.step()
        t.end_step()


@attack(
    "recomputation",
    "blocks branch by torch.cond",
    only=(
        "checkpointing",
        "checkpointing, all but the last",
        "nested checkpointing",
        "offloaded checkpointing",
        "selective checkpointing",
    ),
)
def branches_by_an_operator(t: Trial) -> None:
    class Branching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.cond(x.sum() > 0, self.inner, lambda given: self.inner(given) * 0.5, (x,))

    train(t, Net([Branching(), Branching()]), num_steps=3)
