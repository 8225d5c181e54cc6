"""Whether a module computes each token by itself, found by watching the operators of one run of it.

Every tensor that comes from the input carries the tokens in its first dimensions. An operator keeps them apart if it is pointwise and nothing
else varies along them, or if the dimensions it works on (those of a product, a norm, a sum, a slice) come after them. Whatever is not known to
keep them apart, and whatever draws random numbers, is refused. Nothing is asked about names of modules, and no value is looked at.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MixesTokens(Exception):
    """The run is not token by token; the message says what is in the way."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAME_SHAPE = _names(
    "clone _to_copy alias detach contiguous copy_ zeros_like ones_like empty_like full_like fill_ zero_ lift_fresh"
)
_RESHAPES = _names("view _unsafe_view reshape _reshape_alias unsqueeze squeeze expand flatten unflatten")
# By position of the argument that says which dimensions are worked on.
_ALONG = {
    **dict.fromkeys(
        _names(
            """slice select split split_with_sizes chunk unbind narrow cat stack sum mean amax amin argmax argmin var std
            _softmax _log_softmax cumsum glu linalg_vector_norm norm logsumexp prod all any sort topk"""
        ),
        (1,),
    ),
    "transpose": (1, 2),
    **dict.fromkeys(_names("linalg_vector_norm norm split split_with_sizes topk"), (2,)),
}
_DEFAULT_DIM = _names("slice select split split_with_sizes chunk unbind narrow cat stack")
_PRODUCTS = _names("mm addmm linear _addmm_activation")
_NORMS = _names("native_layer_norm _fused_rms_norm rms_norm layer_norm")


def check_token_wise(
    run: Callable[[torch.Tensor], Any],
    part: torch.Tensor,
    parameters: Iterable[torch.Tensor],
    buffers: Iterable[torch.Tensor],
) -> None:
    """Runs `run(part)` with gradients and drops the result. Tokens are all dimensions of `part` but the last.

    Raises:
        MixesTokens: the output may depend on more than the token it belongs to, the run changes something, or its gradients go elsewhere than
            to `part` and `parameters`.
    """
    known = [*parameters]
    watched = [part, *known, *buffers]
    versions = [tensor._version for tensor in watched]
    part = part.detach().requires_grad_()
    # A checkpoint around this counts what is saved in its first run, and this is no part of it. Detached, or a result would hold itself.
    apart = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), lambda saved: saved)
    with torch.enable_grad(), apart, _Watch(part) as watch:
        result = run(part)
    if not isinstance(result, torch.Tensor):
        raise MixesTokens(f"it returns a {type(result).__name__}")
    if watch.tokens_of(result) is None or result.shape[: part.dim() - 1] != part.shape[:-1]:
        raise MixesTokens("its output has not a row for each row of the input")
    if versions != [tensor._version for tensor in watched]:
        raise MixesTokens("it changes its input or its buffers")
    allowed = {id(part), *map(id, known)}
    if any(id(leaf) not in allowed for leaf in _leaves_of(result)):
        raise MixesTokens("gradients go through it to what is not its own")


def _leaves_of(result: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors that the backward pass from `result` ends at."""
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


class _Watch(TorchDispatchMode):
    """Follows the tokens through operators; `_tokens` has, of each tensor that carries them, in how many dimensions."""

    def __init__(self, part: torch.Tensor) -> None:
        super().__init__()
        self._num_tokens = math.prod(part.shape[:-1])
        self._tokens: dict[int, tuple[torch.Tensor, int]] = {id(part): (part, part.dim() - 1)}

    def tokens_of(self, tensor: Any) -> int | None:
        """In how many of its first dimensions `tensor` carries tokens; None if it does not."""
        found = self._tokens.get(id(tensor))
        return None if found is None else found[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise MixesTokens(f"{func} draws random numbers")
        result = func(*args, **kwargs)
        carrying = [t for t in tensors if self.tokens_of(t) is not None]
        if carrying:
            for output in tree_leaves(result):
                if isinstance(output, torch.Tensor):
                    self._tokens[id(output)] = output, self._follow(func, args, kwargs, tensors, output)
        return result

    def _follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: list[torch.Tensor],
        output: torch.Tensor,
    ) -> int:
        name = func.overloadpacket.__name__
        first = next(t for t in tensors if self.tokens_of(t) is not None)
        num_dims = self.tokens_of(first)
        assert num_dims is not None
        if torch.Tag.pointwise in func.tags or name in _SAME_SHAPE:
            fits = all(self._broadcasts(tensor, output, num_dims) for tensor in tensors)
        elif name in _ALONG:
            fits = self._works_after(name, args, kwargs)
        elif name == "permute":
            fits = list(args[1][:num_dims]) == list(range(num_dims))
        else:
            keeps = name in _RESHAPES or (name in _NORMS and len(args[1]) <= first.dim() - num_dims)
            if not keeps and not (name in _PRODUCTS and self._is_by_row(name, args)):
                raise MixesTokens(f"{func} may mix tokens")
            return self._prefix(func, output)
        if not fits:
            raise MixesTokens(f"{func} may mix tokens")
        return num_dims

    def _broadcasts(self, tensor: torch.Tensor, output: torch.Tensor, num_dims: int) -> bool:
        """Whether a pointwise operator takes the same row of `tensor` for each token, or a row of its own for each."""
        if self.tokens_of(tensor) is not None:
            return (
                self.tokens_of(tensor) == num_dims
                and tensor.dim() == output.dim()
                and tensor.shape[:num_dims] == output.shape[:num_dims]
            )
        missing = output.dim() - tensor.dim()
        return all(size == 1 for size in tensor.shape[: max(0, num_dims - missing)])

    def _prefix(self, func: Any, output: torch.Tensor) -> int:
        """The first dimensions that hold the tokens; what is stored row by row keeps them together."""
        for length in range(output.dim() + 1):
            if math.prod(output.shape[:length]) == self._num_tokens:
                return length
        raise MixesTokens(f"{func} takes the tokens apart")

    def _is_by_row(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether a product has the tokens in the rows of its left side alone."""
        rows, *others = args[:3] if name in ("mm", "linear") else (args[1], args[0], args[2])
        if self.tokens_of(rows) != rows.dim() - 1 or any(self.tokens_of(other) is not None for other in others):
            return False
        return name in ("mm", "linear") or others[0].dim() == 1 or others[0].shape[0] == 1

    def _works_after(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the dimensions that an operator works on come after the tokens."""
        carrying = [t for t in tree_leaves(args[0]) if isinstance(t, torch.Tensor)]
        depths = {self.tokens_of(tensor) for tensor in carrying}
        depth = depths.pop()
        if depths or depth is None:
            return False
        positions = _ALONG[name]
        found = [args[p] if p < len(args) else None for p in positions]
        dims = tree_leaves(kwargs.get("dim", found))
        if dims == [None] and name in _DEFAULT_DIM:
            dims = [0]
        num_dims = carrying[0].dim() + (name == "stack")
        return bool(dims) and all(dim is not None and dim % num_dims >= depth for dim in dims)
