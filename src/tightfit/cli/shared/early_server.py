"""Begins the process that imports torch for the traces of a command, before the command imports what it computes with itself."""

from tightfit.cli.arguments.options import TraceOptions


def begin_server(target: str, tracing: TraceOptions, *, is_one_of_many: bool = False) -> None:
    """Begins it for traces of `target`, which is one process of many or the only one, and does not wait for it."""
    from tightfit.capture.child_process.trace_server import begin_for

    begin_for(
        target,
        allow_writes=tracing.allow_writes,
        allow_network=tracing.allow_network,
        is_one_of_many=is_one_of_many,
    )
