"""Which operators of torch take numbers from a generator, told by the tag that torch itself gives them.

Attention and recurrent layers have the tag as well, for they draw where they are given a rate of dropout. A tape has no such arguments, so here they
do not count; whoever runs the code looks at the rate.
"""

import functools

import torch

_RATES = ("dropout", "dropout_p")


@functools.cache
def draws(name: str) -> bool:
    """Whether the operator `name`, as a tape has it ("aten.bernoulli_.float") or without its namespace ("rand"), always draws."""
    parts = name.removeprefix("aten.").split(".")
    packet = getattr(torch.ops.aten, parts[0], None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads = parts[1:] if len(parts) > 1 else packet.overloads()
    return any(_always_draws(getattr(packet, overload)) for overload in overloads)


def _always_draws(operator: torch._ops.OpOverload) -> bool:
    is_tagged = torch.Tag.nondeterministic_seeded in operator.tags
    return is_tagged and not any(argument.name in _RATES for argument in operator._schema.arguments)
