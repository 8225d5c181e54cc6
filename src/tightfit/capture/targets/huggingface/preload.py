"""What traces of Hugging Face models import, in the process that they are forked from: transformers takes as long to import as a small model to trace."""

import importlib

from tightfit.capture.patches import eager
from tightfit.capture.targets.huggingface.known_names import OF_CARDS, is_any_installed


def import_transformers() -> None:
    """Imports what all models of transformers have in common, and keeps torch's compiler out as a trace does."""
    # There is no card in the process that is forked from.
    if is_any_installed(OF_CARDS):
        return
    eager.keep_compiler_out()
    importlib.import_module("transformers.modeling_utils")
