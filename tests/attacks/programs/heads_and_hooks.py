"""What programs put on a head or do with its logits: hooks, subclasses, estimators with random gradients, pseudo-labels and sampled actions."""

import functools
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _flat(logits: torch.Tensor, y: torch.Tensor, **settings: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.reshape(-1, NUM_CLASSES), y.reshape(-1), **settings)


def _model(loss: Any) -> Net:
    """A model whose loss is `loss(model, logits, y)`."""

    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return loss(self, logits, y)

    return Model()


@attack("parts", "a forward hook on the head divides the logits by a temperature that it lowers")
def head_hook_anneals(t: Trial) -> None:
    model, temperature = Net(), [2.0]

    def hook(_: nn.Module, __: Any, logits: torch.Tensor) -> torch.Tensor:
        temperature[0] *= 0.8
        return logits / temperature[0]

    model.head.register_forward_hook(hook)
    train(t, model)


@attack("parts", "a pre-hook on the head normalises features over the batch, put on after two steps")
def head_pre_hook_later(t: Trial) -> None:
    model = Net()

    def later(step: int) -> None:
        if step == 2:
            model.head.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean((0, 1)),))

    train(t, model, before=later)


@attack("parts", "a full backward hook on the head keeps the norm of the gradient of the logits")
def head_backward_hook(t: Trial) -> None:
    model, seen = Net(), []
    model.head.register_full_backward_hook(lambda _, __, out: seen.append(out[0].norm().item()))
    train(t, model, after=lambda _: t.note("gradients of logits", list(seen)))


@attack("parts", "a full backward pre-hook on the head clips the gradient of the logits by its norm")
def head_backward_pre_hook(t: Trial) -> None:
    model = Net()
    model.head.register_full_backward_pre_hook(lambda _, out: (out[0] / out[0].norm().clamp(min=1e-3) * 0.1,))
    train(t, model)


