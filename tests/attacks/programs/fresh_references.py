"""Programs that keep references to weights, states and gradients from before the plan, train inside of the forward, or seed between the passes."""

from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack("gradients", "detached aliases of weights, made before the plan, are read after every step")
def aliases_read(t: Trial) -> None:
    model = Net()
    aliases = [p.detach() for p in model.parameters()]
    train(t, model, after=lambda _: t.note("alias", aliases))


@attack("gradients", "numpy arrays that share memory with weights, made before the plan, are read after every step")
def arrays_read(t: Trial) -> None:
    model = Net()
    arrays = [p.detach().numpy() for p in model.parameters() if p.dtype is not torch.bfloat16]
    train(t, model, after=lambda _: t.note("array", arrays))


@attack("gradients", "weights are written to through aliases made before the plan (a clamp by a flat list)")
def aliases_written(t: Trial) -> None:
    model = Net()
    flat = [p.detach().view(-1) for p in model.parameters()]
    train(t, model, after=lambda _: [each.clamp_(-0.3, 0.3) for each in flat])


@attack("gradients", "momentum buffers, kept by reference after the first step, are read and scaled in later ones")
def states_by_reference(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    kept: list[torch.Tensor] = []

    def after(step: int) -> None:
        if step == 0:
            kept.extend(optimizer.state[p]["momentum_buffer"] for p in model.parameters() if p in optimizer.state)
        if step == 2:
            for each in kept:
                each.mul_(0.5)
        t.note("momentum", kept)

    train(t, model, optimizer, after=after)


@attack(
    "gradients",
    "the optimizer's states are read in their own order, and a group with a new layer is added while training",
)
def states_in_order(t: Trial) -> None:
    model = Net()
    added = nn.Linear(WIDTH, WIDTH)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(added.parameters())})
        x, y = tokens(step)
        loss = model(x if step < 2 else x + added(x), y)
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("shapes", [tuple(state["momentum_buffer"].shape) for state in optimizer.state.values()])
        t.end_step()


@attack(
    "gradients",
    "the count of steps in the optimizer's states is set by the program (a warm start without bias correction)",
)
def count_is_set(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def after(step: int) -> None:
        if step == 0:
            for state in optimizer.state.values():
                state["step"].fill_(100)

    train(t, model, optimizer, after=after)


@attack(
    "gradients", "new weights are put on by vector_to_parameters after each step (a random search beside the optimizer)"
)
def vector_put_on(t: Trial) -> None:
    model = Net()

    def after(step: int) -> None:
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * (1 - 0.01 * step), model.parameters())

    train(t, model, after=after)


@attack("gradients", "all weights are views of one flat tensor, which is scaled by the program after each step")
def scaled_by_flat(t: Trial) -> None:
    model = Net()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(flat, model.parameters())

    train(t, model, after=lambda _: flat.mul_(0.99))


