"""One capture: a virtual GPU of a given card, and a target run on it until its steps are over."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from tightfit.allocator.settings import settings_of_environment
from tightfit.capture.after_steps.fast_forward import EndOfCapture, FastForward
from tightfit.capture.after_steps.running_again import larger_when_run_again
from tightfit.capture.after_steps.running_lines import places_of
from tightfit.capture.after_steps.unreached import run_early_alone
from tightfit.capture.child_process import program_stdin
from tightfit.capture.child_process.exit_handlers import SECONDS_FOR_THREADS, ExitHandlers, wait_for_threads
from tightfit.capture.child_process.last_statement import is_behind_all, is_plainly_behind_all
from tightfit.capture.child_process.weights_on_card import WeightsOnCard
from tightfit.capture.collectives.world import World
from tightfit.capture.dispatch import one_card
from tightfit.capture.dispatch.accumulation import ACCUMULATION_HANDLERS
from tightfit.capture.dispatch.handlers import HANDLERS
from tightfit.capture.dispatch.memory_formats import LAYOUT_HANDLERS
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.kernels import install
from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.tf32 import convolves_in_tf32, multiplies_in_tf32
from tightfit.capture.observe.attribution import short
from tightfit.capture.observe.kernel_memory import KernelMemory
from tightfit.capture.observe.recorder import LiveMemory, Recorder, tape_of
from tightfit.capture.patches import eager, native, saving, servers, spawned, torch_api
from tightfit.capture.patches.cuda_api import CudaApi
from tightfit.capture.patches.loading import largest_batch, loaders
from tightfit.capture.patches.loading.loading_times import LoadingTimes
from tightfit.capture.patches.threads_followed import threads
from tightfit.capture.processes import process_role
from tightfit.capture.steps.detector import StepWatch
from tightfit.capture.steps.micro_batches.alike_batches import AlikeBatches
from tightfit.capture.targets.defined_only import hint_for
from tightfit.capture.targets.target_kinds import Script, Target, generator_on, run_script
from tightfit.devices.catalogue import find
from tightfit.effects.random_operators import draws
from tightfit.errors import ApplyError, CaptureError, InternalError, NoStep, faults
from tightfit.errors.program_errors import one_line
from tightfit.errors.program_folder import begin_in_this_folder
from tightfit.tape import Coverage, NotReached, Tape

_OF_INFERENCE = "for inference, give a generator function that yields once per step"
# What Python's multiprocessing has loaded where a program has started processes that are no forks of its own.
_SPAWNING = {
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.popen_forkserver",
    "multiprocessing.popen_spawn_win32",
}
_REACHED = "--until"
"""Why a trace has stopped that came to its line (`FastForward`)."""

WHEN_TAKEN: "list[Callable[[CaptureSession], None]]" = []
"""Called when the tape has been taken, while the program's frames and objects are still there."""


def _why_no_step(target: Target) -> str:
    if isinstance(target, Script) and (hint := hint_for(target.path)) is not None:
        return hint
    if _SPAWNING & sys.modules.keys():
        return "the processes that it started are not traced: run their code in this process"
    if saving.loaded_files:
        return f"it loaded {saving.loaded_files[-1]}: if that checkpoint is from a finished run, let it train longer, or start from scratch; {_OF_INFERENCE}"
    return _OF_INFERENCE


def _has_come_to_its_end(watch: StepWatch, error: BaseException, script: Script) -> bool:
    """Whether a script of fewer steps than were asked for has left in its last statement, as others end."""
    is_behind = isinstance(error, SystemExit) and is_behind_all(error, script.path)
    return is_behind and (watch.num_ended > 0 or watch.is_one_step())


