"""Models that are moved or cast between steps, with gradients of the last step on them."""

import torch
from tests.attacks.models import Net, adamw, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial


@attack("changes", "after every second step the model goes to the host for an evaluation, and back")
def evaluated_at_the_host(t: Trial) -> None:
    model = Net()
    device = next(model.parameters()).device

    def evaluate(step: int) -> None:
        if step % 2:
            model.cpu()
            model.to(device).eval()
            with torch.no_grad():
                t.note("valid", model(*tokens(step)))
            model.train()

    train(t, model, after=evaluate, num_steps=5)


@attack("changes", "at the end the model is cast to half precision and kept (model.half(), state_dict())")
def half_at_the_end(t: Trial) -> None:
    model = Net()
    train(t, model, adamw(model))
    model.half()
    t.note("saved", dict(model.state_dict()))
    t.end_step()


@attack("changes", "moments are given other data in every second step (state['exp_avg'].data = ...)")
def moments_given_other_data(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def reset(step: int) -> None:
        if step % 2:
            for states in optimizer.state.values():
                states["exp_avg"].data = 0.5 * states["exp_avg"].clone()

    train(t, model, optimizer, after=reset, num_steps=5)
