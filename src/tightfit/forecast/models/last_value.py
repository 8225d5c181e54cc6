"""The last value: what a dashboard shows."""

from typing import ClassVar, final

from tightfit.forecast.models.abstract_model import AbstractModel
from tightfit.forecast.models.residual_bounds import residual_bounds
from tightfit.forecast.past import Past
from tightfit.forecast.series import Floats


@final
class LastValue(AbstractModel):
    """The guess is the last sample."""

    name: ClassVar[str] = "last_value"

    def bounds(self, history: Past, levels: Floats) -> Floats:
        """See `AbstractModel`."""
        return residual_bounds(history, history.values, levels)
