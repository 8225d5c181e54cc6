"""The rolling maximum: the next samples need what the last ones did."""

from typing import ClassVar, final

from tightfit.forecast.models.abstract_model import AbstractModel
from tightfit.forecast.models.residual_bounds import residual_bounds
from tightfit.forecast.past import Past
from tightfit.forecast.series import Floats, recent_maximum


@final
class RollingMaximum(AbstractModel):
    """The guess is the maximum of the last `horizon` samples."""

    name: ClassVar[str] = "rolling_maximum"

    def bounds(self, history: Past, levels: Floats) -> Floats:
        """See `AbstractModel`."""
        return residual_bounds(history, recent_maximum(history.values, history.horizon), levels)
