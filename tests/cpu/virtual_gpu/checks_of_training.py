"""Modules, autograd, autocast, optimizers and loaders on the virtual card."""

import copy
import inspect
import warnings

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

WIDTH = 64
WEIGHT_BYTES = WIDTH * WIDTH * 4


def allocated():
    return torch.cuda.memory_allocated()


def batch(rows=4):
    return torch.randn(rows, WIDTH, device="cuda")


def a_move_keeps_parameters_the_objects_they_were():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    held = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.cuda()
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert all(p.is_cuda and p.is_leaf and p.requires_grad for p in optimizer.param_groups[0]["params"])
    model(batch()).sum().backward()
    optimizer.step()
    assert held[0].grad.is_cuda
    assert len(optimizer.state) == 4
    model.cpu()
    assert held[0].is_cpu
    assert held[0].grad.is_cpu
    model.to("cuda")
    assert held[0].is_cuda


def a_copy_of_a_module_moves_and_casts_like_any_other():
    model = nn.Linear(WIDTH, WIDTH).cuda()
    before = allocated()
    for convert in (nn.Module.half, nn.Module.cpu, nn.Module.double, lambda copied: copied.to("meta")):
        copied = convert(copy.deepcopy(model))
        assert copied.weight.device.type == copied.weight.data.device.type
        assert copied.weight.shape == model.weight.shape
        assert copied.weight.is_leaf
    assert copied.weight.is_meta
    assert not copied.weight.is_cuda
    del copied
    assert allocated() == before
    assert copy.deepcopy(model).to("meta").to_empty(device="cuda").weight.is_cuda
    assert model.weight.detach().to("meta").is_meta


def tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(self.table(tokens))

    before = allocated()
    model = Tied().cuda()
    assert model.head.weight is model.table.weight
    assert allocated() == before + WEIGHT_BYTES
    model(torch.randint(0, WIDTH, (3,), device="cuda")).sum().backward()
    model.half()
    assert model.head.weight is model.table.weight
    assert model.head.weight.dtype == torch.float16


def half_and_back_change_the_size():
    before = allocated()
    model = nn.Linear(WIDTH, WIDTH, bias=False).cuda()
    held = model.weight
    assert allocated() == before + WEIGHT_BYTES
    model.half()
    assert allocated() == before + WEIGHT_BYTES // 2
    model.bfloat16().float().double()
    assert allocated() == before + WEIGHT_BYTES * 2
    model.cpu()
    assert allocated() == before
    assert model.weight is held
    assert model.weight.is_cpu


def data_can_be_exchanged():
    model = nn.Linear(WIDTH, WIDTH).cuda()
    model.weight.data = torch.zeros(WIDTH, WIDTH, device="cuda")
    model.weight.data = model.weight.data.half()
    assert model.weight.dtype == torch.float16
    model.weight.data = torch.zeros(WIDTH, 2 * WIDTH, device="cuda")
    assert model.weight.shape == (WIDTH, 2 * WIDTH)
    model.weight.data.mul_(2)
    model.weight.data.copy_(torch.ones(WIDTH, 2 * WIDTH))
    with torch.no_grad():
        model.weight.copy_(torch.zeros(WIDTH, 2 * WIDTH))
        model.weight.add_(1)
    host = nn.Linear(2, 2)
    host.weight.data = host.weight.data.cuda()
    assert host.weight.is_cuda
    assert isinstance(host.weight, nn.Parameter)
    host.weight.grad = torch.zeros(2, 2, device="cuda")


def a_state_dict_can_be_loaded():
    model, other = nn.Linear(WIDTH, WIDTH).cuda(), nn.Linear(WIDTH, WIDTH)
    model.load_state_dict(other.state_dict())
    other.load_state_dict(model.state_dict())
    assert model.weight.is_cuda
    assert other.weight.is_cpu
    other.load_state_dict(model.state_dict(), assign=True)
    assert other.weight.is_cuda


