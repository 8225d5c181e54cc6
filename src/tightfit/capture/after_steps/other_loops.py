"""Loops without training steps after the steps, which are cut short: evaluation, sampling, epochs that go through stages.

A loop is cut where its turns were alike for so long, or where it takes too much of the bound; what each turn leaves allocated is said.
"""

import dataclasses

from tightfit.capture.after_steps.rewritten_program import RewrittenProgram
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.observe.attribution import short
from tightfit.tape import Coverage, NotReached
from tightfit.units import format_bytes

PART_OF_A_LOOP = 3
"""Of the bound, one loop without training steps gets this part; the rest is for what follows it."""
MIN_TURNS = 3
MIN_TURNS_ALIKE = 100
"""A loop without training steps is cut short after so many turns in a row that called a module and allocated the same."""
MIN_GROWTH_BYTES = 1024
MAX_TURNS_AROUND = 8
"""A loop that goes through stages is left after this many turns even if no two were alike."""


@dataclasses.dataclass(slots=True)
class LoopTurns:
    """The turns of one loop: where the latest began (operators, storages, module calls), what it did, and how many in a row did the same;
    `begin` are the operators when the first of them began, `alive_after_first` the allocated bytes when it had ended.
    """

    operators: int
    storages: int
    calls: int
    alive: int = 0
    did: tuple[int, int] = (-1, -1)
    num_alike: int = 0
    num_turns: int = 0
    begin: int = 0
    alive_after_first: int = 0


class OtherLoops:
    """The turns of the loops of `program`. `num_calls` is the number of calls of modules at the root, and of other beginnings of training.

    `follows` is the coverage of another trace of the same program, whose loops this one cuts at the same turns.
    """

    def __init__(self, gpu: VirtualGpu, program: RewrittenProgram, follows: Coverage | None) -> None:
        self.num_calls = 0
        self.cuts: list[int] = []
        self.grows: list[NotReached] = []
        self._gpu = gpu
        self._program = program
        self._follows = follows
        self._turns: dict[int, LoopTurns] = {}

    def has_turned_alike(self, number: int) -> bool:
        """Whether the latest turn of a loop that goes through stages did what the one before it did, or there were many."""
        turns = self._turned(number, counts_alive=False)
        return turns.num_alike > 0 or turns.num_turns > MAX_TURNS_AROUND

    def is_cut(self, number: int, *, at_turn: int, max_operators: int) -> bool:
        """Whether a loop without training steps is left now, at the turn `at_turn` of all loops: it has done the same for so long, or takes too much
        of `max_operators`."""
        turns = self._turned(number, counts_alive=True)
        if self._follows is None:
            num_operators = self._gpu.recorder.num_operators - turns.begin
            is_long = num_operators > max_operators // PART_OF_A_LOOP and turns.num_turns >= MIN_TURNS
            is_cut = is_long or turns.num_alike >= MIN_TURNS_ALIKE
        else:
            is_cut = at_turn in self._follows.cuts
        if is_cut:
            self._cut(number, turns)
            self.cuts.append(at_turn)
        return is_cut

    def _cut(self, number: int, turns: LoopTurns) -> None:
        loop, num_turns = self._program.loops[number], turns.num_turns
        place = f"{short(loop.file)}:{loop.line}"
        self._gpu.recorder.assume(
            place, f"the loop was left after {num_turns} iterations; its later iterations are assumed to be like them"
        )
        # What the first turn leaves is held in names that the next one binds anew.
        growth = (self._gpu.storages.alive_bytes() - turns.alive_after_first) // max(1, num_turns - 1)
        if growth >= MIN_GROWTH_BYTES:
            what, grows = (
                f"iterations of the loop after the first {num_turns}",
                f"each leaves {format_bytes(growth)} more allocated",
            )
            self.grows.append(NotReached(what=what, where=place, condition=grows))
        self._program.steps[number] = -1
        del self._turns[number]

    def _turned(self, number: int, *, counts_alive: bool) -> LoopTurns:
        """The turns of a loop, brought up to date as one of them begins; alike turns leave as much allocated, with `counts_alive`."""
        recorder = self._gpu.recorder
        num_bytes = recorder.storages["num_bytes"]
        turns = self._turns.get(number)
        if turns is None:
            turns = self._turns[number] = LoopTurns(recorder.num_operators, len(num_bytes), self.num_calls)
            turns.begin = turns.operators
            return turns
        did = (recorder.num_operators - turns.operators, sum(num_bytes[turns.storages :]))
        is_alike = did == turns.did and self.num_calls > turns.calls
        if is_alike and counts_alive:
            # What a loop collects (a list of outputs) grows from turn to turn, and counts.
            alive = self._gpu.storages.alive_bytes()
            is_alike, turns.alive = alive == turns.alive, alive
        turns.num_alike = turns.num_alike + 1 if is_alike else 0
        turns.num_turns += 1
        if turns.num_turns == 1:
            turns.alive_after_first = self._gpu.storages.alive_bytes()
        turns.did, turns.calls = did, self.num_calls
        turns.operators, turns.storages = recorder.num_operators, len(num_bytes)
        return turns
