"""What an error says of itself, for the line that a user reads."""


def error_text(error: BaseException) -> str:
    """What the system or the library says, in one line; the name of its class where that is nothing, as for an exception that ends a thread."""
    said = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
    return said or type(error).__name__
