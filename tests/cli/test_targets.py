from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flatminima import NonFiniteLoss
from flatminima.cli.targets import TargetError, prepare

_HEAD = "import torch, flatminima as fm\nfrom torch import nn\nfrom torch.nn.functional import cross_entropy as loss\n"


def _write(folder: Path, name: str, body: str) -> None:
    (folder / f"{name}.py").write_text(_HEAD + body, encoding="utf-8")


def test_a_function_of_the_current_folder_is_called(setup: Path) -> None:
    objective = prepare("mysetup:objective")
    assert objective.num_examples == 12
    assert objective.space.size == 26


def test_a_function_of_a_package_and_of_a_class_is_found(setup: Path) -> None:
    (setup / "pack").mkdir()
    (setup / "pack" / "__init__.py").write_text("", encoding="utf-8")
    body = "import mysetup\nclass Tasks:\n    @staticmethod\n    def tiny(width=4):\n        return mysetup.objective()\n"
    _write(setup / "pack", "tasks", body)
    assert prepare("pack.tasks:Tasks.tiny").num_examples == 12


def test_the_seed_makes_a_function_that_draws_repeatable(workplace: Path) -> None:
    body = "def f():\n    x, y = torch.randn(6, 2), torch.arange(6) % 2\n    return fm.Objective(nn.Linear(2, 2), loss, (x, y))\n"
    _write(workplace, "drawn", body)
    with torch.random.fork_rng():
        first, again, other = (prepare("drawn:f", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.theta, again.theta)
    assert not torch.equal(first.theta, other.theta)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("digits-mpl", "There is no target 'digits-mpl'. Did you mean 'digits-mlp'?"),
        ("resnet", "Built in are digits-mlp, digits-cnn, mnist-cnn"),
        ("mysetpu:objective", "no module 'mysetpu' here .*Did you mean 'mysetup'"),
        ("nowhere.at.all:f", "no module 'nowhere' here"),
        ("mysetup:objektive", "no function 'objektive'. Did you mean 'objective'"),
        ("mysetup:", "no function ''"),
        ("mysetup.py:objective", "Write mysetup:function"),
        ("./sub/mysetup.py:objective", r"Write sub\.mysetup:function"),
        (":objective", "module's name as in an import. Got ''"),
        ("mysetup:network", "must return a flatminima.Objective. Got Sequential"),
        ("mysetup:fm", "must be a function that returns an Objective. Got module"),
    ],
)
def test_a_target_that_is_not_there_is_told_with_the_nearest(setup: Path, target: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        prepare(target)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f(path):\n    return None\n", "must be callable without arguments .*'path'.*Give them defaults"),
        ("def f():\n    return {}['key']\n", r"broken:f raised KeyError: 'key' \(broken\.py, line 5, in f\)"),
        ("def f():\n    raise SystemExit(3)\n", "raised SystemExit: 3"),
        ("def f():\n    raise RuntimeError\n", r"raised RuntimeError \(broken\.py"),
        ("def f():\n    return nn.Linear(2, 2)(torch.zeros(3))\n", r"raised RuntimeError: .*\(broken\.py, line 5, in f\)"),
        ("import no_such_thing\n", r"Importing broken raised ModuleNotFoundError: .*no_such_thing.*\(broken\.py, line 4"),
        ("def f(:\n", r"Importing broken raised SyntaxError: .*\(broken\.py, line 4\)"),
        ("raise OSError('disk')\n", "Importing broken raised OSError: disk"),
    ],
)
def test_an_error_of_the_users_code_is_told_with_its_place(workplace: Path, body: str, message: str) -> None:
    _write(workplace, "broken", body)
    with pytest.raises(TargetError, match=message):
        prepare("broken:f")


def test_an_error_of_the_library_inside_the_function_points_to_the_users_line(workplace: Path) -> None:
    body = (
        "def f():\n    x, y = torch.zeros(4, 5), torch.zeros(4).long()\n    return fm.Objective(nn.Linear(3, 2), loss, (x, y))\n"
    )
    _write(workplace, "misfit", body)
    with pytest.raises(TargetError, match=r"ValueError: The model and loss do not fit batch 0.*\(misfit\.py, line 6, in f\)"):
        prepare("misfit:f")


def test_an_interruption_in_the_users_code_is_no_error_of_it(workplace: Path) -> None:
    _write(workplace, "stopped", "def f():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        prepare("stopped:f")


def test_a_checkpoint_is_loaded_into_the_objectives_model(setup: Path) -> None:
    model = prepare("mysetup:objective").model
    changed = {name: value + 1 for name, value in model.state_dict().items()}
    torch.save(changed, setup / "model.pt")
    objective = prepare("mysetup:objective", checkpoint="model.pt")
    assert all(torch.equal(value, changed[name]) for name, value in objective.model.state_dict().items())
    assert torch.equal(objective.theta, objective.space.flatten(changed))


def test_a_checkpoint_with_nan_names_the_batch(setup: Path) -> None:
    state = prepare("mysetup:objective").model.state_dict()
    state["0.bias"].fill_(torch.nan)
    torch.save(state, setup / "model.pt")
    with pytest.raises(NonFiniteLoss, match="batch 0"):
        prepare("mysetup:objective", checkpoint="model.pt")


def test_so_many_examples_are_kept(setup: Path) -> None:
    assert prepare("mysetup:objective", num_examples=5).num_examples == 5
    with pytest.raises(ValueError, match="must be at most 12"):
        prepare("mysetup:objective", num_examples=13)


def test_what_does_not_belong_to_a_target_is_refused(setup: Path) -> None:
    with pytest.raises(TargetError, match="--data is for built-in targets"):
        prepare("mysetup:objective", data="mnist.npz")
    with pytest.raises(TargetError, match=r"nowhere\.pt does not exist"):
        prepare("mysetup:objective", checkpoint="nowhere.pt")
    with pytest.raises(ValueError, match="`data` must be None for digits-mlp"):
        prepare("digits-mlp", data="somewhere")
    with pytest.raises(TargetError, match=r"mnist-cnn needs --data PATH"):
        prepare("mnist-cnn")
    with pytest.raises(ValueError, match="--device warp9 is not there"):
        prepare("mysetup:objective", device="warp9")
