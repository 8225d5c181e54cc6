"""The rarer doors of autograd: nodes, gradient edges, batched gradients, callbacks of the engine, inputs that are trained, several backward passes."""

import threading
from typing import Any

import torch
from tests.attacks.models import BATCH, TOKENS, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook


def _inner_doing(t: Trial, act: Any, **settings: Any) -> None:
    """Trains blocks that hand the output of their inner layers to `act`."""

    class Acting(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            made = super().inner(x)
            return act(made) if made.requires_grad else made

    train(t, Net([Acting(), Acting()]), **settings)


@attack("second order", "a hook on a node of the graph (grad_fn.register_hook) that doubles gradients")
def node_hook(t: Trial) -> None:
    def act(x: torch.Tensor) -> torch.Tensor:
        x.grad_fn.register_hook(lambda inputs, outputs: tuple(g if g is None else 2 * g for g in inputs))
        return x

    _inner_doing(t, act)


@attack("second order", "a pre-hook on a node of the graph that counts and scales")
def node_pre_hook(t: Trial) -> None:
    calls = [0]

    def scaled(outputs: Any) -> Any:
        calls[0] += 1
        return tuple(g / calls[0] for g in outputs)

    def act(x: torch.Tensor) -> torch.Tensor:
        x.grad_fn.register_prehook(scaled)
        return x

    _inner_doing(t, act)
    t.note("calls", calls[0])


@attack("gradients", "register_multi_grad_hook over all parameters, which logs the norm of all gradients")
def multi_gradient_hook(t: Trial) -> None:
    model = Net()

    def seen(grads: Any) -> None:
        t.note("norm", torch.stack([g.norm() for g in grads]).norm())

    register_multi_grad_hook(list(model.parameters()), seen)
    train(t, model)


@attack("gradients", "a callback that the engine runs at the end of a backward pass changes gradients (as DDP does)")
def engine_callback(t: Trial) -> None:
    model = Net()

    def halve() -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def queue(_: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(halve)

    model.head.bias.register_hook(queue)
    train(t, model)


@attack("second order", "autograd.grad with respect to a gradient edge of an inner activation")
def gradient_edge(t: Trial) -> None:
    edges: list[Any] = []

    def act(x: torch.Tensor) -> torch.Tensor:
        edges.append(get_gradient_edge(x))
        return x

    class Acting(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return act(super().inner(x))

    model = Net([Acting(), Acting()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        edges.clear()
        loss = model(*tokens(step))
        grads = torch.autograd.grad(loss, edges, retain_graph=True)
        t.note("norms", [g.norm() for g in grads])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("second order", "a batch of vector-Jacobian products at once (is_grads_batched)")
def batched_gradients(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        x.requires_grad_()
        logits = model(x)
        rows = torch.eye(3).to(logits)[:, :, None, None] * torch.ones(3, 3, TOKENS, logits.shape[-1])
        many = torch.cat([rows, rows[:, :1] * 0], 1)
        (jacobian,) = torch.autograd.grad(logits, x, many, retain_graph=True, is_grads_batched=True)
        t.note("jacobian", jacobian)
        optimizer.zero_grad()
        model.loss(logits, y).backward()
        optimizer.step()
        t.end_step()


@attack("gradients", "autograd.backward of two losses with gradients of their own")
def two_roots(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        first, second = model(*tokens(step)), model(*tokens(step + 20))
        optimizer.zero_grad()
        torch.autograd.backward([first, second], [torch.tensor(1.0), torch.tensor(0.3)])
        optimizer.step()
        t.note("losses", [first, second])
        t.end_step()


@attack("gradients", "a backward pass from the features and one from the loss, in the same call")
def roots_of_one_model(t: Trial) -> None:
    class Model(Net):
        returns_loss = False

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            x = self.features(x)
            return self.loss(self.head(x), y), x

    model = Model()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss, features = model(*tokens(step))
        optimizer.zero_grad()
        torch.autograd.backward([loss, features], [None, torch.full_like(features, 0.01)])
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the input is a leaf that asks for its gradient, which the loop reads (saliency)")
def saliency(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        x.requires_grad_()
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        t.note("saliency", x.grad)
        optimizer.step()
        t.end_step()


@attack("gradients", "latent codes outside of the model, picked by the batch and trained by a second optimizer (GLO)")
def latent_codes(t: Trial) -> None:
    model = Net()
    codes = nn.Embedding(2 * BATCH, TOKENS * WIDTH)
    optimizer, of_codes = sgd(model), torch.optim.Adam(codes.parameters(), lr=0.05)
    t.track(codes)
    t.apply(model, optimizer)
    for step in range(4):
        _, y = tokens(step)
        x = codes((torch.arange(BATCH) * 3 + step) % (2 * BATCH)).view(BATCH, TOKENS, WIDTH)
        loss = model(x, y)
        optimizer.zero_grad()
        of_codes.zero_grad()
        loss.backward()
        optimizer.step()
        of_codes.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "free adversarial training: the same batch again and again, the input moved by its gradient")
def free_adversarial(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    x, y = tokens(0)
    noise = torch.zeros_like(x, requires_grad=True)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(x + noise, y)
        loss.backward()
        with torch.no_grad():
            noise += 0.1 * noise.grad.sign()
        noise.grad = None
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the weights are interpolated at each step out of two sets that are trained (functional_call)")
def interpolated_weights(t: Trial) -> None:
    model = Net()
    other = {n: nn.Parameter(p.detach() * 0.9) for n, p in model.named_parameters()}
    optimizer = sgd(model)
    second = torch.optim.SGD(other.values(), lr=0.1)
    t.apply(model, optimizer)
    for step in range(4):
        a = 0.25 + 0.1 * step
        mixed = {n: a * p + (1 - a) * other[n] for n, p in model.named_parameters()}
        loss = torch.func.functional_call(model, mixed, tokens(step))
        optimizer.zero_grad()
        second.zero_grad()
        loss.backward()
        optimizer.step()
        second.step()
        t.note("loss", loss)
        t.note("other", next(iter(other.values())))
        t.end_step()


@attack("gradients", "a single parameter of many is trained by its own backward(inputs=...) first")
def backward_to_head_first(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward(inputs=list(model.head.parameters()), retain_graph=True)
        t.note("head", model.head.weight.grad)
        loss.backward(inputs=[p for n, p in model.named_parameters() if "head" not in n])
        optimizer.step()
        t.end_step()


@attack("second order", "torch.func.grad_and_value over the module's parameters, gradients put on them by hand")
def functional_gradients(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        weights = {n: p.detach() for n, p in model.named_parameters()}
        grads, loss = torch.func.grad_and_value(lambda w: torch.func.functional_call(model, w, (x, y)))(weights)  # noqa: B023
        for n, p in model.named_parameters():
            p.grad = grads[n]
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("second order", "Hutchinson's estimate of the Hessian's diagonal, every second step (Sophia)")
def hutchinson(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        if step % 2:
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            probes = [torch.ones_like(g) for g in grads]
            curved = torch.autograd.grad(grads, list(model.parameters()), probes, retain_graph=True)
            t.note("curvature", [c.norm() for c in curved])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("second order", "a vjp and a jvp inside of a block (torch.func, a Jacobian-regularised layer)")
def transforms_inside(t: Trial) -> None:
    class Transformed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, tangent = torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))
            return x + out + 0.1 * tangent

    train(t, Net([Transformed(), Transformed()]))


@attack("second order", "an energy: the block returns the gradient of a scalar of its input (torch.func.grad)")
def energy_block(t: Trial) -> None:
    class Energy(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - 0.1 * torch.func.grad(lambda v: self.inner(v).square().sum())(x)

    train(t, Net([Energy(), Energy()]))


@attack("recomputation", "a backward pass in a thread of its own")
def backward_in_thread(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        errors: list[BaseException] = []

        def work(loss: torch.Tensor = loss, errors: list[BaseException] = errors) -> None:
            try:
                loss.backward()
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "two models take turns in two threads, each with its optimizer")
def models_in_threads(t: Trial) -> None:
    models = [Net(), Net()]
    optimizers = [sgd(m) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        t.apply(model, optimizer)
    errors: list[BaseException] = []

    def work(number: int, step: int) -> None:
        try:
            loss = models[number](*tokens(step))
            optimizers[number].zero_grad()
            loss.backward()
            optimizers[number].step()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)

    for step in range(3):
        for number in range(2):
            thread = threading.Thread(target=work, args=(number, step))
            thread.start()
            thread.join()
        if errors:
            raise errors[0]
        t.end_step()


@attack("gradients", "Hogwild: two threads at once run forward and backward passes, and one lock guards the step")
def threads_at_once(t: Trial) -> None:
    models = [Net(), Net()]
    optimizers = [adamw(m) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        t.apply(model, optimizer)
    errors: list[BaseException] = []
    gate = threading.Barrier(2, timeout=20)

    def work(number: int) -> None:
        try:
            for step in range(3):
                gate.wait()
                loss = models[number](*tokens(step + number))
                gate.wait()
                optimizers[number].zero_grad()
                loss.backward()
                gate.wait()
                optimizers[number].step()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)
            gate.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    t.end_step()


@attack("gradients", "multithreading of the engine is off, and views of inner activations are written in place after")
def single_threaded_engine(t: Trial) -> None:
    model = Net()
    with torch.autograd.set_multithreading_enabled(False), torch.autograd.graph.allow_mutation_on_saved_tensors():
        train(t, model)


@attack("recomputation", "saved tensors may be mutated (allow_mutation_on_saved_tensors), and the block does that")
def mutated_saved_tensors(t: Trial) -> None:
    class Mutating(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.sin(self.wide(x))
            out = self.narrow(torch.cos(hidden))
            hidden.mul_(2.0)
            # Saved once more: torch tells saved tensors apart by address and version, and mistakes one for another whose memory it has got.
            return x + out + hidden.square().mean(-1, keepdim=True)

    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        train(t, Net([Mutating(), Mutating()]))
