"""Names of operators, without those of their variants, by what `row_flow` has to know of them besides their rules."""

# Random factories are among them: where randomness is allowed at all, one row's draws are as good as another's.
MAKES_UNIFORM = frozenset(
    [
        "zeros",
        "ones",
        "full",
        "empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "zero",
        "fill",
        "scalar_tensor",
        "rand",
        "randn",
        "rand_like",
        "randn_like",
        "empty_permuted",
    ]
)
# Of a tensor they take its size alone.
TAKES_SIZE = frozenset(["zeros_like", "ones_like", "full_like", "empty_like"])
# Besides pointwise operators, which see that position numbers vary along the rows.
_WITH_COUNTS = """index _unsafe_index index_put _index_put_impl _unsafe_index_put index_fill new_zeros new_ones new_full new_empty new_empty_strided
    squeeze unsqueeze t transpose swapaxes swapdims detach as_strided"""
TAKES_COUNT = frozenset(_WITH_COUNTS.split())
KEEPS_COUNT = frozenset(["_to_copy", "clone", "lift_fresh_copy"])
# `all` and `any` over the batch are taken for a check of its inputs (no NaN, no padding): a part answers for
# its own rows.
VOTES = frozenset(["all", "any", "_is_all_true", "_is_any_true"])
KEEPS_VOTE = frozenset(["logical_not", "bitwise_not", "_to_copy", "clone"])
