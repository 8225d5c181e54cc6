"""The compiler's backends."""


def make_backend(target): ...
