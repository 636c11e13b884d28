"""What models of one script are called, so that a reader knows which verdict is whose."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm_python
from torch import nn
from torch.optim import SGD

from gradvitals.integrations.zero_code.discovery import Found, distinct_name

TWO_SEQUENTIALS = """
import torch
from torch import nn
{begin}
    netG = nn.Sequential(nn.Linear(2, 3))
    netD = nn.Sequential(nn.Linear(3, 1))
    makes, judges = torch.optim.Adam(netG.parameters()), torch.optim.Adam(netD.parameters())
    for _ in range(3):
        judges.zero_grad()
        netD(netG(torch.ones(4, 2)).detach()).mean().backward()
        judges.step()
        makes.zero_grad()
        netD(netG(torch.ones(4, 2))).mean().backward()
        makes.step()
{end}
"""


class Net(nn.Linear):
    pass


def found(model: nn.Module) -> Found:
    return Found(model, [SGD(model.parameters(), lr=0.1)], type(model).__name__, has_modules=True)


def test_a_model_is_called_by_its_class_or_its_variable_or_a_number() -> None:
    net, plain, other = Net(1, 1), nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))
    variables = {"step": 3, "net": net, "netG": plain}
    assert distinct_name(found(net), (), variables) == "Net"
    assert distinct_name(found(net), ("Net",), variables) == "net"
    assert distinct_name(found(plain), (), variables) == "netG"
    assert distinct_name(found(other), (), variables) == "Sequential of 1 layer"
    taken = ("Sequential of 1 layer", "Sequential of 1 layer-2")
    assert distinct_name(found(other), taken, variables) == "Sequential of 1 layer-3"
    assert distinct_name(found(nn.Linear(1, 1)), (), variables) == "Linear"


@pytest.mark.parametrize(
    ("begin", "end", "names"),
    [
        ("if True:", "", ("netG", "netD")),
        ("def train():", "train()", ("netG", "netD")),
    ],
)
def test_two_models_of_one_class_can_be_told_apart(
    tmp_path: Path, begin: str, end: str, names: tuple[str, str]
) -> None:
    script = tmp_path / "gan.py"
    script.write_text(TWO_SEQUENTIALS.format(begin=begin, end=end))
    done = warm_python.run("-m", "gradvitals.cli", "run", "--run", "runs/gan", script.name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line.removeprefix("gradvitals: ") for line in done.stderr.splitlines() if "(runs/" in line]
    heads = [line.split(": ")[0] for line in said]
    assert heads == [f"{names[0]} (runs/gan)", f"{names[1]} (runs/gan-{names[1]})"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"gan", f"gan-{names[1]}"}
