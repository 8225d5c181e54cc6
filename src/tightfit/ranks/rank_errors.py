"""What ends a run on several ranks."""

from tightfit.errors import TightfitError


class RanksDiffer(TightfitError):
    """The ranks do not do the same any more: the message says what differs."""


class RankLost(TightfitError):
    """Another rank has ended. Whoever started the ranks knows why."""
