"""What takes several things off a program again: all of them, whatever one of them raises, and never in place of the program's own error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def end_all(*ends: Callable[[], object]) -> None:
    """Calls all of them in turn.

    Raises:
        BaseException: the first error of theirs, with notes on the others.
    """
    if errors := _errors_of(ends):
        _noted(errors[0], errors[1:])
        raise errors[0]


@contextmanager
def ended_by(*ends: Callable[[], object]) -> Iterator[None]:
    """Calls all of `ends` when the block is over. Where an error ended it, that stays the error, and what fails in them is added as notes.

    Raises:
        BaseException: the first error of theirs, where the block had none; an interrupt in any case.
    """
    try:
        yield
    except BaseException as error:
        errors = _errors_of(ends)
        _noted(error, errors)
        for interrupt in errors:
            # It is not the fault of what was called, and ends the process.
            if not isinstance(interrupt, Exception):
                raise interrupt from error
        raise
    end_all(*ends)


def _errors_of(ends: tuple[Callable[[], object], ...]) -> list[BaseException]:
    errors: list[BaseException] = []
    for end in ends:
        try:
            end()
        except BaseException as error:  # noqa: BLE001 - the others are to be called as well
            errors.append(error)
    return errors


def _noted(error: BaseException, others: list[BaseException]) -> None:
    for other in others:
        error.add_note(f"tightfit: and while undoing: {type(other).__name__}: {other}")
