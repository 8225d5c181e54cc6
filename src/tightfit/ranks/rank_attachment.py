"""Finds the models of a script as they are called with gradients, and has each run on this rank's part of its batches.

Blocks that a layout recomputes get the technique that a plan of one card puts on them, with its checks, inside of what divides the model: each rank runs them again within its part.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tightfit.errors import ApplyError, TightfitError
from tightfit.ranks.divided_call import AskedGradients
from tightfit.ranks.divided_forward import DividedForward
from tightfit.ranks.rank_group import RankGroup
from tightfit.ranks.rank_plan import RankPlan
from tightfit.ranks.sharded.sharded_states import ShardedStates
from tightfit.ranks.values.content_hash import content_hash
from tightfit.runtime.apply import innermost, root_of
from tightfit.runtime.attach import Attachment
from tightfit.techniques.micro_batches.split_forward import OF_MICRO_BATCHES, WRAPPERS
from tightfit.techniques.wrappers.forwards import wrap_forward
from tightfit.techniques.wrappers.traced_calls import is_looked_at
from tightfit.torch_hooks.backward import on_backward
from tightfit.torch_hooks.calls import on_new_optimizer, on_outermost_call
from tightfit.torch_hooks.replaced import Leave
from tightfit.torch_hooks.swapped_tensors import on_swap
from tightfit.torch_hooks.tensor_hooks import on_tensor_hooks
from tightfit.torch_hooks.weak_references import WeakTable

_OF_ALL_EXAMPLES = ("works along the rows", "compares them with each other")
_IS_DISTRIBUTED = (
    "the script is distributed itself (it has a process group): start it with torchrun, without tightfit run"
)


class RankAttachment:
    """What makes a script of one card run on the ranks of `group`, as is `asked`."""

    def __init__(
        self,
        group: RankGroup,
        *,
        allows_randomness: bool,
        check_steps: int,
        asked: RankPlan,
        tell: Callable[[str], None],
    ) -> None:
        self._group = group
        self._allows_randomness = allows_randomness
        self._check_steps = check_steps
        self._asked = asked
        self._tell = tell
        self._met: WeakTable[torch.nn.Module, None] = WeakTable()
        self._states: WeakTable[torch.optim.Optimizer, ShardedStates] = WeakTable()
        self._lock = threading.RLock()
        self._gradients = AskedGradients()
        self._choices = asked.choices()
        # In the first steps a plain run of the whole batch comes before that of the part.
        self._techniques = Attachment(self._choices, tell=tell, check_steps=2 * check_steps)
        self._leaves: list[Leave] = []
        self._failure: ApplyError | None = None
        self._models: WeakTable[torch.nn.Module, DividedForward] = WeakTable()
        self._has_divided = False
        self.num_models = 0

    def begin(self) -> None:
        """Models and optimizers are watched from now on, for the rest of the process."""
        asked = on_backward(self._gradients), on_tensor_hooks(self._gradients)
        self._leaves = [on_outermost_call(self), on_new_optimizer(self), on_swap(self), *asked]
        # What was swallowed must not be followed by an update.
        self._leaves.append(register_optimizer_step_pre_hook(lambda *_: self._before_update()).remove)
        if self._choices:
            self._leaves.append(self._techniques.install())

    @property
    def failure(self) -> TightfitError | None:
        """The first refusal or disagreement, which the script may have swallowed."""
        for verdict in self._techniques.verdicts:
            if verdict.failure is not None and self._failure is None:
                self.refuse(str(verdict.failure))
        return self._group.failure or self._failure

    def _check(self) -> None:
        """Raises what was refused before.

        Raises:
            TightfitError: something was.
        """
        if self.failure is not None:
            raise self.failure

    def _before_update(self) -> None:
        self._check()
        if self._has_divided:
            return
        met = [divided for _, divided in self._models.items()]
        self._has_divided = any(divided.has_divided for divided in met)
        # The turns of an agent say nothing of the batches to come; what an update is made of does.
        if not self._has_divided and (fewest := max((divided.fewest for divided in met), default=0)):
            raise self.refuse(
                f"a batch of {fewest} cannot be divided over {self._group.size} ranks: give each at least one example"
            )

    def end(self) -> None:
        """At the end of the script, which all ranks are to reach with the same weights.

        Raises:
            TightfitError: they do not, or something was refused that the script has swallowed, or nothing was divided.
        """
        self._check()
        weights = [tensor for model, _ in self._models.items() for tensor in (*model.parameters(), *model.buffers())]
        self._group.agree("the end of the script", {
            "the number of models that were trained": self.num_models,
            "what has become of the weights": content_hash(weights),
        })  # fmt: skip
        self._group.leave()
        if not self.num_models:
            raise ApplyError("the script called no model with gradients that could be divided over ranks")
        if self._choices:
            self._techniques.report()

    def refuse(self, why: str) -> ApplyError:
        """The error to raise, on all ranks: it is raised again by whatever the script calls next."""
        if self._failure is None:
            said = why.removesuffix(OF_MICRO_BATCHES).partition("; leave it out")[0]
            if "--without checkpointing@" in why:
                said += "; the layout has it run again in the backward pass: plan one without recomputation (more GPUs, a smaller batch)"
            if "draws random numbers" in said and "--allow" not in said:
                said += "; --allow micro_batches lets each rank draw for its own part"
            if any(each in said for each in _OF_ALL_EXAMPLES):
                said += (
                    "; over all examples it is right outside of the model: have it return what is each example's own"
                )
            self._failure = ApplyError(f"this script cannot be divided over {self._group.size} ranks: {said}")
        return ApplyError(str(self._failure))

    def after_optimizer_was_made(self, optimizer: torch.optim.Optimizer) -> None:
        """A new optimizer."""
        if self._asked.shards_states:
            with self._lock:
                self._states[optimizer] = ShardedStates(optimizer, self._group, self.refuse, self._tell)

    def before_swap(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Two tensors are to be exchanged, which torch refuses where something refers to one weakly, as what watches weights does; the program may swallow that.

        Raises:
            ApplyError: something does.
        """
        if weakref.getweakrefs(one) or weakref.getweakrefs(other):
            raise self.refuse(
                "it exchanges tensors as a whole (torch.utils.swap_tensors), which are watched here: exchange their contents (copy_, load_state_dict)"
            )

    def before_outermost_call(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Divides a model that is called with gradients for the first time.

        Raises:
            TightfitError: something was refused before.
        """
        with self._lock:
            self._check()
            if not torch.is_grad_enabled() or self._group.is_inside or is_looked_at(args, kwargs):
                return
            if dist.is_available() and dist.is_initialized():
                raise self.refuse(_IS_DISTRIBUTED)
            module = innermost(module)
            if module in self._met or not any(p.requires_grad for p in module.parameters()):
                return
            if isinstance(module, ParametrizationList):
                # Torch calls it once while it makes it.
                return
            for part in module.modules():
                if type(part).__name__ in WRAPPERS:
                    raise self.refuse(
                        f"it calls its model through {type(part).__name__}, which divides the batch itself"
                    )
            self._divide(module)

    def _divide(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            if self.num_models:
                # Beside a model that is trained: it runs whole, on all ranks alike.
                return
            raise self.refuse(f"{type(module).__name__} is scripted (torch.jit), and its forward cannot be wrapped")
        name, paths = type(module).__name__, {path for path, _ in module.named_modules()}
        for verb, where in self._asked.places():
            if root_of(where) == name and where.partition(".")[2] not in paths:
                raise self.refuse(f"the layout {verb} {where}, which this {name} does not have; plan it anew")
        divided = DividedForward(
            module,
            self._group,
            allows_randomness=self._allows_randomness,
            check_steps=self._check_steps,
            refuse=self.refuse,
            micro_batch=self._asked.micro_batch,
        )
        wrap_forward(module, divided).put_on()
        for part in module.modules():
            self._met[part] = None
        self._models[module] = divided
        self.num_models += 1
        self._tell(f"on {type(module).__name__}: each batch divided over {self._group.size} ranks, gradients summed")
