"""HTML pages that need nothing else, and fragments for notebooks."""
