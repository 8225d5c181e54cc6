"""The smallest change of a model or its requests with which it would fit: a shorter request, or the format of weights with the most bits that has room."""

from collections.abc import Callable, Sequence

# By their bits, the most first; of files, and of what engines load.
FILE_FORMATS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs")
ENGINE_FORMATS = ("fp8", "awq")
LOADED_FORMATS = ("int8", "bitsandbytes")
_SHORTEST = 16


def smallest_change(
    num_tokens: int, fits_at: Callable[[int], bool], formats: Sequence[str], fits_in: Callable[[str], bool], whole: str
) -> str:
    """In words, empty where neither helps. `fits_at` says whether requests of so many tokens fit, `fits_in` whether those that were asked for do with weights in a format;
    `whole` names what fits then."""
    low, high = 0, num_tokens
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits_at(middle) else (low, middle)
    found = next((name for name in formats if fits_in(name)), "")
    words = [f"with requests of up to {low:,} tokens"] if low >= _SHORTEST else []
    if found:
        words.append(f"with {found} weights (--quantization {found}; changes answers)")
    return f"{whole} {', or '.join(words)}" if words else ""
