"""Memory that a guarded run holds without need, to give it up when a step finds none: on a card with other processes that memory would be theirs by then.

It is given back to torch's cache and not to the driver, so that the step that is run again finds it. After steps without an error it is taken again, if
there is room for it.
"""

from collections.abc import Callable

import torch

from tightfit.guarding.memory.out_of_memory import is_out_of_memory, release_memory


class Ballast:
    """`num_bytes` on the device that `device` gives, as soon as there is one. None are held for 0."""

    def __init__(self, num_bytes: int, device: Callable[[], torch.device | None], *, calm_steps: int) -> None:
        self._num_bytes = num_bytes
        self._device = device
        self._calm_steps = calm_steps
        self._held: torch.Tensor | None = None
        # Steps until it is taken.
        self._wait = 0

    @property
    def is_held(self) -> bool:
        """Whether there is something to give up."""
        return self._held is not None

    def hold(self) -> None:
        """Takes the memory, where the time has come and there is room for it. Between steps."""
        if not self._num_bytes or self._held is not None or self._wait:
            return
        device = self._device()
        if device is None:
            return
        try:
            self._held = torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._wait = self._calm_steps

    def step_succeeded(self) -> None:
        """Counts a good step."""
        self._wait = max(0, self._wait - 1)

    def release(self) -> bool:
        """Gives the memory up; whether there was any."""
        was_held, self._held = self._held is not None, None
        self._wait = self._calm_steps
        return was_held

    def release_all(self) -> None:
        """Gives it up, and with it all memory that is reserved but unused, for an operator that is run again."""
        self.release()
        release_memory()
