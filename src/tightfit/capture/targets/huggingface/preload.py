"""What traces of Hugging Face models import, in the process that they are forked from: transformers takes as long to import as a small model to trace."""

import importlib
import importlib.util

from tightfit.capture.patches import eager

# transformers asks at its import whether these can be used, which depends on the card; there is none in the process that is forked from.
_OF_CARDS = ("flash_attn", "flash_attn_interface")


def import_transformers() -> None:
    """Imports what all models of transformers have in common, and keeps torch's compiler out as a trace does."""
    if any(importlib.util.find_spec(name) is not None for name in _OF_CARDS):
        return
    eager.keep_compiler_out()
    importlib.import_module("transformers.modeling_utils")
