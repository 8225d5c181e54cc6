"""The containment as the traced process has it: begun before the program runs, ended before the answer is written."""

import errno
from typing import Any

from tightfit.capture.processes.containment import namespaces, others_files, redirection
from tightfit.capture.processes.containment.network_watch import NetworkWatch, rename_folders_by_copying
from tightfit.capture.processes.containment.policy import containment_of, note_drops
from tightfit.errors.faults import chain

# What libraries say that have given up on the network, or that were told that there is none.
_OF_THE_NETWORK = ("offline", "connect", "resolve", "network", "download", "urlopen", "unreachable", "timed out")
_REFUSED = (errno.EROFS, errno.EOVERFLOW)


class ClosedIn:
    """Nothing, for a program that may do everything (`fields` is None); else it watches, and redirects where the kernel does not."""

    def __init__(self, fields: dict[str, Any] | None) -> None:
        self._containment = None if fields is None else containment_of(fields)
        self._watch: NetworkWatch | None = None
        if self._containment is not None and not self._containment.policy.allow_writes:
            note_drops()

    def begin(self) -> None:
        """From now on the program runs."""
        if self._containment is None:
            return
        policy = self._containment.policy
        self._watch = NetworkWatch(policy)
        if not policy.allow_writes:
            if namespaces.is_inside():
                rename_folders_by_copying()
                if namespaces.needs_users():
                    others_files.begin(self._containment, namespaces.covered_folders())
            else:
                redirection.begin(self._containment)
        self._watch.begin()

    def end(self) -> list[tuple[str, str]]:
        """What is to be said of it, where and what."""
        if self._watch is None:
            return []
        self._watch.end()
        redirection.end()
        return [*self._watch.notes(), *redirection.notes()]

    def hint(self, error: BaseException) -> str:
        """The end of an error message: what to allow, if that is what was missing."""
        if self._containment is None or self._watch is None:
            return ""
        links = chain(error)
        numbers = [link.errno for link in links if isinstance(link, OSError)]
        if not self._containment.policy.allow_writes and any(number in _REFUSED for number in numbers):
            return "; a traced program cannot write there (--allow-writes lets it write for real)"
        if self._containment.policy.allow_network or any(
            "--allow-network" in str(error).partition("\n")[0] for error in links[:1]
        ):
            return ""
        said = " ".join(str(link).lower() for link in links)
        is_of_network = (
            self._watch.refused or any(isinstance(link, ConnectionError) for link in links) or "offline" in said
        )
        if is_of_network and any(word in said for word in _OF_THE_NETWORK):
            hosts = f" ({', '.join(self._watch.refused)})" if self._watch.refused else ""
            return f"; a traced program has no network{hosts}: allow it with --allow-network, or fill the cache first"
        return ""
