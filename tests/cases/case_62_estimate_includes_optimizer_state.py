"""A peak predicted before the first step must include lazily created state.

Adam has 2 times the parameters' bytes, AMSGrad 3 times, SGD with momentum once, SGD none.
"""

import copy

import torch
import torch.nn as nn

import bigbatch as bb

OPTIMIZERS = dict(
    sgd=lambda parameters: torch.optim.SGD(parameters, 0.1),
    momentum=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    adamw=lambda parameters: torch.optim.AdamW(parameters, 0.1),
    amsgrad=lambda parameters: torch.optim.AdamW(parameters, 0.1, amsgrad=True),
)


def build():
    torch.manual_seed(51)
    return dict(
        make_model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)),
        batch=dict(x=torch.randn(4, 64)),
        loss_fn=lambda model, batch: model(batch["x"]).square().mean(),
        optimizers=OPTIMIZERS,
    )


def _state_over_parameters(optimizer):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [tensor for slots in optimizer.state.values() for tensor in slots.values() if torch.is_tensor(tensor)]
    return sum(tensor.nbytes for tensor in state if tensor.dim()) / sum(parameter.nbytes for parameter in parameters)


def reference():
    """Bytes of state after one real step, relative to the parameters' bytes."""
    found = {}
    for name, make_optimizer in OPTIMIZERS.items():
        case = build()
        model = case["make_model"]()
        optimizer = make_optimizer(model.parameters())
        case["loss_fn"](model, case["batch"]).backward()
        optimizer.step()
        found[name] = _state_over_parameters(optimizer)
    return found


def _trial_step(optimizer):
    private = copy.deepcopy(optimizer)
    for group in private.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    private.step()
    return _state_over_parameters(private)


def careful():
    return {name: _trial_step(make(build()["make_model"]().parameters())) for name, make in OPTIMIZERS.items()}


def naive_state_before_first_step():
    return dict.fromkeys(OPTIMIZERS, 0.0)


def naive_fixed_factor():
    return dict.fromkeys(OPTIMIZERS, 2.0)


def ours():
    """A profile, before any step."""
    found = {}
    for name, make_optimizer in OPTIMIZERS.items():
        case = build()
        model = case["make_model"]()
        optimizer = make_optimizer(model.parameters())
        profile = bb.profile(model, case["loss_fn"], case["batch"], optimizer=optimizer, calibrate=False)
        assert not optimizer.state
        found[name] = profile.optimizer_bytes / profile.parameter_bytes
    return found


def check(result):
    for name, wanted in reference().items():
        error = abs(result[name] - wanted)
        assert error < 0.05, f"{name}: {result[name]:.2f} x parameter bytes, true {wanted:.2f}"
