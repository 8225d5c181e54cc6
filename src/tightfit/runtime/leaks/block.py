"""`tightfit.leaks()`."""

from tightfit.runtime.leaks.leak_watch import LeakWatch


def leaks(*, quiet: bool = False) -> LeakWatch:
    """Watches what grows inside of `with leaks() as found:`, and names its holder when the block is left; `found.leaks` has it then.

    A step ends with `found.step()`, else when the optimizers have stepped, else with each outermost call of a module; six are needed. The report goes to stderr
    where something leaks, unless `quiet`. Python's garbage collector is run at the end of a block in which something grows. Results are those without it, and
    no tensor lives longer.

    Raises:
        UsageError: a block is entered a second time.
    """
    return LeakWatch(quiet=quiet)
