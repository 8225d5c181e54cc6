"""Seconds of a layout whose weights are at the host of each rank (`trained_weight_streaming`), beyond those of the same layout on the cards.

blocks    weights come for each pass, and gradients leave, beside the block before: what takes longer decides
sums      gradients go to the card one by one, are summed over the ranks and go back, when the backward pass is over
update    each rank's host updates its share, all of one machine beside each other in the same memory; the others get it as the gradients were summed
"""

from tightfit.cost.copies import copy_seconds
from tightfit.cost.host_bandwidth import HOST_BYTES_PER_SECOND
from tightfit.devices.device import Device
from tightfit.devices.node import Node
from tightfit.layouts.layout import Layout
from tightfit.layouts.model.model_parts import ModelPart, ModelParts


class StreamedSeconds:
    """Prices the copies and updates of one model's streamed blocks; nothing where a layout does not stream."""

    def __init__(self, model: ModelParts, device: Device, node: Node) -> None:
        self._model, self._device, self._node = model, device, node
        self._at_host = model.at_host

    def of_passes(self, layout: Layout, part: ModelPart, *, is_block: bool) -> tuple[float, float]:
        """The least that the forward and the backward pass of a part take, by the link."""
        if not layout.streams_weights or self._at_host is None or not is_block:
            return 0.0, 0.0
        num_bytes = round(part.parameter_bytes * self._at_host.share)
        up = copy_seconds(num_bytes, self._device, to_card=True)
        # Both ways at once.
        gradients = num_bytes * self._at_host.trained_share * self._model.gradients_per_parameter
        down = copy_seconds(round(gradients), self._device, to_card=False)
        return up, max(up, down)

    def of_ends(self, layout: Layout) -> float:
        """Copies of gradients to be summed, and of updated weights to be exchanged, beside which nothing runs."""
        if not layout.streams_weights or self._at_host is None:
            return 0.0
        trained = self._at_host.weight_bytes * self._at_host.trained_share
        return sum(
            copy_seconds(round(num_bytes), self._device, to_card=to_card)
            for num_bytes in (trained * self._model.gradients_per_parameter, trained)
            for to_card in (True, False)
        )

    def of_updates(self, layout: Layout) -> float:
        """The update at the host: each weight and state is read and written, the gradient is read."""
        if not layout.streams_weights or self._at_host is None:
            return 0.0
        weights = self._at_host.weight_bytes * self._at_host.trained_share
        moved = (2 + self._model.gradients_per_parameter + 2 * self._model.states_per_parameter) * weights
        beside = min(layout.num_gpus, self._node.num_gpus)
        return moved / layout.sharded_over * beside / HOST_BYTES_PER_SECOND

    def share_on_cards(self, layout: Layout) -> float:
        """The share of the weights that the cards update."""
        if not layout.streams_weights or self._at_host is None:
            return 1.0
        return max(
            0.0, 1 - self._at_host.weight_bytes * self._at_host.trained_share / max(1, self._model.parameter_bytes)
        )
