"""What the operators of a tape cost on a device: seconds of the card for each, which of them launch kernels, and what a launch takes."""

import dataclasses
from functools import cached_property

import numpy as np

from tightfit.analysis.recomputable import BATCH_NORMS
from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.cost.efficiency import Efficiency, efficiency_of
from tightfit.cost.roofline import is_kernel, operator_seconds
from tightfit.devices.device import Device
from tightfit.tape import Column, Tape


# No slots, as cached properties are kept in the instance's dict.
@dataclasses.dataclass(frozen=True, eq=False)
class OperatorCosts:
    """The operators of `tape` on `device`, as columns; each is computed on first use and cached."""

    tape: Tape
    device: Device

    @cached_property
    def seconds(self) -> Column:
        """Seconds of each operator on the device."""
        return operator_seconds(self.tape, self.device)

    @cached_property
    def is_kernel(self) -> Column:
        """Which operators launch kernels; views and allocations do not."""
        return is_kernel(self.tape)

    @cached_property
    def is_product(self) -> Column:
        """Which operators are matrix products, convolutions or attention: of few rows, they take more than the launch of a kernel."""
        names = self.tape.operators.name
        known = [i for i in np.unique(names) if operator_class(self.tape.strings[i]) in TENSOR_CORE_CLASSES]
        return np.isin(names, known)

    @cached_property
    def is_batch_norm(self) -> Column:
        """Which operators are batch norms of a forward pass."""
        known = [i for i, text in enumerate(self.tape.strings) if text.startswith(BATCH_NORMS)]
        return np.isin(self.tape.operators.name, known)

    @cached_property
    def efficiency(self) -> Efficiency:
        """What the device reaches of its peak rates, and its fixed costs: the card's time for a kernel that does next to nothing, the host's to issue one."""
        return efficiency_of(self.device)
