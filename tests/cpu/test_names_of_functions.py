"""Which function or property of a tensor its class is asked for."""

import pytest
import torch

from tightfit.techniques.lazy_tensors.deferral import name_of


class Noting(torch.Tensor):
    names: list[str] = []  # noqa: RUF012 - of this test alone

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.names.append(name_of(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_functions_and_properties_have_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(2).as_subclass(Noting)
    Noting.names.clear()
    tensor.add(1)
    _ = tensor.data
    # As in a trace, which sees reads of data.
    original = torch.Tensor.data

    def read(of: torch.Tensor) -> torch.Tensor:
        if torch.overrides.has_torch_function_unary(of):
            return torch.overrides.handle_torch_function(torch.Tensor.data.__get__, (of,), of)
        return original.__get__(of)

    monkeypatch.setattr(torch.Tensor, "data", property(read))
    _ = tensor.data
    assert Noting.names[:3] == ["add", "data", "data"]