class CaptureSession:
    """Gives this process the virtual card `device`, for one run of a target. `with_effects`: side effects of modules and of the program are
    watched too. `used_bytes` of the card are held by other processes. `world`: the process is one of a distributed program. `differs` ends the process where a micro-batch that
    was taken for one like those before goes on otherwise; without it all of them are run."""

    def __init__(
        self,
        device: str,
        num_steps: int,
        *,
        by_yield: bool,
        with_effects: bool = False,
        used_bytes: int = 0,
        follows: Coverage | None = None,
        until: tuple[str, int] | None = None,
        world: World | None = None,
        differs: Callable[[], NoReturn] | None = None,
    ) -> None:
        self.device, self._until = find(device), until
        begin_in_this_folder()
        self.recorder = Recorder()
        eager.keep_compiler_out()
        self._allocator_settings = settings_of_environment()
        # Host computations are small, and a thread pool costs more than it saves.
        torch.set_num_threads(1)
        card = Card.of_build(self.device.compute_capability, self.device.num_multiprocessors)
        # Before `CudaApi.install`, which gives `torch.version.cuda` a value: a CPU build is recognised by
        # having none.
        native.pretend_cuda_is_built()
        live = LiveMemory(self.recorder, self.device.capacity_bytes)
        self.num_cards = 1 if world is None else world.ranks_per_node
        CudaApi(self.recorder, live, self.device, card, used_bytes, self.num_cards).install()
        self.gpu = VirtualGpu(
            self.recorder,
            # Accumulation comes last: it has `index_put` in common with HANDLERS, and calls the handler that is
            # there itself.
            HANDLERS | LAYOUT_HANDLERS | ACCUMULATION_HANDLERS,
            KernelMemory(self.recorder, card),
            install.composites(card),
        )
        torch_api.install(self.gpu)
        self._routes = install.install(card)
        if world is None:
            one_card.one_process(lambda: self._communicate(World(num_ranks=1)))
            spawned.install(1, 0)
        else:
            one_card.also_named(world.local_rank)
            self._communicate(world)
        self.watch = StepWatch(
            self.gpu,
            num_steps,
            by_yield=by_yield,
            on_end=self._take,
            follows=follows,
            until=until,
            watches_effects=with_effects,
            batches=None if differs is None else AlikeBatches(self.gpu, differs, process_role.does_batches_alone),
        )
        self._weights = WeightsOnCard(self.gpu)
        self.watch.on_models = lambda: self._weights.note(is_of_step=self.watch.num_ended > 0)
        self.watch.install()
        loaders.install(lambda: self.watch.num_ended)
        self._loading = LoadingTimes(self.recorder)
        self._loading.install()
        if not by_yield:
            servers.install(self._waits_for_requests)
        self._tape: Tape | None = None
        self._threads: threads.ThreadsFollowed | None = None

    def _waits_for_requests(self) -> None:
        """A server starts: what has run so far is all that the trace can have."""
        after = self.watch.after
        assert after is not None
        if not after.is_on and not self.watch.num_ended and not self.watch.is_one_step():
            raise CaptureError(
                f"{self.gpu.attribution.where(otherwise='the program')} starts a server and waits for requests, but a trace has none, and no model was called "
                "before: call the request handler once with an example before the server starts, or in a generator function that yields after it"
            )
        after.stop("it waits for requests")

    def _communicate(self, world: World) -> None:
        # Here, as torch takes long to load what only a distributed program needs.
        from tightfit.capture.collectives.communication import Communication

        Communication(self.gpu, world).install()

    def _take(self) -> None:
        _note_allocator_settings(self.recorder, self._allocator_settings)
        tape = tape_of(self.recorder, target="", versions={}, traced_for=self.device.name)
        coverage = Coverage()
        if self.watch.after is not None:
            coverage = self.watch.after.coverage()
            left = tuple(self.watch.after.training.left)
            again = larger_when_run_again(run_early_alone(self.watch.after.program, left), tape)
            coverage = dataclasses.replace(coverage, not_reached=(*coverage.not_reached, *again))
        if self._until is not None and coverage.stopped != _REACHED:
            file, line = self._until
            missed = NotReached(what="the line of --until", where=f"{short(file)}:{line}")
            coverage = dataclasses.replace(coverage, not_reached=(missed, *coverage.not_reached))
        self._tape = dataclasses.replace(
            tape,
            effects=() if self.watch.effects is None else self.watch.effects.effects(),
            coverage=coverage,
            weights=self._weights.rows(),
            strings=tuple(self.recorder.strings.texts),
            loaders=self._loading.uses(),
            tf32_matmul=multiplies_in_tf32(),
            tf32_convolution=convolves_in_tf32(),
        )
        for look in WHEN_TAKEN:
            look(self)

    def tape(self, *, target: str, versions: Mapping[str, str]) -> Tape:
        """The tape of the run at the end of the last step."""
        assert self._tape is not None
        # Here, as operators of the program's own are registered in no other process.
        names = {self._tape.strings[name] for name in self._tape.operators.name.tolist()}
        drawing = tuple(sorted(name for name in names if draws(name)))
        return dataclasses.replace(self._tape, target=target, versions=versions, random_operators=drawing)

    def give_largest_batches(self, begin: int) -> None:
        """Has data loaders give their largest batch after `begin` steps."""
        largest_batch.install(lambda: self.watch.num_ended >= begin, self.recorder.assume)

    def follow_threads(self) -> None:
        """Has the virtual GPU answer in the program's threads too, which take turns."""

        after = self.watch.after
        if after is None:
            followed = threads.ThreadsFollowed(self.gpu, lambda: False, lambda why: None)
        else:
            followed = threads.ThreadsFollowed(self.gpu, lambda: after.is_on, after.stop)
        followed.install()
        self._threads = followed

    def run(self, target: Target) -> None:
        """Runs the target until its steps are over.

        Raises:
            CaptureError: it never takes a step, or never uses the card.
        """
        with self.gpu, contextlib.suppress(EndOfCapture):
            if isinstance(target, Script):
                assert self.watch.after is not None
                held = self._run_script(target, self.watch.after)  # noqa: F841 - what lives at the end of a script lives on until the tape is taken
                if self.watch.num_ended or self.watch.is_one_step():
                    self.watch.settle()
            else:
                self._run_generator(generator_on(target, device="cuda"))
        if self._threads is not None:
            self._threads.order.settle(self._threads.turns.members.main)
        if not self.watch.num_ended and not isinstance(target, Script):
            raise CaptureError("the function did not yield: set up, then `yield` once per step")
        if not self.watch.num_ended and not self.watch.has_ended:
            raise NoStep(
                f"the workload ended without a step: no optimizer stepped and no backward pass was run; {_why_no_step(target)}{program_stdin.hint()}"
            )
        self.watch.settle()
        if not self.recorder.storages["num_bytes"]:
            raise NoStep('the workload took its steps without a tensor on the GPU; does it move its model to "cuda"?')

    def _run_script(self, script: Script, after: FastForward) -> Mapping[str, Any] | None:
        """The globals of the script, or None after an error of its own behind its steps: the tape has what came before."""
        at_exit = ExitHandlers()
        try:
            with at_exit.collected():
                ended: SystemExit | None = None
                try:
                    held = run_script(script, compiled=after.program.compiled)
                except SystemExit as error:
                    if error.code not in (None, 0):
                        if after.is_on:
                            at_exit.run_after(error)
                        raise
                    # It also keeps the globals of the script, which live as long as the handlers run.
                    held, ended = None, error
                except Exception as error:
                    # An error before the steps is the answer, whatever the program does with it.
                    if after.is_on and faults.our_error(error, "the capture") is None:
                        at_exit.run_after(error)
                    raise
                if not wait_for_threads(threads.is_of_the_program):
                    after.stopped(f"its threads went on for {SECONDS_FOR_THREADS:g} s after the end of the script", ())
                at_exit.run()
            if ended is not None:
                raise ended
            return held
        except (Exception, SystemExit) as error:
            is_own = isinstance(error, ApplyError | InternalError) or faults.our_error(error, "the capture") is not None
            if not is_own:
                self._note_assumed(error)
            is_over = after.is_on or _has_come_to_its_end(self.watch, error, script)
            if not is_over or (is_own and not isinstance(error, CaptureError)):
                raise
            is_its_end = isinstance(error, SystemExit) and (
                error.code in (None, 0) or is_plainly_behind_all(error, script.path)
            )
            if not is_its_end:
                after.stopped(one_line("it", error), places_of(error))
            self.watch.settle()
            return None

    def _run_generator(self, generator: Iterator[Any]) -> None:
        for _ in range(self.watch.num_steps):
            self.watch.begin_yielded_step()
            try:
                next(generator)
            except StopIteration:
                break
            except Exception as error:
                self._note_assumed(error)
                raise
            self.watch.end_step()

    def _note_assumed(self, error: BaseException) -> None:
        """An exception of the program may follow from a value that was assumed."""
        self.gpu.reads.note_on(error, ((p.file, p.first_line, p.line) for p in places_of(error)))


def _note_allocator_settings(recorder: Recorder, before: str) -> None:
    """A program may set what torch's allocator reads when it is first used."""
    own = settings_of_environment()
    if own != before:
        recorder.assume(
            "the program",
            f"it sets PYTORCH_CUDA_ALLOC_CONF={own} itself, which a trace does not apply: give --alloc-conf {own}",
        )