def autocast_keeps_its_copies_until_the_context_ends():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)).cuda()
    inputs = batch()
    torch.cuda.current_blas_handle = getattr(torch.cuda, "current_blas_handle", None)
    model(inputs)
    before = allocated()
    for context in (torch.autocast("cuda", torch.float16), torch.cuda.amp.autocast(dtype=torch.bfloat16)):
        with context:
            out = model(inputs)
            assert out.dtype in (torch.float16, torch.bfloat16)
            shape_bytes = out.numel() * 2
            del out
            copies = allocated() - before
            assert copies >= WEIGHT_BYTES  # two half copies of two weights
            assert torch.is_autocast_enabled("cuda")
            assert functional.softmax(inputs.half(), -1).dtype == torch.float32
            assert functional.mse_loss(inputs.half(), inputs.half()).dtype == torch.float32
        assert shape_bytes
        assert allocated() == before
    with torch.autocast("cuda"):
        assert model(inputs).dtype == torch.float16
        with torch.autocast("cuda", enabled=False):
            assert model(inputs).dtype == torch.float32


def weights_leave_the_card_while_autocast_keeps_their_copies():
    inputs = torch.randn(8, 256, device="cuda")
    functional.linear(inputs, inputs)
    before = torch.cuda.memory_allocated()
    weight = nn.Parameter(torch.randn(256, 256, device="cuda"))
    copy_bytes = 2 * 256 * 256
    with torch.autocast("cuda", torch.bfloat16):
        # What the graph saves goes with it; what the cache holds does not.
        assert functional.linear(inputs, weight).is_cuda
        weight.data = torch.empty(256, 256)
        assert weight.device.type == "cpu"
        assert torch.cuda.memory_allocated() == before + copy_bytes
        weight.data = torch.empty(256, 256, device="cuda")
        assert functional.linear(inputs, weight).is_cuda
        assert torch.cuda.memory_allocated() == before + 2 * copy_bytes + copy_bytes
        weight.data = torch.empty(256, 256)
        assert torch.cuda.memory_allocated() == before + copy_bytes
    assert torch.cuda.memory_allocated() == before


def a_gradient_scaler_skips_no_step():
    for scaler in (_old_scaler(), torch.amp.GradScaler("cuda")):
        model = nn.Linear(WIDTH, WIDTH).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.autocast("cuda", torch.float16):
            loss = model(batch()).float().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.state[model.weight]["exp_avg"].is_cuda
        assert scaler.get_scale() > 0
        scaler.load_state_dict(scaler.state_dict())


def fused_optimizers_of_any_size_take_a_scaler_and_a_rate_on_the_card():
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        for rate in (0.1, torch.tensor(0.1, device="cuda")):
            model = nn.Linear(24_000, 24_000, bias=False, device="cuda")
            optimizer = kind(model.parameters(), lr=rate, fused=True)
            scaler = torch.amp.GradScaler("cuda")
            scaler.scale(model(torch.ones(1, 24_000, device="cuda")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            del model, optimizer


def _old_scaler():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.amp.GradScaler()


def compiled_modules_run_as_eager_ones():
    model = torch.compile(nn.Linear(WIDTH, WIDTH).cuda(), mode="max-autotune")
    model(batch()).sum().backward()

    @torch.compile
    def function(x):
        return x.sin().cos()

    @torch.compile(fullgraph=True)
    def other(x):
        return x * 2

    assert other(function(batch())).shape == (4, WIDTH)
    module = nn.Linear(WIDTH, WIDTH).cuda()
    module.compile()
    assert module(batch()).is_cuda


def a_loader_with_workers_and_pinned_memory_feeds_the_card():
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8))
    for workers in (0, 1):
        loader = torch.utils.data.DataLoader(
            data,
            batch_size=4,
            num_workers=workers,
            pin_memory=True,
            shuffle=True,
            persistent_workers=bool(workers),
        )
        seen = []
        for x, y in loader:
            assert x.is_pinned()
            assert x.to("cuda", non_blocking=True).shape == (4, 3)
            seen += y.cuda().tolist()
        assert sorted(seen) == list(range(8))


def checkpointing_of_both_kinds_recomputes():
    for use_reentrant in (True, False):
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        blocks.cuda()
        x = batch().requires_grad_()
        out = x
        for block in blocks:
            out = checkpoint(block, out, use_reentrant=use_reentrant)
        out.sum().backward()
        assert x.grad.is_cuda
        assert blocks[0][0].weight.grad.is_cuda
    sequence = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).cuda()
    torch.utils.checkpoint.checkpoint_sequential(sequence, 2, batch(), use_reentrant=False).sum().backward()


