"""What a trace did not reach is named also where the model has another name than that of the training loop. Source alone is read."""

import pytest

from tightfit.capture.after_steps.rewritten_program import RewrittenProgram
from tightfit.capture.after_steps.unreached import not_reached

LOOP = """
import copy, torch, wandb
import torch.nn.functional as F
model = build(config)
optimizer = torch.optim.SGD(model.parameters())
{before}
for step in range(100):
    model(x).sum().backward()
    optimizer.step()
    if step and step % 10 == 0:
        {branch}
"""


def named(before: str, branch: str) -> list[str]:
    program = RewrittenProgram()
    assert program.compiled(LOOP.format(before=before, branch=branch).encode(), "/home/me/train.py") is not None
    return [each.what for each in not_reached(program, (len(program.loops) - 1,), (), is_stopped=False)]


@pytest.mark.parametrize(
    ("before", "branch", "what"),
    [
        ("raw = model", "losses = [raw(b)[0].float().logsumexp(-1).mean().item() for b in batches]", "raw()"),
        ("raw = model.module if parallel else model", "raw(x)", "raw()"),
        ("ema = copy.deepcopy(model).eval()", "y = ema(x)", "ema()"),
        ("net = torch.compile(model)", "y = net(x)", "net()"),
        ("net = load('x').to('cuda')\nother = net.cuda()", "y = other(x)", "other()"),
        ("net, other, loader = accelerator.prepare(model, optimizer, loader)", "y = net(x)", "net()"),
        ("teacher = copy.deepcopy(model); models = {'t': teacher, 's': model}", "models['t'](x)", "models['t']()"),
        ("models = [model, other]", "[m(x) for m in models]", "m()"),
        ("class Net(torch.nn.Module):\n    def forward(self, x): return x\nnet = Net()", "y = net(x)", "net()"),
        ("def scores(f, xs): return [f(x) for x in xs]", "scores(model, xs)", "scores()"),
        ("average = torch.optim.swa_utils.AveragedModel(model)", "y = average(x)", "average()"),
        ("", "score = fid.compute_with(model, loader)", "fid.compute_with()"),
        ("", "features = [model.encode_image(b) for b in batches]", "model.encode_image()"),
        ("", "z = model.module.embed(x)", "model.module.embed()"),
        ("", "similar = queries @ keys.T", "queries @ keys.T"),
        ("", "d = torch.cdist(a, b)", "torch.cdist()"),
        ("", "loss = F.cross_entropy(a, b)", "F.cross_entropy()"),
        ("", "values = torch.linalg.svdvals(a)", "torch.linalg.svdvals()"),
    ],
)
def test_other_names_of_a_model_are_known(before: str, branch: str, what: str) -> None:
    assert named(before, branch) == [what]


@pytest.mark.parametrize(
    ("before", "branch"),
    [
        ("", "print(step, loss.item())"),
        ("", "wandb.log({'loss': loss.item()}, step=step)"),
        ("", "wandb.watch(model)"),
        ("", "print(model)"),
        ("best = 1", "best = min(best, loss.item())"),
        ("", "torch.save(model.state_dict(), path)"),
        ("", "scheduler.step()"),
        ("", "model.eval(); model.requires_grad_(False); model.set_epoch(1); model.log('loss', 1)"),
        ("", "n = sum(p.numel() for p in model.parameters())"),
        ("x = x.to('cuda')", "writer.add_images('x', x)"),
        ("scaler.load_state_dict(old)", "lr = lr_of(optimizer, scaler)"),
        ("", "lr = optimizer.param_groups[0]['lr']"),
        ("", "logger.info('%s', model)"),
        ("history = []", "history.append(float(loss))"),
    ],
)
def test_what_needs_no_gpu_is_not_named(before: str, branch: str) -> None:
    assert named(before, branch) == []