@attack("parts", "a hook on the log-probabilities centres their gradient over the tokens")
def hook_on_log_probabilities(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logp = logits.log_softmax(-1)
        if logp.requires_grad:
            logp.register_hook(lambda g: g - g.mean((0, 1)))
        return functional.nll_loss(logp.reshape(-1, NUM_CLASSES), y.reshape(-1))

    train(t, _model(loss))


@attack("parts", "a hook on the loss doubles its gradient")
def hook_on_loss(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = _flat(logits, y)
        if value.requires_grad:
            value.register_hook(lambda g: g * 2)
        return value

    train(t, _model(loss))


class _NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 + 0.1 * torch.rand_like(grad))


@attack("parts", "gradients of the logits get noise in a custom backward (stochastic rounding)")
def noisy_gradient_of_logits(t: Trial) -> None:
    train(t, _model(lambda _, logits, y: _flat(_NoisyGradient.apply(logits), y)))


@attack("recomputation", "gradients get noise in a custom backward inside of the block, beside dropout")
def noisy_gradient_in_block(t: Trial) -> None:
    class Noisy(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(_NoisyGradient.apply(super().inner(x)), 0.2)

    train(t, Net([Noisy(), Noisy()]))


class _Scaled(torch.autograd.Function):
    strength = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * _Scaled.strength


@attack("parts", "a scale of the gradient of the logits that the loop sets between forward and backward pass")
def scale_of_logits_set_late(t: Trial) -> None:
    model = _model(lambda _, logits, y: _flat(_Scaled.apply(logits), y))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        _Scaled.strength = 1.0
        loss = model(*tokens(step))
        t.note("loss", loss)
        _Scaled.strength = 1.0 + step
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("parts", "the gradient of the loss with respect to the logits scores each example (EL2N)")
def gradient_of_logits_scores(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        logits = model(x)
        loss = _flat(logits, y)
        (g,) = torch.autograd.grad(loss, logits, retain_graph=True)
        t.note("scores", g.norm(dim=(1, 2)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("parts", "the logits of the last step are kept, and the loss holds the new ones to them")
def held_to_last_logits(t: Trial) -> None:
    last: list[torch.Tensor] = []

    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = _flat(logits, y)
        if last:
            value = value + functional.mse_loss(logits, last.pop())
        last.append(logits.detach())
        return value

    train(t, _model(loss))


@attack("parts", "logits are centred over all tokens before the loss")
def logits_centred(t: Trial) -> None:
    train(t, _model(lambda _, logits, y: _flat(logits - logits.mean((0, 1), keepdim=True), y)))


@attack("parts", "the entropy of the mean prediction over the batch is maximised (mutual information)")
def entropy_of_mean(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean = logits.softmax(-1).mean((0, 1))
        return _flat(logits, y) + (mean * mean.log()).sum()

    train(t, _model(loss))


@attack("parts", "targets by Sinkhorn's algorithm over the batch (SwAV)")
def sinkhorn_targets(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            q = (logits.reshape(-1, NUM_CLASSES) / 0.5).exp()
            for _i in range(3):
                q = q / q.sum(0, keepdim=True)
                q = q / q.sum(1, keepdim=True)
        return -(q * logits.reshape(-1, NUM_CLASSES).log_softmax(-1)).sum(-1).mean()

    train(t, _model(loss))


@attack("parts", "pseudo-labels of the model's own, counted where it is sure (FixMatch)")
def pseudo_labels(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sure, label = logits.detach().softmax(-1).max(-1)
        each = functional.cross_entropy(logits.reshape(-1, NUM_CLASSES), label.reshape(-1), reduction="none")
        return _flat(logits, y) + (each * (sure.reshape(-1) > 0.2)).mean()

    train(t, _model(loss), num_steps=5)


@attack("parts", "entropy of the predictions without any target (test-time training)")
def entropy_alone(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()

    train(t, _model(loss))


@attack("parts", "actions are sampled from the logits (Categorical), and rewarded by the loop (REINFORCE)", only=EXACT)
def sampled_actions(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        policy = torch.distributions.Categorical(logits=model(x))
        actions = policy.sample()
        t.note("actions", actions)
        reward = (actions == y).to(x)
        loss = -(policy.log_prob(actions) * (reward - reward.mean())).mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("parts", "a policy's ratio to the one of before, clipped, with several passes over one batch (PPO)")
def several_passes(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model, momentum=0.0)
    t.apply(model, optimizer)
    for step in range(2):
        x, y = tokens(step)
        with torch.no_grad():
            old = torch.distributions.Categorical(logits=model(x)).log_prob(y)
        advantage = torch.sin(torch.arange(y.numel())).reshape(y.shape).to(x)
        for _ in range(3):
            ratio = (torch.distributions.Categorical(logits=model(x)).log_prob(y) - old).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.99, 1.01) * advantage).mean()
            t.note("loss", loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.end_step()


@attack("parts", "the loss is chosen by the class of the logits, by singledispatch and by match")
def loss_by_dispatch(t: Trial) -> None:
    @functools.singledispatch
    def scale(_: Any) -> float:
        return 3.0

    @scale.register
    def _(_: torch.Tensor) -> float:
        return 1.0

    def loss(_: Any, logits: Any, y: torch.Tensor) -> torch.Tensor:
        match logits:
            case torch.Tensor():
                return _flat(logits, y) * scale(logits)
            case _:
                return _flat(logits, y) * 5

    train(t, _model(loss))


@attack("parts", "the loss is looked up in a dict by the class of the logits")
def loss_by_table(t: Trial) -> None:
    table = {torch.Tensor: 1.0, nn.Parameter: 2.0}
    train(t, _model(lambda _, logits, y: _flat(logits, y) * table.get(type(logits), 3.0)))


@attack("parts", "the loss asks for the logits' __class__, and for its name")
def loss_by_class_attribute(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if logits.__class__ is torch.Tensor else 2.0
        return _flat(logits, y) * scale * (1.0 if logits.__class__.__name__ == "Tensor" else 3.0)

    train(t, _model(loss))


@attack("parts", "the loss asks for strides, storage, contiguity and memory of the logits")
def loss_by_layout(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if logits.is_contiguous() and logits.stride(-1) == 1 else 2.0
        scale += 0.25 * (logits.storage_offset() == 0) + 0.125 * (logits.untyped_storage().nbytes() == logits.nbytes)
        return _flat(logits, y) * (scale + 0.5 * (logits._base is None))

    train(t, _model(loss))


@attack("parts", "margins are added to the logit of the target, which is scaled (ArcFace), on a normalised head")
def margin_head(t: Trial) -> None:
    class Normalised(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(functional.normalize(x, dim=-1), functional.normalize(self.weight, dim=-1))

    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        margin = functional.one_hot(y, NUM_CLASSES).to(logits) * 0.2
        return _flat(8 * (logits - margin), y)

    model = _model(loss)
    model.head = Normalised(WIDTH, NUM_CLASSES, bias=False)
    train(t, model)


@attack("parts", "an adaptive softmax as the head, which has a head of its own")
def adaptive_softmax(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, NUM_CLASSES, cutoffs=[2, 4], div_value=2.0)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            assert y is not None
            return self.head(self.features(x).reshape(-1, WIDTH), y.reshape(-1)).loss

    train(t, Model())


@attack("parts", "the head's output is an embedding, compared with all others of the batch (no classes)")
def head_of_embeddings(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = functional.normalize(logits.reshape(-1, NUM_CLASSES), dim=-1)
        return functional.cross_entropy(z @ z.T * 5, torch.arange(len(z)).roll(1))

    train(t, _model(loss))


@attack("parts", "a scripted function, a vmapped one and one under torch.func.grad compute the loss from the logits")
def loss_by_transforms(t: Trial) -> None:
    def one(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = torch.func.vmap(one)(logits, y).mean()
        slope = torch.func.grad(lambda z: one(z, y).mean())(logits)
        return each + slope.square().sum()

    train(t, _model(loss))


@attack("parts", "two heads make a mixture of softmaxes; one of them is called through functional.linear as well")
def mixture_of_softmaxes(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.gate = nn.Linear(WIDTH, NUM_CLASSES), nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            assert y is not None
            x = self.features(x)
            gate = self.gate(x).sigmoid()
            mixed = gate * self.head(x).softmax(-1) + (1 - gate) * self.second(x).softmax(-1)
            beside = functional.linear(x, self.head.weight)
            return functional.nll_loss(mixed.log().reshape(-1, NUM_CLASSES), y.reshape(-1)) + _flat(beside, y)

    train(t, Model())


@attack("parts", "the gradients of two losses with respect to the logits are compared, and their angle penalised")
def angle_of_losses(t: Trial) -> None:
    def loss(_: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = (
            _flat(logits, y),
            functional.mse_loss(logits.softmax(-1), torch.full_like(logits, 1 / NUM_CLASSES)),
        )
        g = torch.autograd.grad(first, logits, create_graph=True)[0]
        h = torch.autograd.grad(second, logits, create_graph=True)[0]
        return first + functional.cosine_similarity(g.flatten(), h.flatten(), dim=0)

    train(t, _model(loss))


def _late(t: Trial, loss: Any, ask: Any, read: Any = lambda *_: None) -> None:
    """Trains with `loss(logits, y)`; `ask(logits)` comes after the loss and before the backward pass, `read(t, logits)` after that."""
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        logits = model(x)
        value = loss(logits, y)
        ask(logits)
        t.note("loss", value)
        optimizer.zero_grad()
        value.backward()
        read(t, logits)
        optimizer.step()
        t.end_step()


@attack("parts", "a hook is put on the logits after the loss was computed, and scales their gradient")
def late_hook_on_logits(t: Trial) -> None:
    _late(t, _flat, lambda logits: logits.register_hook(lambda g: g * 0.5))


@attack("parts", "the logits are asked to keep their gradient after the loss was computed")
def late_retain(t: Trial) -> None:
    _late(t, _flat, lambda logits: logits.retain_grad(), lambda t, logits: t.note("gradient", logits.grad))


@attack("parts", "the same where a penalty on the logits stands beside the cross-entropy")
def late_retain_beside_penalty(t: Trial) -> None:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _flat(logits, y) + 1e-2 * logits.logsumexp(-1).square().mean()

    _late(t, loss, lambda logits: logits.retain_grad(), lambda t, logits: t.note("gradient", logits.grad))


@attack("parts", "the gradient of the cross-entropy and a penalty with respect to the logits is taken, and logged")
def gradient_of_both(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        logits = model(x)
        loss = _flat(logits, y) + 1e-2 * logits.logsumexp(-1).square().mean()
        t.note("gradient", torch.autograd.grad(loss, [logits, model.head.bias], retain_graph=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("parts", "a hook on the node of the graph that made the logits halves gradients")
def node_hook_of_logits(t: Trial) -> None:
    def ask(logits: torch.Tensor) -> None:
        assert logits.grad_fn is not None
        logits.grad_fn.register_prehook(lambda grads: tuple(None if g is None else g * 0.5 for g in grads))

    _late(t, _flat, ask)


@attack("parts", "the backward pass is asked for the gradient of the logits and of the head alone (inputs=...)")
def backward_to_logits(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        logits = model(x)
        loss = _flat(logits, y)
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward(inputs=[logits, *model.head.parameters()])
        t.note("gradient", logits.grad)
        optimizer.step()
        t.end_step()


@attack("parts", "the gradient with respect to an edge of the graph at the logits (get_gradient_edge)")
def edge_of_logits(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        logits = model(x)
        edge = torch.autograd.graph.get_gradient_edge(logits)
        loss = _flat(logits, y)
        t.note("gradient", torch.autograd.grad(loss, edge, retain_graph=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "parts",
    "the loss is compiled (backend='eager'), and so is a function of the logits beside it",
    only=("chunked loss, gradients in forward", "chunked loss, gradients in backward", "checkpointing"),
)
def compiled_loss(t: Trial) -> None:
    loss = torch.compile(_flat, backend="eager")
    beside = torch.compile(lambda logits: logits.square().mean(), backend="eager")
    train(t, _model(lambda _, logits, y: loss(logits, y) + 1e-2 * beside(logits)))


@attack("parts", "a backward hook of the old kind (register_backward_hook) on the head halves gradients")
def old_backward_hook(t: Trial) -> None:
    model = Net()
    model.head.register_backward_hook(lambda _, grads, __: tuple(None if g is None else g * 0.5 for g in grads))
    train(t, model)