def custom_functions_differentiate():
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    x = batch().requires_grad_()
    Square.apply(x).sum().backward()
    assert x.grad.shape == x.shape
    with torch.autocast("cuda", torch.float16):
        assert Square.apply(x).dtype == torch.float16
    (gradient,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    x.register_hook(lambda gradient: gradient * 2)
    x.sum().backward()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = x.sin()
    out.sum().backward()


def layers_of_attention_and_recurrence_train():
    x = torch.randn(2, 10, WIDTH, device="cuda")
    mask = torch.zeros(2, 10, dtype=torch.bool, device="cuda")
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).cuda()
    _, weights = attention(x, x, x, key_padding_mask=mask)
    assert weights.shape == (2, 10, 10)
    attention(x, x, x, need_weights=False)[0].sum().backward()
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).cuda()
    encoder(x, src_key_padding_mask=mask).sum().backward()
    with torch.no_grad():
        assert encoder.eval()(x, src_key_padding_mask=mask).shape == (2, 10, WIDTH)
        assert encoder(x).shape == (2, 10, WIDTH)
    nn.Transformer(WIDTH, 4, 1, 1, 128, batch_first=True).cuda()(x, x).sum().backward()
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        net = kind(WIDTH, 32, 2, bidirectional=True, batch_first=True, dropout=0.1).cuda()
        net.flatten_parameters()
        net(x)[0].sum().backward()
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([10, 7]), batch_first=True)
        unpacked, _ = nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)
        assert unpacked.shape == (2, 10, 64)
        with torch.no_grad():
            net.eval()(x)
    for cell in (nn.LSTMCell, nn.GRUCell):
        hidden = cell(WIDTH, 32).cuda()(x[:, 0])
        (hidden[0] if isinstance(hidden, tuple) else hidden).sum().backward()
    q = torch.randn(2, 4, 10, 16, device="cuda", requires_grad=True)
    functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(10, 10, device="cuda")).sum().backward()


def recurrent_layers_are_in_float16_under_autocast_of_any_kind():
    net = nn.LSTM(WIDTH, 32, 2, bidirectional=True).cuda()
    x = torch.randn(10, 2, WIDTH, device="cuda", requires_grad=True)
    free = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = net(x)[0]
    assert out.dtype == torch.float16
    # The weights in float16, as one buffer, stay until the backward pass.
    assert torch.cuda.memory_allocated() - free > 2 * sum(p.numel() for p in net.parameters())
    out.sum().backward()
    assert {p.grad.dtype for p in (x, *net.parameters())} == {torch.float32}
    with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
        assert net(x)[0].dtype == torch.float16
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.GRU(WIDTH, 32).cuda().double()(x.double())[0].dtype == torch.float64


def flexible_attention_runs_eagerly():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = torch.randn(1, 2, 128, 16, device="cuda", requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cuda")
    flex_attention(q, q, q, block_mask=mask).sum().backward()
    flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j)).sum().backward()
    assert q.grad.shape == q.shape


