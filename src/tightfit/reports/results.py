"""Estimates as the library returns them: the plain data of `simulate.estimate` with representations as text, for rich and for notebooks."""

import dataclasses
from typing import Self

from tightfit.reports.advice import largest_allocations, to_try
from tightfit.reports.html.fragment import estimate_fragment
from tightfit.reports.printer import Printer
from tightfit.reports.text.estimates import EstimateText
from tightfit.reports.verdicts import named_phase, verdict_words
from tightfit.simulate import estimate as simulated
from tightfit.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(simulated.Estimate):
    """The memory and time of a workload on a GPU; shown in full by rich and in a notebook. `at_peak` adds up to `peak.device_bytes`."""

    @classmethod
    def of(cls, estimate: simulated.Estimate) -> Self:
        """The same figures as an instance of this class."""
        return cls(**{field.name: getattr(estimate, field.name) for field in dataclasses.fields(estimate)})

    def explain(self) -> str:
        """The verdict and its reasons in a few sentences, without colour."""
        word, amount = verdict_words(self)
        peak, moment = self.peak, self.moment
        where = ", ".join(part for part in (named_phase(moment.phase), moment.module, moment.line) if part)
        sentences = [
            f"{self.target} {word} on {self.device} ({amount}).",
            *([f"Not all was seen: {self.coverage.words}."] if self.fits and self.coverage.words else []),
            f"Its peak is {format_bytes(peak.device_bytes)} of {format_bytes(self.capacity_bytes)}, "
            f"between {format_bytes(peak.device_low_bytes)} and {format_bytes(peak.device_high_bytes)}, "
            f"in {moment.span or 'the run'} ({where}).",
            f"Largest: {largest_allocations(self)}.",
        ]
        if not self.fits:
            sentences.append(f"To try: {to_try(self)}.")
        return "\n".join(sentences)

    def __rich__(self) -> EstimateText:
        return EstimateText(self)

    def _repr_html_(self) -> str:
        return estimate_fragment(self.to_json())

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        """What IPython shows in a terminal; all fields are in `repr`."""
        printer.text(self.explain())
