"""Whether values are the same: contents read at the host and on the card, checksums of results, comparisons within a bound."""
