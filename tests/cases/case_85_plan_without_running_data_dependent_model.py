"""Planning on fake tensors meets a model that looks at values.

The planner must fall back or say why it cannot, and not crash or answer zero.
"""

import copy

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode

import bigbatch as bb


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


def ours():
    """Real tensors are measured, and the profile says why."""
    case = build()
    optimizer = torch.optim.SGD(case["model"].parameters(), 0.1)
    profile = bb.profile(case["model"], mean_loss, case["batch"], optimizer=optimizer)
    plan = bb.plan(profile, batch_size=8, memory_budget="1MiB")
    assert (plan.peak_bytes or 0) > profile.parameter_bytes
    return dict(status="fallback", reason=profile.fallback)


def ours_on_meta():
    """There is nothing to measure with, so it is an error that says why."""
    case = build()
    batch = {name: tensor.to("meta") for name, tensor in case["batch"].items()}
    try:
        bb.profile(case["model"].to("meta"), mean_loss, batch)
    except bb.TraceError as error:
        return dict(status="unsupported", reason=str(error))
    return dict(status="planned")


def check(result):
    assert result["status"] in reference()["status_in"], result
    assert result.get("reason"), result
