"""Puts `weight_streaming` on live objects: see `tightfit.techniques.offload.weight_streaming` for what it is and where it comes from."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.analysis.relative_places import place_from
from tightfit.effects.ambient import (
    are_saved_tensor_hooks_refused,
    names_of_modes,
    takes_saved_tensor_hooks,
)
from tightfit.effects.bytecode.asked_addresses import line_with_address
from tightfit.effects.bytecode.asked_of_saved import question_of, told
from tightfit.effects.state import MOVED, devices_of
from tightfit.effects.values.saved_hooks import top_saved_hooks
from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.engine.saved.saved_storage import Saved
from tightfit.engine.slab_notes import notes_on
from tightfit.engine.weights.streamed_weight import StreamedWeight
from tightfit.engine.weights.streamed_weights import SavedWeight, StreamedBlock, StreamedWeights
from tightfit.engine.weights.use_order import Pass
from tightfit.engine.weights.weights_in_files import bytes_on_disk
from tightfit.errors import ApplyError
from tightfit.techniques.offload.not_swapped import refuse_swaps
from tightfit.techniques.offload.streamable import seen_by_others, streamable
from tightfit.techniques.session import Session, Verdict
from tightfit.techniques.technique import ChosenOption, check_each
from tightfit.techniques.wrappers.far_tiers import by_tier, disk_space_for
from tightfit.techniques.wrappers.forwards import OnlyHere
from tightfit.techniques.wrappers.traced_calls import is_among_values
from tightfit.torch_hooks.manifest import GRAPH_TASK_ID
from tightfit.torch_hooks.node_hooks import put_own_prehook
from tightfit.torch_hooks.saving_functions import on_saving_functions, saving_function
from tightfit.torch_hooks.weak_references import WeakTable

_NAME = "weight_streaming"
_LOST = "; this pass cannot be finished: the file that they are in is damaged, or its disk"


def apply_weight_streaming(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Moves the weights of each block to the host, and wraps its forward and those of the blocks beside it.

    Raises:
        ApplyError: a place is not there, is inside of another one, or has nothing that can be streamed; the parameters are on several devices; or the host
            has too little memory.
    """
    choices = dict(check_each(chosen, lambda choice: (session.module(choice.where), choice)))
    beside = check_each(chosen, lambda choice: [session.module(place) for place in _beside(choice)])
    _check_apart(choices)
    parameters = dict(check_each(chosen, lambda choice: _parameters_of(session, choice)))
    # Those that are not streamed are the clock.
    borders = {module for modules in beside for module in modules}
    at_host, on_disk = by_tier(chosen)
    places = {choice.where for choice in on_disk}
    disk = disk_space_for(session, on_disk, _NAME, "weights", _LOST)
    if disk is not None:
        needed = [p for module, choice in choices.items() if choice.where in places for p in parameters[module]]
        disk = dataclasses.replace(disk, num_bytes=bytes_on_disk(needed))
    stream_weights(
        session,
        {module: (choice.where, parameters[module]) for module, choice in choices.items()},
        borders,
        host_bytes=sum(int(choice.settings["host_bytes"]) for choice in at_host),
        technique=_NAME,
        disk=disk,
        on_disk={module for module, choice in choices.items() if choice.where in places},
    )


