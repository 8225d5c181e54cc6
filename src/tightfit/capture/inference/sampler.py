"""The sampling of next tokens as engines profile it: temperature, top-k and top-p over whole rows of logits.

The operators are those that vLLM runs without a fused sampling kernel (`vllm/v1/sample/ops/topk_topp_sampler.py`, before it
`vllm/model_executor/layers/sampler.py`): a sort of every row, its softmax, its running sum and the way back. With a vocabulary of 128K this is the
largest allocation of a server's start-up. What the names of Python keep alive decides the peak, so each is kept as long as there.
"""

import torch


def sample(logits: torch.Tensor, *, restricts: bool) -> torch.Tensor:
    """The next token of each row of `logits` (rows, vocabulary); `restricts`: with top-k and top-p."""
    rows = logits.to(torch.float32)
    rows.div_(torch.ones(len(rows), 1, device=rows.device))
    greedy = rows.argmax(dim=-1)
    restricted = _restrict(rows) if restricts else rows
    probabilities = restricted.softmax(dim=-1, dtype=torch.float32)
    noise = torch.empty_like(probabilities)
    noise.exponential_()
    chosen = probabilities.div_(noise).argmax(dim=-1)
    return torch.where(chosen > 0, chosen, greedy)


def _restrict(rows: torch.Tensor) -> torch.Tensor:
    """`rows` without the tokens that top-k and top-p leave out."""
    limits = torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
    ordered, places = rows.sort(dim=-1, descending=False)
    least = ordered.gather(1, limits)
    ordered.masked_fill_(ordered < least, -float("inf"))
    shares = ordered.softmax(dim=-1)
    sums = torch.cumsum(shares, dim=-1, out=shares)
    ordered.masked_fill_(sums <= 0.1, -float("inf"))
    return ordered.scatter(dim=-1, index=places, src=ordered)
