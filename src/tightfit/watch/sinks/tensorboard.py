"""Writes the machine to a folder that TensorBoard shows. Needs the package tensorboard, and neither TensorFlow nor torch."""

from pathlib import Path

from tightfit.errors import MissingExtra
from tightfit.watch.machine.machine_state import MachineState
from tightfit.watch.sinks.scalars import scalars


class TensorBoardSink:
    """An event file in `folder`; a step is a second since the first state."""

    def __init__(self, folder: Path) -> None:
        """Opens the file.

        Raises:
            MissingExtra: tensorboard is not installed.
        """
        try:
            from tensorboard.summary import Writer  # pyrefly: ignore[missing-import]
        except ImportError as error:
            raise MissingExtra("--tensorboard needs the package tensorboard: pip install tensorboard") from error
        self._writer = Writer(str(folder))
        self._begin: float | None = None

    def __call__(self, state: MachineState) -> None:
        """Writes one state."""
        self._begin = state.time if self._begin is None else self._begin
        for name, value in scalars(state):
            self._writer.add_scalar(name, value, int(state.time - self._begin), wall_time=state.time)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