def stream_weights(
    session: Session,
    blocks: Mapping[torch.nn.Module, tuple[str, Sequence[torch.Tensor]]],
    borders: Collection[torch.nn.Module],
    *,
    host_bytes: int,
    technique: str,
    are_trained: bool = False,
    disk: DiskSpace | None = None,
    on_disk: Collection[torch.nn.Module] = (),
) -> StreamedWeights:
    """Moves the parameters of `blocks`, each with its place, to `host_bytes` of host memory, or those of blocks `on_disk` to `disk`, with their gradients if they
    `are_trained`, and wraps the forwards of the blocks, and of `borders` beside them.

    Raises:
        ApplyError: the parameters are on several devices, or the host has too little memory or the disk too little space.
    """
    device = _device_of(session, blocks)
    _check_not_seen(session, [parameter for _, of_block in blocks.values() for parameter in of_block])
    checks = _Checks(session.verdict, session.check_steps, technique)
    streamed = StreamedWeights(
        device,
        host_bytes,
        statistics=session.statistics,
        disk=disk,
        are_trained=are_trained,
        when_unchanged=checks.about_to_leave,
        when_viewed=checks.missed_a_write,
    )
    session.when_undone(functools.partial(_forget_moved, weakref.ref(session.model)))
    session.when_undone(streamed.end)
    refuse_swaps(session, technique)
    slabs = [streamed.slab] if streamed.files is None else [streamed.slab, streamed.files.slab]
    session.notes.extend(notes_on(device, slabs, "weights"))
    _move_others({module: parameters for module, (_, parameters) in blocks.items()}, device)
    for module in session.model.modules():
        if module in blocks or module in borders:
            where, of_block = blocks.get(module, ("", ()))
            block = streamed.add(of_block, with_gradients=are_trained, on_disk=module in on_disk)
            MOVED.update(dict.fromkeys(of_block))
            session.wrap_forward(module, _Around(streamed, block, session.verdict, where, technique).run)
            for part in module.modules():
                if any(parameter in MOVED for parameter in part.parameters(recurse=False)):
                    session.hook(
                        part.register_load_state_dict_pre_hook, _LoadedInPlace(session.verdict, where, technique)
                    )
    return streamed


class _LoadedInPlace:
    """Refuses that loaded weights are exchanged for those that are streamed, as tensors: torch does that with no tensor that is referred to weakly."""

    def __init__(self, verdict: Verdict, where: str, technique: str) -> None:
        self._verdict, self._where, self._technique = verdict, where, technique

    def __deepcopy__(self, memo: dict[int, Any]) -> "_LoadedInPlace":
        return _LoadedInPlace(Verdict(), self._where, self._technique)

    def __call__(self, *_: Any) -> None:
        if torch.__future__.get_swap_module_params_on_conversion():
            raise self._verdict.refuse(
                f"{self._where}: the program has loaded weights exchanged for the present ones as tensors (torch.__future__."
                f"set_swap_module_params_on_conversion), which are streamed; leave it out: tightfit plan --without {self._technique}",
                technique=self._technique,
                places=(self._where,),
            )


def _beside(choice: ChosenOption) -> list[str]:
    places = (str(choice.settings.get(name, "")) for name in ("preceding", "following"))
    return [place_from(choice.where, place) for place in places if place]


def _forget_moved(model_of: "weakref.ref[torch.nn.Module]") -> None:
    model = model_of()
    for parameter in model.parameters() if model is not None else ():
        MOVED.pop(parameter, None)


def _device_of(session: Session, blocks: Iterable[torch.nn.Module]) -> torch.device:
    """The card: the device of all parameters but those of blocks, which may have been left at the host."""
    of_blocks = {id(p) for block in blocks for p in block.parameters()}
    every = list(session.model.parameters())
    devices = devices_of([p for p in every if id(p) not in of_blocks or p.device.type != "cpu"] or every)
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise ApplyError(f"weights are streamed to one device, and the parameters of this model are on {found}")
    return devices.pop()


def _check_not_seen(session: Session, parameters: Sequence[torch.Tensor]) -> None:
    seen = seen_by_others(parameters)
    if seen is not None:
        name = next((name for name, parameter in session.model.named_parameters() if parameter is seen), "a weight")
        raise ApplyError(
            f"{name} lies in a file that another tensor of the program's sees too: weights there cannot be streamed"
        )


def _check_apart(choices: Mapping[torch.nn.Module, ChosenOption]) -> None:
    for module, choice in choices.items():
        inside = next((choices[part] for part in module.modules() if part is not module and part in choices), None)
        if inside is not None:
            raise ApplyError(
                f"{inside.where} is inside of {choice.where}: its weights are streamed by one of them",
                places=[inside.where],
            )