@attack("gradients", "matrices lie transposed in memory, and gradients are laid out by the program beforehand")
def transposed_in_memory(t: Trial) -> None:
    model = Net()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
            parameter.grad = torch.zeros_like(parameter)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        t.note("strides", [p.grad.stride() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a hook on several gradients at once (register_multi_grad_hook) notes their norm")
def hook_on_several(t: Trial) -> None:
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]

    def hook(gradients: Any) -> None:
        t.note("norm", [g.norm() for g in gradients if g is not None])

    torch.autograd.graph.register_multi_grad_hook(trained, hook)
    train(t, model)


@attack("gradients", "greedy training: every block has its own loss, backward pass and optimizer inside of its forward")
def trained_inside_forward(t: Trial) -> None:
    class Greedy(Block):
        own: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach()
            if torch.is_grad_enabled() and self.own:
                loss = super().forward(x).pow(2).mean()
                self.own[0].zero_grad()
                loss.backward()
                self.own[0].step()
            return super().forward(x)

    model = Net([Greedy(), Greedy()])
    t.writes_within_step("weight", "bias")
    for block in model.blocks:
        block.own = [torch.optim.SGD(block.parameters(), lr=0.05)]
    outer = torch.optim.SGD([*model.stem.parameters(), *model.head.parameters()], lr=0.1)
    train(t, model, outer)


@attack("gradients", "a backward pass is called by a forward hook of each block (deep supervision), its gradients kept")
def backward_in_forward_hook(t: Trial) -> None:
    model = Net()

    def hook(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        output.pow(2).mean().mul(0.1).backward(retain_graph=True)

    for block in model.blocks:
        block.register_forward_hook(hook)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "the loop seeds torch between forward and backward pass, and draws after it")
def seeded_between_passes(t: Trial) -> None:
    class Drops(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(super().inner(x), 0.3, self.training)

    model = Net([Drops(), Drops()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss.backward()
        t.note("drawn", torch.rand(2))
        optimizer.step()
        t.end_step()


@attack("recomputation", "dropout under a fork of the random state, seeded by the step's number that the loop sets")
def forked_by_step(t: Trial) -> None:
    class Forks(Block):
        seed = 0

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                return functional.dropout(super().inner(x), 0.3, self.training)

    model = Net([Forks(), Forks()])

    def before(step: int) -> None:
        for block in model.blocks:
            block.seed = step

    train(t, model, before=before)


@attack("recomputation", "the same, and the loop sets the next step's number before the backward pass")
def forked_by_next_step(t: Trial) -> None:
    class Forks(Block):
        seed = 0

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                return functional.dropout(super().inner(x), 0.3, self.training)

    model = Net([Forks(), Forks()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        for block in model.blocks:
            block.seed = step + 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "the order of the blocks is drawn anew for each step (shuffled layers)")
def blocks_in_drawn_order(t: Trial) -> None:
    class Shuffled(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for number in torch.randperm(len(self.blocks)).tolist():
                x = self.blocks[number](x)
            return x

    train(t, Shuffled([Block(), Block(), Block()], sequential=False))


@attack("recomputation", "a block reads the weights of the next block, and of the head")
def reads_weights_of_next(t: Trial) -> None:
    class Reads(Block):
        other: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + functional.linear(x, self.other[0].wide.weight[:WIDTH]) * 0.1

    model = Net([Reads(), Reads(), Reads()])
    for number, block in enumerate(model.blocks):
        block.other = [model.blocks[(number + 1) % 3]]
    train(t, model)


@attack("recomputation", "a tensor's subclass carries a scale on its input, which the block reads and hands on")
def scale_on_subclass(t: Trial) -> None:
    class Scaled(torch.Tensor):
        pass

    class Reads(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = getattr(x, "scale", 1.0)
            made = (x + scale * self.inner(x)).as_subclass(Scaled)
            made.scale = scale * 0.5
            return made

    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits.as_subclass(torch.Tensor), y)

    train(t, Model([Reads(), Reads(), Reads()]))


@attack("recomputation", "an attribute on an activation tells the next block how often it was changed")
def attribute_on_activation(t: Trial) -> None:
    class Counts(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            depth = getattr(x, "depth", 0)
            made = x + self.inner(x) / (1 + depth)
            made.depth = depth + 1
            return made

    train(t, Net([Counts(), Counts(), Counts()]))


@attack("recomputation", "blocks return their output with None and a dict of figures, which the model adds to the loss")
def figures_in_dict(t: Trial) -> None:
    class Tells(Block):
        def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> Any:
            made = super().forward(x if mask is None else x * mask)
            return made, None, {"energy": made.pow(2).mean(), "name": "block"}

    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            mask = (x.detach() > -1).to(x)
            x, energy = self.stem(x), torch.zeros(())
            for block in self.blocks:
                x, _, told = block(x, mask=mask)
                energy = energy + told["energy"]
            return self.loss(self.head(x), y) + 0.1 * energy

    train(t, Model([Tells(), Tells()], sequential=False))


@attack("parts", "R-Drop: the batch goes through twice with dropout, and the two answers are drawn together")
def two_passes_with_dropout(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            first, second = (self.head(functional.dropout(self.features(x), 0.2)) for _ in range(2))
            apart = functional.mse_loss(first.softmax(-1), second.softmax(-1))
            return self.loss(first, y) + self.loss(second, y) + apart

    train(t, Model())


@attack("parts", "a queue of past features on the model gives the negatives (a memory bank with its pointer)")
def bank_with_pointer(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bank", torch.eye(WIDTH)[:6].clone())
            self.pointer = 0

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = self.features(x)
            query = functional.normalize(hidden.mean(1), dim=-1)
            negatives = torch.logsumexp(query @ self.bank.clone().T, -1).mean()
            with torch.no_grad():
                places = (self.pointer + torch.arange(len(query))) % len(self.bank)
                self.bank[places] = query.detach()
            self.pointer = (self.pointer + len(query)) % len(self.bank)
            return self.loss(self.head(hidden), y) + negatives

    train(t, Model())


@attack("changes", "all weights are halved in place, and those of two layers exchanged through .data")
def exchanged_through_data(t: Trial) -> None:
    model = Net()

    def before(step: int) -> None:
        if step == 2:
            for parameter in model.parameters():
                other = nn.Parameter(parameter.detach() * 0.5, requires_grad=parameter.requires_grad)
                with torch.no_grad():
                    parameter.copy_(other)
        if step == 3:
            model.blocks[0].wide.weight.data, model.blocks[1].wide.weight.data = (
                model.blocks[1].wide.weight.data,
                model.blocks[0].wide.weight.data,
            )

    train(t, model, before=before)


@attack("changes", "weights are put into shared memory while training (Hogwild)")
def put_into_shared_memory(t: Trial) -> None:
    model = Net()

    def before(step: int) -> None:
        if step == 2:
            model.share_memory()

    train(t, model, before=before)
