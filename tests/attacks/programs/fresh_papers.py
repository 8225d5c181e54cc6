"""Published training methods as their repositories write them: growing sets of parameters, second orders by hand, statistics by hooks, cached representations."""

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "changes",
    "points are split and pruned: parameters of a group and their states replaced by longer ones (splatting)",
    only=EXACT,
)
def points_densified(t: Trial) -> None:
    class Points(Net):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(5, WIDTH))
            self.colours = nn.Parameter(torch.randn(5, WIDTH))

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            seen = (x @ self.places.t()).softmax(-1)
            self.seen = seen
            if seen.requires_grad:
                seen.retain_grad()
            return super().forward(x + seen @ self.colours, y)

    model = Points()
    body = [p for name, p in model.named_parameters() if name not in ("places", "colours")]
    groups = [{"params": [getattr(model, name)], "name": name} for name in ("places", "colours")]
    optimizer = torch.optim.Adam([*groups, {"params": body, "name": "body"}], lr=1e-2)

    def densify(step: int) -> None:
        t.note("gradient of what was seen", model.seen.grad.sum((0, 1)))
        if step != 1:
            return
        for group in optimizer.param_groups[:2]:
            old = group["params"][0]
            new = nn.Parameter(torch.cat([old.detach(), old.detach()[:2] * 0.5]))
            state = optimizer.state.pop(old)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([state[key], torch.zeros_like(state[key][:2])])
            optimizer.state[new] = state
            group["params"][0] = new
            setattr(model, group["name"], new)

    train(t, model, optimizer, num_steps=5, after=densify)


@attack("gradients", "dense gradients decide which connections grow, and that step is left out (RigL)", only=EXACT)
def connections_regrown(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    masks = {p: (torch.rand_like(p) < 0.5).to(p.dtype) for p in model.parameters() if p.dim() == 2}
    for p, mask in masks.items():
        p.data.mul_(mask)
    t.apply(model, optimizer)
    for step in range(6):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        if step % 3 == 2:
            for p, mask in masks.items():
                dropped = torch.where(mask > 0, p.abs(), torch.inf).flatten().topk(3, largest=False).indices
                grown = (p.grad.abs() * (1 - mask)).flatten().topk(3).indices
                mask.view(-1)[dropped] = 0.0
                mask.view(-1)[grown] = 1.0
                optimizer.state[p]["momentum_buffer"].mul_(mask)
                p.data.mul_(mask)
        else:
            for p, mask in masks.items():
                p.grad.mul_(mask)
            optimizer.step()
            for p, mask in masks.items():
                p.data.mul_(mask)
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a curvature is estimated from sampled labels every other step, its gradients read and dropped (Sophia)",
)
def curvature_from_sampled_labels(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    curvature = {p: torch.zeros_like(p) for p in model.parameters()}
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        if step % 2 == 0:
            logits = model(x)
            drawn = torch.distributions.Categorical(logits=logits.detach()).sample()
            functional.cross_entropy(logits.flatten(0, 1), drawn.flatten()).backward()
            for p, h in curvature.items():
                h.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1 * y.numel())
            model.zero_grad()
        loss = model(x, y)
        loss.backward()
        for p, h in curvature.items():
            p.grad.div_((h + 0.1).sqrt())
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()
    t.note("curvature", list(curvature.values()))


@attack(
    "gradients",
    "covariances of inputs and of gradients are kept by hooks, and precondition the gradients (K-FAC)",
    only=EXACT,
)
def kronecker_factors(t: Trial) -> None:
    model = Net()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    of_inputs, of_gradients = {}, {}

    def keep(kept: dict, layer: nn.Module, value: torch.Tensor) -> None:
        rows = value.detach().flatten(0, -2)
        now = rows.t() @ rows / rows.shape[0]
        kept[layer] = now if layer not in kept else kept[layer].lerp(now, 0.3)

    for layer in layers:
        layer.register_forward_pre_hook(lambda m, given: keep(of_inputs, m, given[0]) if m.training else None)
        layer.register_full_backward_hook(lambda m, _, given: keep(of_gradients, m, given[0] * 100))

    def precondition(_: int) -> None:
        for layer in layers:
            a = of_inputs[layer] + 0.3 * torch.eye(layer.in_features)
            g = of_gradients[layer] + 0.3 * torch.eye(layer.out_features)
            layer.weight.grad.copy_(torch.linalg.solve(g, layer.weight.grad) @ torch.linalg.inv(a))

    train(t, model, between=precondition)
    t.note("factors", [[of_inputs[layer], of_gradients[layer]] for layer in layers])


