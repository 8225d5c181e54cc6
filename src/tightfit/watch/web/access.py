"""Who may ask: on the loopback interface whoever addresses it by its name; elsewhere, and wherever a token was given, who has it."""

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie

from tightfit.errors import UsageError

_MIN_TOKEN_LENGTH = 16
_COOKIE = "tightfit_watch"


class Access:
    """The rule for one server. Tokens are compared in constant time."""

    def __init__(self, address: str, token: str | None) -> None:
        """`address` is what the server is bound to.

        Raises:
            UsageError: there is no token for an address that others reach, or it is too short to be a secret.
        """
        if token is None and not is_loopback(address):
            raise UsageError(
                f"--bind {address}: others can reach that address; add --token with a secret of {_MIN_TOKEN_LENGTH} characters or more"
            )
        if token is not None and (len(token) < _MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
            raise UsageError(
                f"TIGHTFIT_WATCH_TOKEN or --token: a secret of at least {_MIN_TOKEN_LENGTH} ASCII characters"
            )
        self._token = token
        # A browser keeps this and not the token: cookies go to all ports of a host.
        self._session = secrets.token_urlsafe(32)

    @property
    def needs_token(self) -> bool:
        """Whether a token is asked for."""
        return self._token is not None

    def is_allowed(self, headers: Mapping[str, str], token: str) -> bool:
        """Whether a request may be answered: by its headers, and the token in its address."""
        if self._token is None:
            return _is_own_name(headers.get("Host", ""))
        kind, _, given = headers.get("Authorization", "").partition(" ")
        bearer = given if kind.lower() == "bearer" else ""
        secrets_given = (
            (token, self._token),
            (bearer, self._token),
            (_cookie(headers.get("Cookie", "")), self._session),
        )
        # All of them, so that the time says nothing of which one was wrong.
        return sum(hmac.compare_digest(one.encode(), other.encode()) for one, other in secrets_given) > 0

    def cookie(self) -> str:
        """What a browser that has shown the token is to send from then on."""
        return f"{_COOKIE}={self._session}; HttpOnly; SameSite=Strict; Path=/"


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_own_name(host: str) -> bool:
    """Whether a `Host` header names the loopback interface: a page of another site that has had its name pointed here (DNS rebinding) sends its own."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    return is_loopback(name)


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(_COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""
