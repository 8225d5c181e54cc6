"""Steps an optimizer of torch.optim for one parameter alone, or runs an update of ours inside of its step.

The optimizer stays the script's own object, and its `step` is not replaced: schedulers have wrapped it, and count its calls. Our update runs as
the closure of that step, which torch calls after all hooks of the script and before any update; the step then skips the parameters that were
updated, because their gradients are hidden, and these are restored before the script's next hook.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tightfit.effects.optimizer_marks import has_torchs_step
from tightfit.errors import ApplyError
from tightfit.techniques.session import Session
from tightfit.techniques.wrappers.put_gradients import put_gradient

UpdateOne = Callable[[torch.Tensor, int], None]
Groups = list[dict[str, Any]]

# These update every parameter from its own gradient and state only; LBFGS looks at all of them together.
_NOT_SEPARABLE = ("LBFGS",)


def check_separable(optimizer: torch.optim.Optimizer, technique: str) -> None:
    """Checks that `optimizer` updates every parameter independently, as all but one of torch.optim do.

    Raises:
        ApplyError: it is not known to.
    """
    kind = type(optimizer)
    if not has_torchs_step(optimizer) or kind.__name__ in _NOT_SEPARABLE:
        raise ApplyError(
            f"{kind.__module__}.{kind.__name__} is not known to update each parameter independently; leave "
            f"{technique} out of the plan"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ApplyError(
            f"{kind.__name__}(differentiable=True) cannot be stepped one parameter at a time; leave {technique} out "
            "of the plan"
        )
    _check_types(optimizer, f"leave {technique} out of the plan")
    if overlap(p for group in optimizer.param_groups for p in group["params"]):
        raise ApplyError(
            f"two parameters of the {kind.__name__} share memory, and cannot be updated separately; leave "
            f"{technique} out of the plan"
        )


def _check_types(optimizer: torch.optim.Optimizer, remedy: str) -> None:
    """Checks that a parameter alone is updated as it is among those of its group: torch's Adafactor takes an epsilon of None from the first one's type, for all
    of them (torch/optim/_adafactor.py, `_single_tensor_adafactor`).

    Raises:
        ApplyError: it is not.
    """
    if not isinstance(optimizer, torch.optim.Adafactor):
        return
    for group in optimizer.param_groups:
        if group["eps"][0] is None and len({p.dtype for p in group["params"]}) > 1:
            raise ApplyError(
                "Adafactor(eps=(None, ...)) holds parameters of several dtypes in one group, and takes its epsilon "
                f"from the first; set eps to a number, give each dtype its own group, or {remedy}"
            )


def overlap(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether two of them share a byte, as views of one buffer may; adjacent views do not."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for parameter in parameters:
        if parameter.layout == torch.strided and parameter.numel():
            size = parameter.element_size()
            last = sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True))
            begin = int(parameter.storage_offset()) * size
            in_storage = ranges.setdefault(parameter.untyped_storage()._cdata, [])
            in_storage.append((begin, begin + (int(last) + 1) * size))
    ordered = map(sorted, ranges.values())
    return any(one[1] > other[0] for of_one in ordered for one, other in itertools.pairwise(of_one))


def groups_by_parameter(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    """The index of each parameter's group: loading a checkpoint replaces the group objects."""
    return {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


def beside(optimizer: torch.optim.Optimizer, groups: Groups, states: dict[torch.Tensor, Any]) -> torch.optim.Optimizer:
    """An optimizer of the same class with these groups and states, and without hooks; the script's own is unchanged."""
    # The constructor would check its arguments again, and notify the owners of new optimizers.
    made = object.__new__(type(optimizer))
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if not name.endswith("_hooks")})
    made.param_groups, made.state = groups, states  # type: ignore[assignment]
    return made


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of this optimizer's class, without hooks and without the wrappers of schedulers."""
    # torch wraps the step of each optimizer class for hooks and the profiler (`_patch_step_function`,
    # torch/optim/optimizer.py), and marks it `hooked`.
    step = type(optimizer).step
    return vars(step)["__wrapped__"] if getattr(step, "hooked", False) else step


def update_alone(optimizer: torch.optim.Optimizer) -> UpdateOne:
    """A function that updates one parameter, of the group with this index, as the optimizer's step would."""
    step, known = step_of(optimizer), weakref.ref(optimizer)

    def update(parameter: torch.Tensor, group: int) -> None:
        live = known()
        assert live is not None
        step(beside(live, [{**live.param_groups[group], "params": [parameter]}], live.state))

    return update


class Innermost:
    """Runs `update` within the steps of one optimizer; it returns the parameters that torch's own loop is to skip. `before` and `after` are hooks of its step, `after` the
    first of its kind."""

    def __init__(self, update: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._update = update
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_states = 0
        self._is_over = False

    def end(self) -> None:
        """The session is undone, by the step's own closure perhaps: the update is torch's from now on."""
        self._is_over = True

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of the step, with a closure that runs `update` when all hooks before the step are through."""
        # Gradients that a step has left hidden were those of a step that was interrupted.
        self._hidden.clear()
        # Of a table that is refused to the program (`ranks/sharded`) too.
        self._num_states = dict.__len__(optimizer.state)
        _check_types(optimizer, "plan without the technique that updates parameters one by one")
        if not has_torchs_step(optimizer):
            # A step of the program's may take no closure, or do something else with one.
            with torch.no_grad():
                self._hide(self._update())
            return args, kwargs
        closure = args[1] if len(args) > 1 else kwargs.get("closure")

        def closure_and_update() -> Any:
            loss = closure() if closure is not None else None
            if self._is_over:
                return loss
            # The step calls its closure with gradients enabled (torch/optim/adam.py, `step`).
            with torch.no_grad():
                # Every step of torch.optim skips parameters without a gradient.
                self._hide(self._update())
            return loss

        # A pre-hook may return other arguments for the step (torch/optim/optimizer.py, `profile_hook_step`).
        return args[:1], {**kwargs, "closure": closure_and_update}

    def _hide(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def after(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Puts back the gradients of what was skipped."""
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            put_gradient(parameter, gradient)
        _in_order(optimizer, self._num_states)


def _in_order(optimizer: torch.optim.Optimizer, num_before: int) -> None:
    """Puts the states that a step has made into the order in which torch's own loop makes them: programs go through `optimizer.state.values()`."""
    state: dict[Any, Any] = optimizer.state
    if len(state) <= num_before:
        return
    made = list(state)[num_before:]
    places = {parameter: place for place, parameter in enumerate(groups_by_parameter(optimizer))}
    ordered = {key: state[key] for key in sorted(made, key=lambda key: places.get(key, len(places)))}
    if [id(key) for key in ordered] == [id(key) for key in made]:
        return
    try:
        for key, value in ordered.items():
            del state[key]
            state[key] = value
    finally:
        # An interrupt may come in between.
        for key, value in ordered.items():
            state.setdefault(key, value)


def update_within_step(
    session: Session, optimizer: torch.optim.Optimizer, update: Callable[[], Iterable[torch.Tensor]]
) -> None:
    """Runs `update` whenever `optimizer` steps, after closures and the script's own hooks, until the session is undone: before both where the step is
    not torch's own (see `check_separable`).

    The parameters that it returns are not updated by the step itself.
    """
    innermost = Innermost(update)
    session.when_undone(innermost.end)
    session.hook(optimizer.register_step_pre_hook, innermost.before)
    after = session.hook(optimizer.register_step_post_hook, innermost.after)
    hooks: Any = optimizer._optimizer_step_post_hooks
    # First of all post hooks: the script's own see the gradients again.
    hooks.move_to_end(after.id, last=False)
