"""Language models as their repositories train them: skips by learned shares, mixed experts, gradients of the largest logit, halting, exits, replaced tokens."""

import random
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, TOKENS, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "gradients",
    "a U of blocks with learned shares, values of an embedding, capped logits, a momentum that warms up (a GPT speed run)",
    only=EXACT,
)
def speed_run(t: Trial) -> None:
    class Mixed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.shares = nn.Parameter(torch.tensor([1.0, 0.0]))

        def forward(self, x: torch.Tensor, start: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
            x = self.shares[0] * x + self.shares[1] * start
            return x + self.inner(x if values is None else x + values)

    class Speedy(Net):
        def __init__(self) -> None:
            super().__init__([Mixed() for _ in range(4)], sequential=False)
            self.skips = nn.Parameter(torch.ones(2))
            self.values = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
            nn.init.zeros_(self.head.weight)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            start = x = functional.rms_norm(self.stem(x), (WIDTH,))
            values = [layer(start) for layer in self.values]
            kept: list[torch.Tensor] = []
            for i, block in enumerate(self.blocks):
                if i < 2:
                    x = block(x, start, values[i])
                    kept.append(x)
                else:
                    x = block(x + self.skips[i - 2] * kept.pop(), start, None)
            logits = 15 * torch.tanh(self.head(functional.rms_norm(x, (WIDTH,))) / 15)
            return logits if y is None else self.loss(logits, y)

    model = Speedy()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is each for each in matrices)]
    optimizers = [torch.optim.SGD(matrices, lr=0.05, momentum=0.85, nesterov=True), torch.optim.Adam(others, lr=1e-2)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    t.apply(model, *optimizers)
    for step in range(6):
        for part in range(2):
            (model(*tokens(2 * step + part)) / 2).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * min(1.0, (6 - step) / 3)
        share = min(step / 4, 1)
        optimizers[0].param_groups[0]["momentum"] = (1 - share) * 0.85 + share * 0.95
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        t.end_step()


class _LargestPulledDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        factor = 1e-1 / (logits.shape[0] * logits.shape[1])
        largest, places = torch.max(logits, -1, keepdim=True)
        pulled = torch.zeros_like(logits)
        pulled.scatter_(-1, places, largest * factor)
        return gradients[0], pulled


@attack(
    "parts", "the loss and logits go through a function whose backward pulls down the largest logit (RWKV's L2Wrap)"
)
def largest_logit_pulled(t: Trial) -> None:
    class Wrapped(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return _LargestPulledDown.apply(super().loss(logits, y), logits)

    train(t, Wrapped(), num_steps=4)


@attack(
    "parts", "time mixing and channel mixing with a shift of tokens by padding, states of a decay as a loop (RWKV-4)"
)
def receptance_and_keys(t: Trial) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.ZeroPad2d((0, 0, 1, -1))
            self.mix_k = nn.Parameter(torch.full((1, 1, WIDTH), 0.5))
            self.mix_r = nn.Parameter(torch.full((1, 1, WIDTH), 0.3))
            self.decay, self.first = nn.Parameter(torch.linspace(-2, 0, WIDTH)), nn.Parameter(torch.zeros(WIDTH))
            self.key, self.value, self.receptance, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
            self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

        def time(self, x: torch.Tensor) -> torch.Tensor:
            before = self.shift(x)
            mixed = x * self.mix_k + before * (1 - self.mix_k)
            k, v, r = self.key(mixed), self.value(mixed), self.receptance(x * self.mix_r + before * (1 - self.mix_r))
            above, below = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
            found = []
            for i in range(k.shape[1]):
                now = torch.exp(k[:, i].clamp(max=30.0))
                bonus = torch.exp(self.first) * now
                found.append((above + bonus * v[:, i]) / (below + bonus))
                decay = torch.exp(-torch.exp(self.decay))
                above, below = decay * above + now * v[:, i], decay * below + now
            return self.output(torch.sigmoid(r) * torch.stack(found, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.time(self.norms[0](x))
            k = torch.square(torch.relu(self.wide(self.norms[1](x))))
            return x + self.narrow(k)

    class Wrapped(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
            return _LargestPulledDown.apply(loss, logits)

    model = Wrapped([Mixing(), Mixing()])
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    train(t, model, adamw(model), num_steps=4)


@attack(
    "parts",
    "experts by index: hit experts alone run, results come by index_add_, router logits of all layers make the loss (Mixtral)",
    only=EXACT,
)
def experts_by_index(t: Trial) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3, bias=False)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = self.norm(x).view(-1, WIDTH)
            router = self.gate(rows)
            weights, chosen = torch.topk(functional.softmax(router, dim=1), 2, dim=-1)
            weights = weights / weights.sum(dim=-1, keepdim=True)
            final = torch.zeros_like(rows)
            mask = functional.one_hot(chosen, num_classes=3).permute(2, 1, 0)
            for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
                place, top = torch.where(mask[number].squeeze(0))
                state = rows[None, top].reshape(-1, WIDTH)
                state = self.experts[int(number)](state) * weights[top, place, None]
                final.index_add_(0, top, state.to(rows.dtype))
            return x + final.view(x.shape), router

    class Mixture(Net):
        def __init__(self) -> None:
            super().__init__([Experts(), Experts()], sequential=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            x, routers = self.stem(x), ()
            for block in self.blocks:
                x, router = block(x)
                routers += (router,)
            logits = self.head(x)
            if y is None:
                return logits
            shares = torch.cat(routers).softmax(-1)
            counts = functional.one_hot(shares.topk(2, -1).indices, 3).to(x.dtype).mean(0)
            return self.loss(logits, y) + 0.02 * 3 * torch.sum(counts * shares.mean(0).unsqueeze(0))

    train(t, Mixture(), num_steps=4)


@attack(
    "recomputation",
    "an iteration over layers draws which are left out, in __iter__ of the list (fairseq's LayerDrop)",
)
def layer_drop_list(t: Trial) -> None:
    class Dropping(nn.ModuleList):
        def __iter__(self) -> Any:
            chances = torch.empty(len(self)).uniform_()
            for i, module in enumerate(super().__iter__()):
                if not self.training or chances[i] > 0.4:
                    yield module

    class Dropped(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Dropping([Block() for _ in range(4)])

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = functional.dropout(block(x), 0.1, self.training)
            return x

    train(t, Dropped(), num_steps=6)


@attack(
    "recomputation",
    "a pre-hook drops parts of the weight itself, for good, and scales what is left (fairseq's quant_noise)",
)
def quantisation_noise(t: Trial) -> None:
    def noisy(module: nn.Linear) -> nn.Linear:
        def hook(module: nn.Module, _: Any) -> None:
            if module.training:
                mask = torch.zeros(module.in_features // 4 * module.out_features)
                mask.bernoulli_(0.1)
                mask = mask.repeat_interleave(4, -1).view(-1, module.in_features).to(torch.bool)
                module.weight.data = 1 / (1 - 0.1) * module.weight.masked_fill(mask, 0)

        module.register_forward_pre_hook(hook)
        return module

    model = Net()
    for block in model.blocks:
        noisy(block.wide)
        noisy(block.narrow)
    t.writes_within_step("wide.weight", "narrow.weight")
    train(t, model, num_steps=4)


@attack(
    "parts",
    "halting by position with remainders: one shared block runs while any token goes on (Universal Transformers)",
    only=EXACT,
)
def universal(t: Trial) -> None:
    class Halting(Net):
        def __init__(self) -> None:
            super().__init__([Block()], sequential=False)
            self.halt = nn.Linear(WIDTH, 1)
            self.halt.bias.data.fill_(-0.5)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            x = self.stem(x)
            halting, remainders, updates = (torch.zeros(x.shape[:2]) for _ in range(3))
            before = torch.zeros_like(x)
            step = 0
            while ((halting < 0.9) & (updates < 4)).byte().any():
                x = x + 0.1 * step
                p = torch.sigmoid(self.halt(x)).squeeze(-1)
                running = (halting < 1.0).to(x.dtype)
                new = (halting + p * running > 0.9).to(x.dtype) * running
                running = (halting + p * running <= 0.9).to(x.dtype) * running
                halting = halting + p * running
                remainders = remainders + new * (1 - halting)
                halting = halting + new * remainders
                updates = updates + running + new
                weights = p * running + new * remainders
                x = self.blocks[0](x)
                before = x * weights.unsqueeze(-1) + before * (1 - weights.unsqueeze(-1))
                step += 1
            self.mean_updates = float(updates.mean())
            logits = self.head(before)
            return logits if y is None else self.loss(logits, y) + 0.01 * (remainders + updates).mean()

    train(t, Halting(), num_steps=4)


@attack(
    "parts",
    "steps of pondering, each with a chance to halt; losses weighed by it, a geometric prior (PonderNet)",
    only=EXACT,
)
def ponders(t: Trial) -> None:
    class Pondering(Net):
        def __init__(self) -> None:
            super().__init__([nn.GRUCell(WIDTH, WIDTH)], sequential=False)
            self.halt = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = self.stem(x).mean(1)
            h = self.blocks[0](x, torch.zeros_like(x))
            left, halted = torch.ones(len(x)), torch.zeros(len(x))
            found, chosen = [], torch.zeros(len(x))
            for n in range(1, 5):
                rate = torch.ones(len(x)) if n == 4 else torch.sigmoid(self.halt(h))[:, 0]
                p = left * rate
                left = left * (1 - rate)
                now = torch.bernoulli(rate.detach()) * (1 - halted)
                found.append((p, self.head(h)))
                chosen, halted = chosen + n * now, halted + now
                h = self.blocks[0](x, h)
                if not self.training and halted.sum() == len(x):
                    break
            ps, logits = zip(*found, strict=True)
            return torch.stack(ps), torch.stack(logits), chosen

    model = Pondering()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    prior = torch.tensor([0.4 * 0.6**n for n in range(4)])
    for step in range(4):
        x, y = tokens(step)
        ps, logits, chosen = model(x)
        losses = torch.stack([functional.cross_entropy(each, y[:, 0], reduction="none") for each in logits])
        loss = (ps * losses).sum(0).mean()
        divergence = functional.kl_div(ps.t().log(), prior[None].expand(len(x), -1), reduction="batchmean")
        (loss + 0.01 * divergence).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        t.note("chosen", chosen)
        t.end_step()


@attack(
    "exceptions",
    "exits after each layer are an exception with the answer inside, in evaluation; in training the trunk, then the exits (DeeBERT)",
    only=EXACT,
)
def exits_by_exception(t: Trial) -> None:
    class Exit(Exception):
        def __init__(self, answer: torch.Tensor, layer: int) -> None:
            super().__init__(f"left at {layer}")
            self.answer, self.layer = answer, layer

    class Exits(Net):
        def __init__(self) -> None:
            super().__init__([Block() for _ in range(3)], sequential=False)
            self.exits = nn.ModuleList(nn.Linear(WIDTH, NUM_CLASSES) for _ in range(2))

        def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            x, answers = self.stem(x), []
            for i, block in enumerate(self.blocks):
                x = block(x)
                if i < len(self.exits):
                    answer = self.exits[i](x.mean(1))
                    answers.append(answer)
                    entropy = torch.distributions.Categorical(logits=answer, validate_args=True).entropy().mean()
                    if not self.training and float(entropy) < 1.9:
                        raise Exit(answer, i)
            return x, answers

        def forward(self, x: torch.Tensor, y: torch.Tensor, trains_exits: bool = False) -> torch.Tensor:
            try:
                x, answers = self.encode(x)
                logits = self.head(x.mean(1))
            except Exit as left:
                logits, answers = left.answer, []
            if trains_exits:
                return sum(functional.cross_entropy(each, y[:, 0]) for each in answers)
            return functional.cross_entropy(logits, y[:, 0])

    model = Exits()
    first = torch.optim.AdamW([p for n, p in model.named_parameters() if "exits" not in n], lr=1e-2)
    second = torch.optim.AdamW(model.exits.parameters(), lr=1e-2)
    t.apply(model, first, second)
    for step in range(6):
        optimizer = first if step < 3 else second
        model.train()
        loss = model(*tokens(step), trains_exits=step >= 3)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        model.eval()
        with torch.no_grad():
            t.note("judged", model(*tokens(20 + step)))
        t.end_step()


@attack(
    "gradients",
    "a small net fills in masked tokens, drawn with Gumbel noise, and a large one finds those replaced, in one loss (ELECTRA)",
    only=EXACT,
)
def replaced_tokens(t: Trial) -> None:
    generator, model = Net([Block()]), Net()
    generator.stem = model.stem  # type: ignore[assignment]  # shared, as embeddings are there
    words = torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    finds = nn.Linear(NUM_CLASSES, 1)
    parameters = {id(p): p for each in (generator, model, finds) for p in each.parameters()}
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=1e-2)
    t.track(generator)
    t.track(finds)
    t.apply(model, optimizer)
    for step in range(5):
        y = tokens(step)[1]
        table = words.to(torch.get_default_dtype())
        masked = torch.rand(y.shape) < 0.3
        seen = table[y].masked_fill(masked[..., None], 0.0)
        logits = generator(seen)
        filled = functional.cross_entropy(logits[masked], y[masked]) if bool(masked.any()) else 0.0 * logits.sum()
        with torch.no_grad():
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
            drawn = (logits.detach() + noise).argmax(-1)
        mixed = torch.where(masked, drawn, y)
        replaced = (mixed != y).to(logits.dtype)
        found = finds(model(table[mixed])).squeeze(-1)
        loss = filled + 5.0 * functional.binary_cross_entropy_with_logits(found, replaced)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("drawn", drawn)
        t.end_step()


@attack(
    "parts",
    "the model gives its logits as a list of parts, and the loss sums over them (chunked outputs of torchtune)",
    only=EXACT,
)
def output_in_parts(t: Trial) -> None:
    class Parted(Net):
        num_output_chunks = 3

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            hidden = self.features(x)
            return [self.head(part) for part in hidden.chunk(self.num_output_chunks, dim=1)]

    model = Parted()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    num_tokens, running = 0, 0.0
    for step in range(6):
        x, y = tokens(step)
        y = y.masked_fill(y == step % NUM_CLASSES, -100)
        labels = torch.hstack((y[..., 1:], torch.full_like(y[:, :1], -100)))
        now = int((labels != -100).sum())
        num_tokens += now
        total = torch.zeros(())
        for logits, targets in zip(model(x), labels.chunk(3, dim=1), strict=True):
            total = total + functional.cross_entropy(
                logits.reshape(-1, NUM_CLASSES), targets.reshape(-1), ignore_index=-100, reduction="sum"
            )
        loss = total / now * now
        running += float(loss.detach())
        loss.backward()
        if step % 2:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad *= 1 / num_tokens
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            t.note("running", running / num_tokens)
            num_tokens, running = 0, 0.0
        t.end_step()


@attack(
    "gradients",
    "lengths grow, rates of dropout follow, an evaluation comes in the middle of an accumulation, and the best is saved",
)
def evaluated_within_accumulation(t: Trial) -> None:
    class Wet(Block):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.inner(x))

    model = Net([Wet(), Wet()])
    optimizer = adamw(model)
    t.apply(model, optimizer)
    best: Any = None
    for step in range(9):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.05 * (step // 3)
        length = TOKENS - 2 + step // 3
        x, y = tokens(step)
        (model(x[:, :length], y[:, :length]) / 3).backward()
        if step % 3 == 1:
            model.eval()
            with torch.no_grad():
                judged = float(model(*tokens(50)))
            model.train()
            if best is None or judged < best[0]:
                best = (judged, {k: v.detach().clone() for k, v in model.state_dict().items()})
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        t.end_step()
    model.load_state_dict(best[1])
    t.end_step()


@attack(
    "gradients",
    "coordinates of blocks by turns: one block at a time has an optimizer's group and a master copy, the rest none (BAdam)",
    only=EXACT,
)
def one_block_at_a_time(t: Trial) -> None:
    model = Net([Block() for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.apply(model, optimizer)
    order = [0, 2, 1]
    random.shuffle(order)
    for step in range(6):
        if step % 2 == 0:
            active = f"blocks.{order[step // 2]}"
            for name, p in model.named_parameters():
                p.requires_grad_(active in name or "head" in name)
                p.grad = None
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer.param_groups[0]["params"] = trained
            optimizer.state.clear()
        loss = model(*tokens(step))
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "a gate of depth that the engine hands down as keywords decides by numpy which layers run (progressive layer dropping)",
)
def progressive_layer_drop(t: Trial) -> None:
    import numpy as np

    class Dropping(Block):
        def forward(self, x: torch.Tensor, *, theta: float = 1.0, depth: int = 0) -> torch.Tensor:
            keep = 1 - (1 - theta) * (depth + 1) / 3
            if self.training and np.random.binomial(1, keep) == 0:
                return x
            return x + self.inner(x) / keep

    class Progressive(Net):
        def __init__(self) -> None:
            super().__init__([Dropping() for _ in range(3)], sequential=False)
            self.theta = 1.0

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for i, block in enumerate(self.blocks):
                x = block(x, theta=self.theta, depth=i)
            return x

    model = Progressive()

    def after(step: int) -> None:
        model.theta = 0.5 + 0.5 * float(np.exp(-0.5 * (step + 1)))

    train(t, model, num_steps=6, after=after)


@attack(
    "gradients",
    "steps are weighed by bandit-like shares of data sources, whose losses the loop keeps (mixtures of domains)",
)
def mixture_of_domains(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    weights, reference = torch.ones(3) / 3, torch.tensor([1.6, 1.7, 1.8])
    for step in range(5):
        domains = torch.tensor([step % 3, (step + 1) % 3, (2 * step) % 3, 2])
        x, y = tokens(step)
        losses = functional.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(1)
        excess = torch.zeros(3).index_add_(0, domains, (losses.detach() - reference[domains]).clamp(min=0))
        weights = weights * torch.exp(0.5 * excess)
        weights = 0.9 * weights / weights.sum() + 0.1 / 3
        loss = (weights[domains] * losses).sum() / weights[domains].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("weights", weights)
        t.end_step()
