"""Begins the process that imports torch for the traces of a command, before the command imports what it computes with itself."""

from tightfit.cli.arguments.options import TraceOptions


def begin_server(target: str, tracing: TraceOptions) -> None:
    """Begins it for traces of `target`, and does not wait for it."""
    from tightfit.capture.child_process.trace_server import begin_for

    begin_for(target, allow_writes=tracing.allow_writes, allow_network=tracing.allow_network)
