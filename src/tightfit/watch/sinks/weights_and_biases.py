"""Logs the machine as a run of Weights & Biases. Needs the package wandb, with its usual settings (WANDB_API_KEY, WANDB_MODE)."""

from tightfit.errors import MissingExtra
from tightfit.watch.machine.machine_state import MachineState
from tightfit.watch.sinks.scalars import scalars


class WeightsAndBiasesSink:
    """A run of the project `project`, called after the machine."""

    def __init__(self, project: str, host: str) -> None:
        """Starts the run.

        Raises:
            MissingExtra: wandb is not installed.
        """
        try:
            import wandb  # pyrefly: ignore[missing-import]
        except ImportError as error:
            raise MissingExtra("--wandb needs the package wandb: pip install wandb") from error
        self._run = wandb.init(project=project, name=f"tightfit watch {host}", job_type="watch")

    def __call__(self, state: MachineState) -> None:
        """Logs one state."""
        self._run.log({"time": state.time, **dict(scalars(state))})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
