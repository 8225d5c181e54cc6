"""Random operators, recognised by torch's own tag `nondeterministic_seeded` (aten/src/ATen/native/tags.yaml).

Attention and recurrent layers have the tag as well, since they draw if their dropout rate is above 0. A tape does not record arguments, so they do not
count here; code that sees the call checks the rate.
"""

import functools

import torch

_Packet = type(torch.ops.aten.add)
_RATES = ("dropout", "dropout_p")


@functools.cache
def draws(name: str) -> bool:
    """Whether the operator `name`, as a tape has it ("aten.bernoulli_.float", "mylib.noise") or without torch's namespace ("rand"), always draws."""
    namespace, *parts = name.split(".") if "." in name else ("aten", name)
    packet = getattr(getattr(torch.ops, namespace), parts[0], None)
    # What a namespace has besides operators, such as `__get__`, is no operator.
    if not isinstance(packet, _Packet):
        return False
    overloads = parts[1:] or packet.overloads()
    return any(_always_draws(getattr(packet, overload)) for overload in overloads)


def _always_draws(operator: torch._ops.OpOverload) -> bool:
    is_tagged = torch.Tag.nondeterministic_seeded in operator.tags
    return is_tagged and not any(argument.name in _RATES for argument in operator._schema.arguments)
