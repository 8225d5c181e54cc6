"""The backward pass of a rank's part where weights are streamed: their gradients leave for the host as their blocks are done, and are summed over the ranks there.

A pass by `torch.autograd.grad` would have all gradients on the card at once. This one accumulates as that of one card does, into gradients of its own that only become
the parameters' when they are those of the whole batch.
"""

from collections.abc import Sequence

import torch
from torch.autograd import backward  # torch's own, whatever the program puts in its place later
from torch.autograd.graph import get_gradient_edge

from tightfit.engine.weights.streamed_gradient import SetAside, streamed_gradient_of
from tightfit.ranks.rank_links import RankLinks
from tightfit.techniques.wrappers.first_order import Refuse
from tightfit.torch_hooks.node_hooks import has_hooks

BY_NAME = "the program asks for the gradients of some tensors by name (torch.autograd.grad, inputs=), and those of streamed weights are at the host, summed for all at once"
_HOOKED = "the program has a hook on the gradient of a weight (register_hook, register_post_accumulate_grad_hook), and those of streamed weights are summed at the host after the backward pass"


class StreamedSums:
    """Backward passes to `inputs`, leaves of which some are streamed: these get the sums over the ranks as their `.grad`, which a pass on one card would leave there."""

    def __init__(self, inputs: Sequence[torch.Tensor], links: RankLinks, refuse: Refuse) -> None:
        self._inputs, self._links = inputs, links
        self._streamed = {at: found for at, each in enumerate(inputs) if (found := streamed_gradient_of(each))}
        self._made: dict[int, torch.Tensor | None] = {}
        if self._streamed and any(_is_hooked(each, is_streamed=at in self) for at, each in enumerate(inputs)):
            raise refuse(_HOOKED)

    def __bool__(self) -> bool:
        return bool(self._streamed)

    def __contains__(self, at: int) -> bool:
        """Whether the input with this number is streamed."""
        return at in self._streamed

    def parts(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], *, keeps_graph: bool
    ) -> list[torch.Tensor | None]:
        """The gradients of this rank's part, in the order of the inputs."""
        aside = {at: found.exchange(SetAside()) for at, found in self._streamed.items()}
        others = {at: each.grad for at, each in enumerate(self._inputs) if at not in aside}
        found: dict[int, torch.Tensor | None] = {}
        try:
            for at in others:
                self._inputs[at].grad = None
            backward(outputs, gradients, retain_graph=keeps_graph, inputs=self._inputs)
        finally:
            for at, streamed in self._streamed.items():
                found[at] = self._inputs[at].grad
                if aside[at].gradient is not None:
                    streamed.exchange(aside[at])
            for at, before in others.items():
                found[at], self._inputs[at].grad = self._inputs[at].grad, before
        self._made = {at: found[at] for at in self._streamed}
        return [found[at] for at in range(len(self._inputs))]

    def add_up(self) -> None:
        """Sums what the last pass has made of streamed weights, in place."""
        with torch.no_grad():
            # One by one: what is summed is on the card beside it.
            for made in (each for each in self._made.values() if each is not None):
                made.copy_(self._links.sums([made])[0])

    def hand_over(self) -> None:
        """Adds it to the gradients that the parameters have."""
        made, self._made = self._made, {}
        with torch.no_grad():
            for at, gradient in made.items():
                own = self._inputs[at].grad
                if gradient is not None and own is not None and own is not gradient:
                    # In place, as autograd does it: the program may hold the gradient.
                    own.add_(gradient)


def _is_hooked(leaf: torch.Tensor, *, is_streamed: bool) -> bool:
    """Whether a hook of the program's would be called with the gradient of a part, or never."""
    # Those of a tensor itself are called with what arrives for the whole batch, which is nothing for a streamed one.
    of_tensor = leaf._backward_hooks if is_streamed else None
    return bool(of_tensor or leaf._post_accumulate_grad_hooks) or has_hooks(get_gradient_edge(leaf).node)