def _move_others(parameters: Mapping[torch.nn.Module, Sequence[torch.Tensor]], device: torch.device) -> None:
    """Moves what was left at the host and is not streamed."""
    for module, streamed in parameters.items():
        for parameter in module.parameters():
            if parameter.device != device and not any(parameter is other for other in streamed):
                parameter.data = parameter.data.to(device)


def _parameters_of(session: Session, choice: ChosenOption) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    module = session.module(choice.where)
    found = streamable(
        session.model,
        module,
        int(choice.settings["smallest_bytes"]),
        with_trained=bool(choice.settings.get("without_gradients", False)),
    )
    if not found:
        raise ApplyError(
            f"{choice.where} has no weights that can be streamed: they are trained, or share their memory with other tensors",
            places=[choice.where],
        )
    return module, found


class _Around(OnlyHere):
    """The wrapper around a block's forward. Belongs to one model: a copy of it has weights of its own."""

    def __init__(
        self, streamed: StreamedWeights, block: StreamedBlock, verdict: Verdict, where: str, technique: str
    ) -> None:
        self._technique = technique
        self._streamed = streamed
        self._block = block
        self._verdict = verdict
        self._where = where
        on_saving_functions(self)

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward` with the weights on the card, and has them there again when the backward pass comes to what it returns."""
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if self._block.weights and is_among_values(self._block.weights[0].parameter):
            if self._streamed.device.type != "cpu":
                raise self._refuse("is traced, or run with fake tensors, while its weights lie at the host")
            return forward(*args, **kwargs)
        if self._block.weights and torch._C._functorch.peek_interpreter_stack() is not None:
            raise self._refuse("is run inside of a transform of torch.func, which keeps its weights by itself")
        # A program that trains them by now updates them wherever they are, and its optimizer's states are to be on the card.
        if (
            torch.is_grad_enabled()
            and any(weight.parameter.requires_grad and weight.gradient is None for weight in self._block.weights)
            and self._streamed.stay(self._block)
        ):
            raise self._refuse("begins to be trained while the program holds views of its weights at the host")
        self._streamed.check_views(self._block)
        if modes := names_of_modes():
            raise self._refuse(f"runs inside of {modes[0]}, which would see how its weights come and go")
        with self._streamed.call(self._block, _pass_now()):
            first = torch.autograd._get_sequence_nr()
            hooks = self._hooks()
            if hooks is not None and hooks.line:
                raise self._refuse(
                    f"runs within hooks for saved tensors that ask where a tensor lies in memory (at {hooks.line}): a streamed weight lies elsewhere each time"
                )
            try:
                with hooks.entered() if hooks is not None else nullcontext():
                    returned = forward(*args, **kwargs)
            except RuntimeError as error:
                if not are_saved_tensor_hooks_refused(error):
                    raise
                raise self._refuse("transforms code (torch.func) that takes no hooks for saved tensors") from error
            if hooks is not None and hooks.question:
                raise self._refuse(told(hooks.question))
            if torch.is_grad_enabled():
                self._watch(returned, first)
        return returned

    def _refuse(self, why: str) -> ApplyError:
        places = [self._where] if self._where else []
        return self._verdict.refuse(
            f"{self._where or 'a block beside a streamed one'} {why}; leave streaming out: tightfit plan --without {self._technique}",
            technique=self._technique,
            places=places,
        )

    def _hooks(self) -> "_Hooks | None":
        """The hooks for what the call saves."""
        if not self._block.weights or not torch.is_grad_enabled() or not takes_saved_tensor_hooks():
            return None
        return _Hooks(self._streamed, self._block)

    def _watch(self, returned: Any, first: int) -> None:
        """Of the nodes that are made in the call, those of what it returns run before all others."""
        tensors = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        for node in dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None):
            # What is handed through was made before.
            if node._sequence_nr() >= first:
                put_own_prehook(node, self._reached)

    def _reached(self, _gradients: Any) -> None:
        """The backward pass has come to the block."""
        if modes := names_of_modes():
            raise self._refuse(
                f"has its backward pass inside of {modes[0]}, which would see how its weights come and go"
            )
        self._streamed.use(self._block, Pass.BACKWARD)
        torch.autograd.Variable._execution_engine.queue_callback(self._streamed.end_pass)


def _pass_now() -> Pass:
    if GRAPH_TASK_ID.call() != -1:
        return Pass.AGAIN
    return Pass.FORWARD if torch.is_grad_enabled() else Pass.ALONE


class _Hooks:
    """The hooks for what a call of a block saves: its weights are not held on the card; all else goes to the hooks around, where there are some."""

    def __init__(self, streamed: StreamedWeights, block: StreamedBlock) -> None:
        self._streamed = streamed
        self._block = block
        self.around: Any = top_saved_hooks()
        # The program's own hooks may be about weights too (they round, they count).
        self._takes_weights = self.around is None or _room_of(self.around[0]) in (
            "torch.utils.checkpoint",
            "tightfit",
        )

        self.line = line_with_address(self.around[0]) if self.around is not None and not self._takes_weights else ""
        """Where the program's own hooks ask for the address of what they are given, or nothing."""
        self.question = ""
        """Where the backward pass of a function asks what a saved tensor is, besides its values (`effects.asked_of_saved`)."""

    def entered(self) -> AbstractContextManager[Any, None]:
        """The context in which they are the hooks for saved tensors."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds in place of `tensor`."""
        self.question = self.question or question_of(saving_function())
        saved = self._block.saved(tensor) if self._takes_weights else None
        if saved is not None:
            return saved
        return Saved(tensor, None) if self.around is None else _Packed(self.around[0](tensor))

    def unpack(self, held: Any) -> torch.Tensor:
        """The tensor."""
        if isinstance(held, SavedWeight):
            return self._streamed.restored(held)
        if isinstance(held, _Packed):
            return self.around[1](held.held)
        held.check()
        return held.tensor


def _room_of(hook: Any) -> str:
    """The module that a hook is from; of ours the package."""
    module = str((hook.func if isinstance(hook, functools.partial) else hook).__module__)
    return "tightfit" if module.partition(".")[0] == "tightfit" else module


class _Packed:
    """What the hooks around have made of a tensor."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class _Checks:
    """Compares what leaves the card without a write that versions tell of with what is at the host: `num_times` for each weight, and always where the host
    itself is the card, which reads both at the speed of memory."""

    def __init__(self, verdict: Verdict, num_times: int, technique: str) -> None:
        self._technique = technique
        self._verdict = verdict
        self._num_times = num_times
        # The graph of the program's last loss leads here, also when streaming has ended: weights that it has let go of could not be streamed anew.
        self._times = WeakTable[StreamedWeight, int]()

    def missed_a_write(self, weight: StreamedWeight) -> None:
        """Refuses that the program goes on with a view of what a weight was.

        Raises:
            ApplyError: always.
        """
        raise self._verdict.refuse(
            f"the program holds a view of a streamed weight of shape {tuple(weight.parameter.shape)}, taken while that was on the card: it does not see what is "
            f"written to the weight; leave streaming out: tightfit plan --without {self._technique}",
            technique=self._technique,
        )

    def about_to_leave(self, weight: StreamedWeight) -> None:
        """Compares one weight.

        Raises:
            ApplyError: they differ.
        """
        times = self._times.get(weight) or 0
        if times >= self._num_times and weight.on_card.whole.device.type != "cpu":
            return
        self._times[weight] = times + 1
        if not torch.equal(weight.on_card.whole.cpu(), weight.bytes_at_host):
            raise self._verdict.refuse(
                "a streamed weight on the card differs from what is at the host, and no version tells of a write (`weight.data`?); "
                f"leave streaming out: tightfit plan --without {self._technique}",
                technique=self._technique,
            )
