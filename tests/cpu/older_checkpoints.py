"""Selective checkpoints as torch had them up to 2.12, for tests: what is kept is in lists, and both runs ask for each operator, before it is run, what is to be done."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext


class _Mode(TorchDispatchMode):
    def __init__(self, policy: Callable[..., CheckpointPolicy], storage: dict[Any, Any], *, is_recompute: bool) -> None:
        super().__init__()
        self.storage = storage
        self._policy = policy
        self._is_recompute = is_recompute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in checkpoint.SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        context = SelectiveCheckpointContext(is_recompute=self._is_recompute)
        is_kept = self._policy(context, func, *args, **kwargs) is CheckpointPolicy.MUST_SAVE
        if is_kept and self._is_recompute:
            if not self.storage[func]:
                raise RuntimeError("Trying to backward an extra time")
            return tree_map(lambda kept: kept.get_val(False), self.storage[func].pop(0))
        found = func(*args, **kwargs)
        if is_kept:
            self.storage[func].append(
                tree_map(lambda leaf: checkpoint._VersionWrapper(checkpoint._detach_helper(leaf)), found)
            )
        return found


def contexts_of_lists(policy: Callable[..., CheckpointPolicy]) -> tuple[_Mode, _Mode]:
    """In the place of `create_selective_checkpoint_contexts`."""
    storage: dict[Any, Any] = defaultdict(list)
    return _Mode(policy, storage, is_recompute=False), _Mode(policy, storage, is_recompute=True)
