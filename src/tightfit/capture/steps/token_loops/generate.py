"""The loop of `generate` in transformers, which makes a token in each turn: turns between that are alike are left out.

At the beginning of each turn the tape and the loop's state are compared with those of the turns before. Where the last three did the same, with sizes that grow by the
same, the state is carried on to a few turns before the end, or before the length at which the model changes (a window); the tape notes what was
left out (`tightfit.tape.left_out`). The turns behind are compared with what was foretold for them: where they differ, the trace is begun again with more turns before,
and then with all.
"""

import contextlib
import ctypes
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.steps.token_loops import beams
from tightfit.capture.steps.token_loops.loop import TokenLoop
from tightfit.errors.private_names import known

_IS_UNFINISHED = known(
    "transformers.generation.utils:GenerationMixin._has_unfinished_sequences",
    "to leave out alike turns of `generate`",
    "capture/steps",
    first="4.51",
    last="5.23",
)
_SAMPLING = known(
    "transformers.generation.utils:GenerationMixin._sample",
    "whose turns are compared",
    "capture/steps",
    first="4.51",
    last="5.23",
)
_BEAMS = known(
    "transformers.generation.utils:GenerationMixin._beam_search",
    "whose turns are compared",
    "capture/steps",
    first="4.51",
    last="5.23",
)

AtImport = Callable[[str, Callable[[types.ModuleType], None]], None]
"""Calls a function with the module of a name when that is imported."""


@contextlib.contextmanager
def turns_left_out(
    gpu: VirtualGpu,
    num_alike: int,
    at_import: AtImport,
    trains: Callable[[], bool],
    differs: Callable[[], NoReturn],
) -> Iterator[None]:
    """Leaves out turns of `generate` where the last `num_alike` were alike (0: none), in programs that only predict: for others `trains` says that calls are answered one
    by one (`tightfit.capture.steps.growing_calls`). Beams are searched to their longest sequence in any case. `differs` ends the trace, which is begun again with more turns, also where the program has failed behind some that were left
    out, or has ended before others confirmed them.
    """
    beams.install(gpu, at_import)
    if not num_alike:
        yield
        return
    loops = GenerateLoops(gpu, num_alike, trains, differs)
    at_import(_IS_UNFINISHED.module, loops.watch)
    try:
        yield
    except BaseException as error:
        if gpu.recorder.left_out and not isinstance(error, KeyboardInterrupt):
            differs()
        raise
    if loops.must_be_confirmed:
        differs()


class GenerateLoops:
    """The loops of `generate` on `gpu`; see `turns_left_out`."""

    def __init__(
        self, gpu: VirtualGpu, num_alike: int, trains: Callable[[], bool], differs: Callable[[], NoReturn]
    ) -> None:
        self._gpu = gpu
        self._trains = trains
        self._num_alike = num_alike
        self._differs = differs
        self._loops: list[TokenLoop] = []

    @property
    def must_be_confirmed(self) -> bool:
        """Whether turns were left out that no later turn has confirmed."""
        return any(loop.must_be_confirmed for loop in self._loops)

    def watch(self, module: types.ModuleType) -> None:
        """Is asked in each turn of the loops of transformers from now on."""
        holder = getattr(module, "GenerationMixin", None)
        is_unfinished = getattr(holder, _IS_UNFINISHED.name, None)
        # A release without it runs every turn.
        if holder is None or is_unfinished is None:
            return

        @functools.wraps(is_unfinished)
        def asked(model: Any, is_finished: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code.co_name in (_SAMPLING.name, _BEAMS.name) and not self._trains():
                self._turn(model, frame)
            del frame
            return is_unfinished(model, is_finished, *args, **kwargs)

        setattr(holder, _IS_UNFINISHED.name, asked)

    def _turn(self, model: Any, frame: types.FrameType) -> None:
        """A turn begins in `frame`, or the loop ends."""
        values = _locals_of(frame)
        try:
            values.pop("self", None)
            # Beams have room for the longest sequence from the start, and count the tokens in it.
            is_sampling = frame.f_code.co_name == _SAMPLING.name
            length = values["input_ids"].shape[1] if is_sampling else values.get("cur_len")
            loop = None if length is None else self._loop(frame, length)
            if loop is not None and not loop.is_left_alone and not self._gpu.has_side_streams:
                _set_locals(frame, loop.look(model, values))
        finally:
            # Before Python 3.13 a frame keeps the dictionary, and with it what the loop drops.
            values.clear()

    def _loop(self, frame: types.FrameType, length: int) -> TokenLoop:
        # Another loop may have a frame at the same address.
        if not self._loops or self._loops[-1].frame != id(frame) or self._loops[-1].length + 1 != length:
            self._loops.append(TokenLoop(self._gpu, self._num_alike, id(frame), self._differs))
        self._loops[-1].length = length
        return self._loops[-1]


def _set_locals(frame: types.FrameType, numbers: dict[str, int | float]) -> None:
    """Gives locals of a frame other values."""
    if not numbers:
        return
    frame.f_locals.update(numbers)
    if sys.version_info < (3, 13):
        # What debuggers do before PEP 667: locals that are not in the dictionary stay as they are.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _locals_of(frame: types.FrameType) -> dict[str, Any]:
    values = frame.f_locals
    # From Python 3.13 on it is a view of the frame, which keeps nothing.
    return values if isinstance(values, dict) else dict(values)
