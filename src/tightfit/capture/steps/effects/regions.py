"""Watches every module call with gradients: its side effects, and in-place writes to its inputs, outputs and parameters until the backward
pass begins.

Two side effects are not reported: the running statistics of torch's own norms, and what is written in the first call only (a cache).
"""

import dataclasses
import re
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.observe.attribution import user_line
from tightfit.capture.steps.effects.lines import line_of, line_of_function
from tightfit.capture.steps.effects.storage_writes import StorageWrites
from tightfit.effects.state import DRAWN, RegionState, Snapshot, StateDifference, differences
from tightfit.effects.users_code import is_users_class
from tightfit.tape import Effect, EffectKind, Phase

# Calls whose backward pass may still come: those of this step and of the one before it.
_STEPS_KEPT = 2


@dataclasses.dataclass(slots=True, kw_only=True)
class _Region:
    """One module: its path, and the effects of its first call, which count only if they recur."""

    path: str
    state: RegionState | None
    num_calls: int = 0
    first: set[Effect] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call. The nodes of its graph have the sequence numbers from `begin` up to but not including `end`; its operators are those from
    `operator` up to but not including `operator_end`. `inputs` and `outputs` are storages. `parameters` are those of an outermost call.
    """

    path: str
    step: int
    begin: int
    end: int
    operator: int
    operator_end: int
    inputs: frozenset[int]
    outputs: frozenset[int]
    module: "weakref.ref[torch.nn.Module]"
    parameters: Mapping[str, Any]


class RegionWatch:
    """The effects of modules, over all steps of a run."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._recorder = gpu.recorder
        self._path_of = gpu.attribution.path_of
        self._writes = StorageWrites(gpu)
        # Tensors that forwards write to, by `id`: a second run gets copies of them.
        self._written_to: set[int] = set()
        self._regions: weakref.WeakKeyDictionary[torch.nn.Module, _Region] = weakref.WeakKeyDictionary()
        self._calls: list[_Call] = []
        self._found: dict[Effect, None] = {}
        self._replaced_in: set[str] = set()
        self._depth = 0
        self._step = 0

    def call(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Runs one call of `module` under observation."""
        # Calls without gradients are never recomputed, and calls within a backward pass are recomputations
        # already.
        if not torch.is_grad_enabled() or self._recorder.phase != Phase.FORWARD:
            return run()
        region = self._regions.get(module)
        if region is None:
            region = self._regions[module] = self._region(module)
        before = None if region.state is None else region.state.snapshot(module, is_kept=True)
        inputs = self._writes.storages((args, kwargs)) if region.state is not None else frozenset[int]()
        # Autograd numbers nodes in the order in which a thread makes them: the nodes of a call are those
        # numbered while it runs, and a backward pass that meets one of them reaches the call.
        begin, operator = torch.autograd._get_sequence_nr(), self._recorder.num_operators
        self._depth += 1
        try:
            out = run()
        finally:
            self._depth -= 1
        region.num_calls += 1
        if region.state is not None and before is not None:
            after = region.state.snapshot(module, is_kept=True)
            for difference in differences(before, after):
                self._differs(region, module, difference, before)
        call = _Call(
            path=region.path,
            step=self._step,
            begin=begin,
            end=torch.autograd._get_sequence_nr(),
            operator=operator,
            operator_end=self._recorder.num_operators,
            inputs=inputs,
            outputs=self._writes.storages(out) if region.state is not None else frozenset[int](),
            module=weakref.ref(module),
            parameters={} if self._depth else _parameters(module),
        )
        self._calls.append(call)
        line = self._writes.line(inputs, operator, call.operator_end)
        if line is not None:
            self._note(
                Effect(module=region.path, kind=EffectKind.INPUT, what="writes to its input in place", line=line)
            )
        return out

    def _region(self, module: torch.nn.Module) -> _Region:
        path = self._recorder.strings.texts[self._path_of(module)]
        hooks = [hook for hooks in _hooks(module) for hook in hooks.values()]
        # The attributes of a scripted module lie in C++, where no snapshot sees them.
        is_script = isinstance(module, torch.jit.ScriptModule)
        # Taking snapshots costs time in each call. A leaf module of torch without hooks (`Linear`, `GELU`) is
        # known to write nothing but statistics of norms.
        has_own_code = bool(module._modules) or is_users_class(type(module)) or bool(hooks)
        for hook in hooks:
            line = line_of_function(hook)
            if line:
                name = getattr(hook, "__name__", type(hook).__name__)
                self._note(Effect(module=path, kind=EffectKind.HOOK, what=f"calls the hook {name}", line=line))
        if not is_script and parametrize.is_parametrized(module):
            what = "computes its weights at each read, as parametrizations do"
            self._note(Effect(module=path, kind=EffectKind.PARAMETRIZED, what=what))
        return _Region(path=path, state=RegionState() if has_own_code and not is_script else None)

    def _differs(self, region: _Region, module: torch.nn.Module, difference: StateDifference, before: Snapshot) -> None:
        tensor = difference.tensor
        if tensor is not None:
            self._written_to.add(id(tensor))
            if _is_statistic(module, tensor):
                return
        # `layers.0.cache` and `layers.1.cache` are one finding, `layers.*.cache`.
        path = re.sub(r"\.\d+(?=\.)", ".*", difference.path)
        line = line_of(module, difference.path)
        if difference.is_in_place and tensor is not None:
            verb = "gives other data to" if "data" in difference.what else "writes in place to"
            kind = EffectKind.WRITE if _can_stand_aside(before, tensor) else EffectKind.IN_PLACE
            effect = Effect(module=region.path, kind=kind, what=f"{verb} {path}", line=line)
        elif difference.is_in_place:
            what = f"draws from {path}, which cannot go back"
            effect = Effect(module=region.path, kind=EffectKind.IN_PLACE, what=what, line=line)
        elif difference.what == DRAWN:
            effect = Effect(module=region.path, kind=EffectKind.DRAW, what=f"draws from {path}", line=line)
        else:
            effect = Effect(module=region.path, kind=EffectKind.WRITE, what=f"changes {path}", line=line)
        # A table that is made lazily is written in the first call only, and a second run finds it made. Random
        # draws and in-place writes count from the first call on.
        if region.num_calls == 1 and effect.kind == EffectKind.WRITE:
            region.first.add(effect)
        else:
            self._note(effect)

    def backward(self, sequence_numbers: Sequence[int], *, create_graph: bool) -> None:
        """A backward pass begins, whose graph has nodes of these sequence numbers, in ascending order."""
        reached = [call for call in self._calls if _has_any(sequence_numbers, call.begin, call.end)]
        for call in reached:
            if create_graph:
                what = "is run backwards with create_graph=True, so that its gradients are differentiated"
                self._note(Effect(module=call.path, kind=EffectKind.CREATE_GRAPH, what=what, line=user_line()))
            for kind, storages in ((EffectKind.INPUT, call.inputs), (EffectKind.OUTPUT, call.outputs)):
                line = self._writes.line(storages, call.operator_end, self._recorder.num_operators)
                if line is not None:
                    what = f"has its {kind} written to in place later"
                    self._note(Effect(module=call.path, kind=kind, what=what, line=line))
            module = call.module()
            if call.parameters and module is not None:
                for name, now in _parameters(module).items():
                    if call.parameters.get(name, now) != now and now[0] not in self._written_to:
                        self._replaced(call, name)
                self._written_past_versions(call, module)

    def _written_past_versions(self, call: _Call, module: torch.nn.Module) -> None:
        """Finds the modules of an outermost call whose tensors were written to between their forward and this backward pass, where no version says so (`.data`)."""
        now = self._recorder.num_operators
        within = [c for c in self._calls if call.begin <= c.begin and c.end <= call.end]
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
            storages = self._writes.storages(tensor)
            if self._writes.line(storages, call.operator, now) is None:
                continue
            if id(tensor) in self._written_to or _is_statistic(module, tensor):
                continue
            full = f"{call.path}.{name}"
            for each in within:
                line = self._writes.line(storages, each.operator_end, now)
                if line is not None and full.startswith(f"{each.path}."):
                    what = f"has {re.sub(r'[.][0-9]+(?=[.])', '.*', full)} written to before its backward pass"
                    self._note(Effect(module=each.path, kind=EffectKind.REPLACED, what=what, line=line))

    def _replaced(self, call: _Call, name: str) -> None:
        """The parameter `name` of an outermost call was replaced: this holds for all modules inside that have it."""
        full = f"{call.path}.{name.partition(' ')[0]}"
        what = f"has other values in {re.sub(r'[.][0-9]+(?=[.])', '.*', full)} when the backward pass begins"
        paths = {c.path for c in self._calls if call.begin <= c.begin and c.end <= call.end}
        for path in paths | {call.path}:
            if full.startswith(f"{path}.") and path not in self._replaced_in:
                self._replaced_in.add(path)
                self._note(Effect(module=path, kind=EffectKind.REPLACED, what=what, line=user_line()))

    def begin_step(self) -> None:
        """A step of the run has ended."""
        self._step += 1
        self._calls = [call for call in self._calls if call.step > self._step - _STEPS_KEPT]
        begin = min((call.operator for call in self._calls), default=self._recorder.num_operators)
        self._writes.forget_before(begin)

    def effects(self) -> Iterable[Effect]:
        """All effects that were observed."""
        # With a single call nothing says whether the write recurs: it is reported.
        alone = (effect for region in self._regions.values() if region.num_calls == 1 for effect in region.first)
        return dict.fromkeys((*self._found, *alone))

    def _note(self, effect: Effect) -> None:
        if effect.module:
            self._found.setdefault(effect)


def _hooks(module: torch.nn.Module) -> tuple[Mapping[int, Any], ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _parameters(module: torch.nn.Module) -> dict[str, tuple[int, int, int]]:
    """By name, the identity, version and storage of each parameter and buffer.

    A buffer that was replaced by another tensor is another entry: a second run is given the one that the first run had. One that is still to get its shape
    (`torch.nn.LazyLinear`) has no storage.
    """
    found = {
        name: (id(tensor), tensor._version, tensor.untyped_storage()._cdata)
        for name, tensor in module.named_parameters(remove_duplicate=False)
        if not is_lazy(tensor) and not tensor.is_inference()
    }
    return found | {
        f"{name} [{id(tensor)}]": (id(tensor), tensor._version, tensor.untyped_storage()._cdata)
        for name, tensor in module.named_buffers()
        if not is_lazy(tensor) and not tensor.is_inference() and tensor.layout == torch.strided
    }


def _is_statistic(module: torch.nn.Module, tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a running statistic of one of torch's own norms."""
    return any(
        buffer is tensor
        for part in module.modules()
        if isinstance(part, _NormBase)
        for name, buffer in part._buffers.items()
        if name in ("running_mean", "running_var", "num_batches_tracked")
    )


def _can_stand_aside(before: Snapshot, tensor: torch.Tensor) -> bool:
    """Whether a second run can be given a copy instead of `tensor`: a buffer, or a plain tensor that is held by name."""
    if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
        return False
    contents = (content.values() if isinstance(content, dict) else content for content in before.contents)
    return any(value is tensor for values in contents for value in values)


def _has_any(numbers: Sequence[int], begin: int, end: int) -> bool:
    at = bisect_left(numbers, begin)
    return at < len(numbers) and numbers[at] < end
