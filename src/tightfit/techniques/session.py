"""A session: one model with its optimizers that techniques have been put on, and the way back.

The same object stands on the virtual GPU and on a real one. A technique changes the live objects and returns how to undo that; the session
keeps these and runs them in reverse order. What techniques have to say to a person, or count, goes through it too.

A technique that finds out while the program runs that it cannot go on rightly refuses through the session, which then lets nothing be trained until
it is undone: a program that swallows the error meets it again at its next forward or step.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.forwards import Around, wrap_forward

Undo = Callable[[], None]


@dataclasses.dataclass(slots=True, kw_only=True)
class Session:
    """`model` is the outermost module that the workload calls; `optimizers` are those that hold parameters of it.

    `loop` is the framework's object whose method computes the loss of a batch, a LightningModule or a Trainer, for what is put on that and not
    on the model; None elsewhere. `statistics` counts what happened since (`loss head chunks`, `recomputed blocks`); `notes` are sentences for the person who runs it.
    `failure` is the first refusal that came after the plan was put on, until the session is undone. `check_steps` is for how many steps what runs
    in parts or again is compared by value with what does not, in a real run.
    """

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loop: Any = None
    statistics: Counter[str] = dataclasses.field(default_factory=Counter)
    notes: list[str] = dataclasses.field(default_factory=list)
    failure: ApplyError | None = None
    check_steps: int = 2
    _is_guarded: bool = False
    _undo: list[Undo] = dataclasses.field(default_factory=list)

    def module(self, where: str) -> torch.nn.Module:
        """The module at the path `where`, which begins with the class name of the model.

        Raises:
            ApplyError: the plan was made for another model.
        """
        root, _, path = where.partition(".")
        if root != type(self.model).__name__:
            raise ApplyError(
                f"the plan is for a {root}, and this model is a {type(self.model).__name__}; make a plan for it"
            )
        try:
            return self.model.get_submodule(path)
        except AttributeError:
            raise ApplyError(
                f"the plan names {where}, which this {root} does not have; make a plan for this model"
            ) from None

    def when_undone(self, undo: Undo) -> None:
        """`undo` is run when the session is undone, before all that were given earlier."""
        self._undo.append(undo)

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Sets an attribute of a live object for the time of the session; one that the object did not have itself is deleted again."""
        own = vars(holder)
        if name in own:
            before = own[name]
            self.when_undone(lambda: setattr(holder, name, before))
        else:
            self.when_undone(lambda: delattr(holder, name))
        setattr(holder, name, value)

    def wrap_forward(self, module: torch.nn.Module, around: Around) -> None:
        """Has `around(forward, *args, **kwargs)` run in place of the module's `forward`, which it is given."""
        self.set(module, "forward", wrap_forward(module, around))

    def refuse(self, message: str, *, technique: str = "", places: Sequence[str] = ()) -> ApplyError:
        """The error to raise where user code runs already: `raise session.refuse(...)`.

        From here on the model's forwards with gradients and its optimizers' steps raise it again, until the session is undone. Of several
        refusals the first one stays; threads of the backward pass may call this.
        """
        if self.failure is None:
            self.failure = ApplyError(message, technique=technique, places=places)
            self.guard()
        return self.failure

    def check(self) -> None:
        """Does nothing in a session that has refused nothing.

        Raises:
            ApplyError: it has; the message is that of the first refusal.
        """
        if self.failure is not None:
            # Not the same object: each raise would add to its traceback.
            failure = self.failure
            raise ApplyError(str(failure), technique=failure.technique, places=failure.places) from failure

    def guard(self) -> None:
        """Has the model's forwards with gradients and its optimizers' steps call `check`, before all else that is around them.

        A technique may ask for a module whose forward is its own, so this comes after all of them.
        """
        if self._is_guarded:
            return
        self._is_guarded = True
        self.when_undone(self._is_free)

        def before_step(*_: object) -> None:
            self.check()

        for optimizer in self.optimizers:
            handle = optimizer.register_step_pre_hook(before_step)
            optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)
            self.when_undone(handle.remove)
        self.wrap_forward(self.model, self._checked)

    def _is_free(self) -> None:
        self._is_guarded, self.failure = False, None

    def _checked(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.check()
        return forward(*args, **kwargs)

    def undo(self) -> None:
        """Puts everything back as it was; the values of parameters and optimizer states stay as training has left them."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()
