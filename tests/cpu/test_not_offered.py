"""Where nothing fits, each technique that has no place in the program is named with the reason."""

from pathlib import Path

import tightfit

PROGRAM = """
import torch

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 64)
        self.rnn = torch.nn.GRU(64, 64, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(64, 1000)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])

model = Tagger().cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    tokens = torch.randint(0, 1000, (8, 32), device="cuda")
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_recurrent_model_is_told_why_it_gets_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    plan = tightfit.plan(str(tmp_path / "train.py"), "RTX 4090", budget="1MiB", prove=False)
    why = {alternative.name: alternative.why for alternative in plan.alternatives}
    assert "a recurrent layer is one kernel" in why["checkpointing"]
    assert "a separate bias" in why["chunked_loss"]
    assert [name for name, reason in why.items() if "--host" in reason] == ["optimizer_offload"]