@attack(
    "gradients", "an importance of weights is summed from single examples' gradients, then penalised (elastic weights)"
)
def elastic_weights(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    importance = {p: torch.zeros_like(p) for p in model.parameters()}
    kept = {p: p.detach().clone() for p in model.parameters()}
    t.apply(model, optimizer)
    for step in range(6):
        if step == 3:
            model.eval()
            for example in range(3):
                model.zero_grad()
                model(*tokens(50 + example, batch=1)).backward()
                for p, sums in importance.items():
                    sums.add_(p.grad**2)
                    kept[p] = p.detach().clone()
            model.train()
        loss = model(*tokens(step))
        penalty = sum((importance[p] * (p - kept[p]) ** 2).sum() for p in model.parameters())
        optimizer.zero_grad()
        (loss + penalty).backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "what each step gained is summed from gradients and from how weights moved, after the step (synaptic intelligence)",
)
def synaptic_intelligence(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    path = {p: torch.zeros_like(p) for p in model.parameters()}
    before: dict = {}

    def after(_: int) -> None:
        for p, sums in path.items():
            sums.sub_(p.grad * (p.detach() - before[p]))

    train(t, model, optimizer, before=lambda _: before.update({p: p.detach().clone() for p in path}), after=after)
    t.note("path", list(path.values()))


@attack("gradients", "gradients of two halves are measured one after the other within an accumulation (noise scale)")
def noise_scale(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        for half in range(2):
            (model(*tokens(2 * step + half, batch=2)) / 2).backward()
            t.note("square", sum(p.grad.square().sum() for p in model.parameters()))
        optimizer.step()
        t.end_step()


@attack("gradients", "losses are summed, and gradients divided by the number of tokens when it is known")
def divided_at_last(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(3):
        count = 0
        for part in range(3):
            x, y = tokens(3 * step + part, length=3 + part)
            functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
            count += y.numel()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= count
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        t.end_step()


@attack("changes", "low-rank parts are merged and drawn anew, their moments pruned in place (ReLoRA)")
def low_rank_restarted(t: Trial) -> None:
    class LowRank(nn.Linear):
        def __init__(self, given: int, made: int) -> None:
            super().__init__(given, made)
            self.weight.requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, given)), nn.Parameter(torch.zeros(made, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x @ self.down.t() @ self.up.t()

        @torch.no_grad()
        def restart(self) -> None:
            self.weight += self.up @ self.down
            nn.init.kaiming_uniform_(self.down)
            nn.init.zeros_(self.up)

    blocks = [Block(), Block()]
    for block in blocks:
        block.wide = LowRank(WIDTH, 2 * WIDTH)
    model = Net(blocks)
    optimizer = adamw(model)

    def restart(step: int) -> None:
        if step % 2 == 0:
            return
        for block in model.blocks:
            block.wide.restart()
            for p in (block.wide.down, block.wide.up):
                for key in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[p][key].mul_(torch.rand_like(optimizer.state[p][key]) > 0.9)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 if step == 1 else 1e-2

    train(t, model, optimizer, num_steps=6, after=restart)


@attack("recomputation", "directions and magnitudes of a merged low-rank weight, its norm detached (DoRA)")
def directions_and_magnitudes(t: Trial) -> None:
    class Directed(nn.Linear):
        def __init__(self, given: int, made: int) -> None:
            super().__init__(given, made)
            self.weight.requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, given)), nn.Parameter(torch.zeros(made, 2))
            self.magnitude = nn.Parameter(self.weight.norm(dim=1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            merged = self.weight + self.up @ self.down
            scale = self.magnitude / merged.norm(dim=1).detach()
            return functional.linear(x, merged * scale[:, None], self.bias)

    model = Net([Block(), Block()])
    for block in model.blocks:
        block.narrow = Directed(2 * WIDTH, WIDTH)
    model.head = Directed(WIDTH, NUM_CLASSES)
    train(t, model, adamw(model))


@attack(
    "second order",
    "representations without graph first, their gradients cached, then parts again as they were drawn (GradCache)",
)
def cached_representations(t: Trial) -> None:
    class Dropping(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(super().inner(x), 0.2, self.training)

    model = Net([Dropping(), Dropping()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x = tokens(step, batch=6)[0]
        states, cached = [], []
        with torch.no_grad():
            for part in x.chunk(3):
                states.append(torch.get_rng_state())
                cached.append(model(part).mean(1))
        leaf = torch.cat(cached).requires_grad_()
        pairs = functional.normalize(leaf, dim=-1)
        loss = functional.cross_entropy(pairs @ pairs.flip(0).t() * 3, torch.arange(6))
        loss.backward()
        after = torch.get_rng_state()
        optimizer.zero_grad()
        for part, state, gradient in zip(x.chunk(3), states, leaf.grad.chunk(3), strict=True):
            torch.set_rng_state(state)
            again = model(part).mean(1)
            t.note("the same", again)
            (again * gradient).sum().backward()
        torch.set_rng_state(after)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "heads run one after the other on a detached trunk, whose gradient goes on in one backward (several tokens ahead)",
)
def several_tokens_ahead(t: Trial) -> None:
    model = Net()
    model.further = nn.ModuleList(Block() for _ in range(3))
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        trunk = model.features(x)
        leaf = trunk.detach().requires_grad_()
        for ahead, each in enumerate(model.further):
            logits = model.head(each(leaf))[:, : -ahead or None]
            loss = functional.cross_entropy(logits.flatten(0, 1), y[:, ahead:].flatten())
            loss.backward()
            t.note("loss", loss)
        trunk.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad()
        t.end_step()


@attack(
    "gradients", "blocks are trained on predicted gradients, and the predictor on those that came (synthetic gradients)"
)
def synthetic_gradients(t: Trial) -> None:
    model = Net()
    predictor = nn.Linear(WIDTH, WIDTH)
    nn.init.zeros_(predictor.weight)
    optimizer = sgd(model)
    of_predictor = torch.optim.SGD(predictor.parameters(), lr=0.1)
    t.track(predictor)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        optimizer.zero_grad()
        of_predictor.zero_grad()
        hidden = model.blocks[0](model.stem(x))
        guess = predictor(hidden.detach())
        hidden.backward(guess.detach())
        leaf = hidden.detach().requires_grad_()
        loss = functional.cross_entropy(model.head(model.blocks[1](leaf)).flatten(0, 1), y.flatten())
        loss.backward()
        functional.mse_loss(guess, leaf.grad).backward()
        optimizer.step()
        of_predictor.step()
        t.note("loss", loss)
        t.end_step()
