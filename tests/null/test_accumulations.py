"""The statement that keeps a tensor of every step is found in the source, by the names that lead from the lines that grow to it."""

import textwrap
from pathlib import Path

import pytest

from tightfit.analysis.source.accumulations import accumulations_from, advice_on_accumulation

LOOP = """\
for x, y in loader:
    output = model(x)  # grows
    loss = criterion(output, y)
    loss.backward()
    optimizer.step()
"""


def found_in(tmp_path: Path, source: str, function: str = "") -> list[str]:
    """The statements found from the lines of `source` that end with `# grows`."""
    path = tmp_path / "train.py"
    path.write_text(source)
    lines = [at for at, line in enumerate(source.splitlines(), 1) if line.endswith("# grows")]
    found = accumulations_from([(f"{path}:{line}", function) for line in lines])
    assert all(
        source.splitlines()[int(one.line.rpartition(":")[2]) - 1].strip().startswith(one.text[:20]) for one in found
    )
    return [one.text for one in found]


@pytest.mark.parametrize(
    "statement",
    [
        "total += loss",
        "total = total + loss",
        "total = 0.9 * total + 0.1 * loss",
        "total.add_(loss)",
        "self.total += loss / len(loader)",
        "losses.append(loss)",
        "log['loss'].append(loss)",
        "log[step] = {'loss': loss}",
        "outputs += [output]",
        "outputs.append(output.detach())",
        "history = [*history, output.detach()]",
        "rows.append((step, output.view(-1).detach()))",
        "losses.append(loss.cpu())",
    ],
)
def test_what_keeps_a_tensor_of_every_step_is_found(tmp_path: Path, statement: str) -> None:
    assert found_in(tmp_path, LOOP + f"    {statement}\n") == [statement]


@pytest.mark.parametrize(
    "statement",
    [
        "total += loss.item()",
        "total += loss.detach()",
        "total += float(loss)",
        "losses.append(loss.item())",
        "outputs.append(output.detach().cpu())",
        "outputs.extend(output.tolist())",
        "sizes.append(output.shape)",
        "lines.append(f'{loss:.3f}')",
        "loss = loss + penalty",
        "log['loss'] = loss",
        "hidden = hidden.detach()",
        "losses.append(loss.detach())",  # of the line that grows this holds nothing
        "rows.append((step, output.argmax(1)))",
        "correct += (output.argmax(1) == y).sum().item()",
        "steps += 1",
    ],
)
def test_what_keeps_no_tensor_is_not_accused(tmp_path: Path, statement: str) -> None:
    assert found_in(tmp_path, LOOP + f"    {statement}\n") == []


def test_a_sum_that_each_step_begins_anew_keeps_nothing(tmp_path: Path) -> None:
    source = """\
    for batch in loader:
        total = 0
        for part in batch:
            output = model(part)  # grows
            total += output.mean()
        total.backward()
        optimizer.step()
        kept.append(total)
    """
    assert found_in(tmp_path, textwrap.dedent(source)) == ["kept.append(total)"]


def test_a_sum_of_an_epoch_is_said_unless_a_longer_one_holds_it(tmp_path: Path) -> None:
    epochs = "for epoch in range(9):\n    total = 0\n" + textwrap.indent(LOOP, "    ") + "        total += loss\n"
    assert found_in(tmp_path, epochs) == ["total += loss"]
    assert found_in(tmp_path, epochs + "        every.append(loss)\n") == ["every.append(loss)"]


def test_a_forward_pass_that_adds_to_what_is_its_own_is_not_accused(tmp_path: Path) -> None:
    source = """\
    class Model(torch.nn.Module):
        def forward(self, x, shift):
            states = []
            for block in self.blocks:
                x = x + block(x)  # grows
                states.append(x)
                shift += x
            return x
    """
    assert found_in(tmp_path, textwrap.dedent(source)) == []
    kept = textwrap.dedent(source).replace("return x", "self.seen.append(x)\n        return x")
    assert found_in(tmp_path, kept) == ["self.seen.append(x)"]


def test_a_loss_that_the_model_computes_is_followed_from_its_backward_call(tmp_path: Path) -> None:
    model, train = tmp_path / "model.py", tmp_path / "train.py"
    model.write_text("def forward(self, x):\n    x = self.layer(x)\n    return x.mean()\n")
    train.write_text(
        "def train(model):\n    total = 0\n    for x in loader:\n        _, loss = model(x)\n        loss.backward()\n        total += loss\n"
    )
    assert [one.text for one in accumulations_from([(f"{model}:2", "")], [f"{train}:3"])] == ["total += loss"]


def test_a_file_that_is_not_the_one_that_ran_says_nothing(tmp_path: Path) -> None:
    source = "def train():\n" + textwrap.indent(LOOP + "    losses.append(loss)\n", "    ")
    assert found_in(tmp_path, source, "train") == ["losses.append(loss)"]
    assert found_in(tmp_path, source, "evaluate") == []
    for place in ("gone.py:3", f"{tmp_path}:1", "/dev/zero:1", "model", "train.py:x"):
        assert accumulations_from([(place, "")]) == ()
    (tmp_path / "cut.py").write_text("def train(:\n")
    assert accumulations_from([(f"{tmp_path / 'cut.py'}:1", "")]) == ()


def test_the_advice_is_for_what_is_kept(tmp_path: Path) -> None:
    source = (
        LOOP
        + "    total += loss\n    losses.append(loss)\n    outputs.append(output.detach())\n    last.append(criterion(output, y))\n"
    )
    path = tmp_path / "train.py"
    path.write_text(source)
    a_sum, a_list, unnamed = map(advice_on_accumulation, accumulations_from([(f"{path}:2", "")]))
    assert (
        a_sum
        == "`total += loss` retains the graph of every step: `loss.detach()`, or `loss.item()`, which waits for the GPU"
    )
    assert a_list.endswith(
        "keeps a tensor of every step, and its graph if it has one: `loss.item()` or `loss.detach().cpu()`"
    )
    assert unnamed.endswith("`.item()` of the tensor or `.detach().cpu()` of the tensor")
    path.write_text(LOOP + "    outputs.append(output.detach())\n")
    (detached,) = map(advice_on_accumulation, accumulations_from([(f"{path}:2", "")]))
    assert ".item()" not in detached and "`.cpu()` of the tensor" in detached


def test_a_function_that_has_not_run_keeps_nothing(tmp_path: Path) -> None:
    """Each of a file's functions may be a program; one that has run is known by its lines."""
    source = "def grows(model, x):\n    return model(x)\n\n\n"
    for name in ("other", "train"):
        source += f"def {name}(loader):\n    for x in loader:\n        loss = step(x)\n        loss.backward()\n        {name}s.append(loss)\n\n\n"
    path = tmp_path / "train.py"
    path.write_text(source)
    line = next(at for at, text in enumerate(source.splitlines(), 1) if "def train" in text) + 2
    lines = [(f"{path}:2", "grows")]
    assert accumulations_from(lines) == ()
    assert [one.text for one in accumulations_from(lines, [f"{path}:{line}"])] == ["trains.append(loss)"]
