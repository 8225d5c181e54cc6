"""The interface of a model: bounds of the maximum of the next samples, at many origins at once."""

import abc
from typing import ClassVar

from tightfit.forecast.past import Past
from tightfit.forecast.series import Floats


class AbstractModel(abc.ABC):
    """One way to forecast the maximum of the next samples. Subclasses are final."""

    name: ClassVar[str]

    @abc.abstractmethod
    def bounds(self, history: Past, levels: Floats) -> Floats:
        """For each origin and each level (a probability, ascending), what the outcome stays within with that probability: (origins, levels), in bytes.

        The row of an origin depends only on the samples up to it, so that past rows are what this model would have said then.
        """
