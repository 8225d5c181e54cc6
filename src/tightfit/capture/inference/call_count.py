"""How many functions of torch a piece of code calls: more for one token more means that it loops over tokens in Python."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class CallCount(TorchFunctionMode):
    """Counts in `number`, while it is entered."""

    number: int = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `func`."""
        self.number += 1
        return func(*args, **(kwargs or {}))
