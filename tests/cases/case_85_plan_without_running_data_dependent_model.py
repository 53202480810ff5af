"""Planning on fake tensors meets a model that looks at values.

The planner must fall back or say why it cannot, and not crash or answer zero.
"""

import copy

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.a(x)
        return self.b(hidden) if hidden.sum().item() > 0 else self.b(hidden) * 2


def mean_loss(model, batch):
    return model(batch["x"]).square().mean()


def build():
    torch.manual_seed(65)
    return dict(model=Net(), batch=dict(x=torch.randn(4, 4)))


def reference():
    return dict(status_in=("fallback", "unsupported"))


def _trace(case):
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model = copy.deepcopy(case["model"])
        mean_loss(model, {name: fake.from_tensor(tensor) for name, tensor in case["batch"].items()})
    return "planned"


def careful():
    try:
        return dict(status=_trace(build()))
    except Exception as error:
        return dict(status="fallback", reason=type(error).__name__)


def naive():
    return dict(status=_trace(build()))


def check(result):
    assert result["status"] in reference()["status_in"], result
    assert result.get("reason"), result