def every_optimizer_steps():
    skipped = {"Optimizer", "LBFGS", "SparseAdam"}
    found = {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }
    assert {"Adafactor", "AdamW", "NAdam", "Rprop"} <= found
    for name in sorted(found - skipped):
        kind = getattr(torch.optim, name)
        accepted = inspect.signature(kind).parameters
        settings = [{}]
        settings += [{flag: value} for flag in ("foreach", "fused") if flag in accepted for value in (True, False)]
        for setting in settings:
            model = nn.Linear(WIDTH, WIDTH, bias=name != "Muon").cuda()
            optimizer = kind(model.parameters(), lr=0.01, **setting)
            for _ in range(2):
                model(batch()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def the_optimizers_with_closures_and_sparse_gradients_step():
    model = nn.Linear(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    table = nn.Embedding(100, 16, sparse=True).cuda()
    for sparse in (torch.optim.SparseAdam(table.parameters()), torch.optim.SGD(table.parameters(), lr=0.1)):
        table(torch.randint(0, 100, (7,), device="cuda")).sum().backward()
        assert table.weight.grad.is_sparse
        sparse.step()
        sparse.zero_grad()
    bag = nn.EmbeddingBag(100, 16, mode="mean").cuda()
    bag(torch.randint(0, 100, (3, 5), device="cuda")).sum().backward()
    optimizer = torch.optim.AdamW(
        nn.Linear(4, 4).cuda().parameters(), lr=torch.tensor(0.1), capturable=True, foreach=True
    )
    assert optimizer.param_groups[0]["lr"].item() > 0


def gradients_are_clipped_averaged_and_accumulated():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).cuda()
    average = copy.deepcopy(model).requires_grad_(False)
    torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    for _ in range(2):
        (model(batch()).mean() / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm.item(), float)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    for held, now in zip(average.parameters(), model.parameters(), strict=True):
        held.lerp_(now, 0.1)
    torch._foreach_lerp_(list(average.parameters()), [p.detach() for p in model.parameters()], 0.1)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector, model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    plateau.step(model(batch()).mean())


def one_card_in_parallel_is_one_card():
    model = nn.DataParallel(nn.Linear(WIDTH, WIDTH).cuda())
    model(batch()).sum().backward()
    assert model.module.weight.grad.is_cuda
    nn.DataParallel(nn.Linear(WIDTH, WIDTH).cuda(), device_ids=[0])(torch.randn(4, WIDTH)).sum().backward()


def parametrised_and_pruned_modules_train():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)).cuda()
    model(batch()).sum().backward()
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).cuda()
    spectral(batch()).sum().backward()
    pruned = nn.Linear(WIDTH, WIDTH).cuda()
    prune.random_unstructured(pruned, "weight", 0.5)
    pruned(batch()).sum().backward()
    orthogonal = nn.Linear(8, 8).cuda()
    nn.init.orthogonal_(orthogonal.weight)
    nn.init.trunc_normal_(orthogonal.weight)
    lazy = nn.LazyLinear(8).cuda()
    assert lazy(batch()).shape == (4, 8)


def normalisations_losses_and_samplers_train():
    image = torch.randn(2, 8, 16, 16, device="cuda", requires_grad=True)
    layers = [nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.SyncBatchNorm(8)]
    layers += [nn.LocalResponseNorm(2), nn.MaxPool2d(2, return_indices=False), nn.AdaptiveAvgPool2d(3)]
    layers += [
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.PixelShuffle(2),
        nn.Dropout2d(),
        nn.ConvTranspose2d(8, 4, 2),
    ]
    for layer in layers:
        layer.cuda()(image).sum().backward()
    logits, targets = torch.randn(6, 5, device="cuda", requires_grad=True), torch.randint(0, 5, (6,), device="cuda")
    for loss in (nn.CrossEntropyLoss(label_smoothing=0.1), nn.MultiMarginLoss(), nn.NLLLoss()):
        loss.cuda()(logits, targets).backward()
    for loss in (nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss(), nn.KLDivLoss()):
        loss(logits, torch.rand(6, 5, device="cuda")).backward()
    log_probabilities = torch.randn(12, 2, 5, device="cuda", requires_grad=True).log_softmax(2)
    lengths = torch.tensor([12, 9]), torch.tensor([3, 4])
    functional.ctc_loss(log_probabilities, torch.randint(1, 5, (2, 4), device="cuda"), *lengths).backward()
    grid = functional.affine_grid(torch.zeros(2, 2, 3, device="cuda"), (2, 8, 4, 4), align_corners=False)
    functional.grid_sample(image, grid, align_corners=False).sum().backward()
    nn.RMSNorm(16).cuda()(image).sum().backward()
    functional.scaled_dot_product_attention(image, image, image).sum().backward()


def what_a_backward_pass_constructs_lies_on_the_card():
    chosen = []

    def block(x):
        chosen.append(torch.tensor([1.0, 2.0], device=x.device))
        chosen.append(x[[0, 2]])
        return torch.cat([torch.tensor([], device=x.device), x.relu().flatten()])

    checkpoint(block, batch().requires_grad_(), use_reentrant=False).sum().backward()
    assert len(chosen) == 4
    assert all(tensor.is_cuda for tensor in chosen)
    assert chosen[2].tolist() == [1.0, 2.0]
