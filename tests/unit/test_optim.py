"""Schedules against hand-worked factors; clipping and the skipped step."""

import copy
import math

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from lightrl.config.schema import OptimConfig
from lightrl.distributed.mesh import init_world
from lightrl.models.shards import own_part
from lightrl.training.optim import advance, build_optimizer, build_schedule, grad_norm, lr_factor, optimizer_step


@pytest.mark.parametrize(
    ("config", "total", "factors"),
    [
        ({"schedule": "constant"}, 4, [1, 1, 1, 1, 1]),
        ({"schedule": "constant", "warmup_steps": 2}, 4, [0.5, 1, 1, 1]),
        ({"schedule": "linear"}, 4, [1, 0.75, 0.5, 0.25, 0, 0]),
        ({"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.5}, 6, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5]),
        ({"schedule": "cosine"}, 4, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0]),
        ({"schedule": "wsd", "warmup_steps": 1, "decay_steps": 2}, 6, [1, 1, 1, 1, 1, 0.5, 0]),
    ],
)
def test_schedule(config, total, factors):
    section = OptimConfig(**config)
    assert [lr_factor(i, section, total) for i in range(len(factors))] == pytest.approx(factors)


def test_a_schedule_is_brought_to_a_place_and_never_back():
    config = OptimConfig(lr=2.0, schedule="linear")
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(2, 2))], config)
    schedule = build_schedule(optimizer, config, 8, updates_done=2)
    assert optimizer.param_groups[0]["lr"] == 1.5
    for place, rate in ((5, 0.75), (5, 0.75), (3, 0.75)):
        advance(schedule, place)
        assert optimizer.param_groups[0]["lr"] == rate


def test_decay_only_on_matrices_and_first_step_by_hand():
    matrix, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    config = OptimConfig(lr=0.1, weight_decay=0.5, max_grad_norm=0)
    optimizer = build_optimizer([matrix, bias], config)
    schedule = build_schedule(optimizer, config, 10)
    matrix.grad, bias.grad = torch.ones(2, 2), torch.full((2,), -3.0)
    norm, stepped = optimizer_step(optimizer, schedule, [matrix, bias], config.max_grad_norm)
    assert stepped
    assert norm == pytest.approx(math.sqrt(4 + 18))
    # Adam's first step is lr x sign; decay takes lr x wd first
    assert matrix.detach().flatten().tolist() == pytest.approx([1 - 0.05 - 0.1] * 4)
    assert bias.tolist() == pytest.approx([1.1, 1.1])
    assert matrix.grad is None


@pytest.mark.parametrize(("most", "share"), [(1.0, 0.2), (5.1, 1.0), (0.0, 1.0)])
def test_clip_scales_to_the_norm(most, share):
    """Adam's first moment after one step is (1 - beta1) times the gradient that it was given."""
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer([p], OptimConfig(lr=1.0, betas=(0.9, 0.95)))
    p.grad = torch.tensor([3.0, 4.0])
    norm, _ = optimizer_step(optimizer, build_schedule(optimizer, OptimConfig(), 1), [p], most)
    assert norm == pytest.approx(5.0)
    assert optimizer.state[p]["exp_avg"].tolist() == pytest.approx([0.3 * share, 0.4 * share], rel=1e-6)


def test_the_norm_of_millions_of_elements_is_that_in_float64():
    """Also where a row is not full, and where a tensor is smaller than one."""
    g = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (5_000_001, 3, 4096)]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=g) * 1e-3
    squares = sum(float(p.grad.double().square().sum()) for p in parameters)
    assert grad_norm(parameters) == pytest.approx(math.sqrt(squares), rel=1e-7)
    parameters[0].grad[-1] = math.nan
    assert math.isnan(grad_norm(parameters))


@pytest.mark.filterwarnings("error")  # torch would advise against the order of calls
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_skips_the_step_and_schedule_goes_on(bad):
    p = torch.nn.Parameter(torch.ones(2, 1))
    config = OptimConfig(lr=1.0, schedule="linear")
    optimizer = build_optimizer([p], config)
    schedule = build_schedule(optimizer, config, 2)
    p.grad = torch.tensor([[bad], [1.0]])
    _, stepped = optimizer_step(optimizer, schedule, [p], 1.0)
    assert not stepped
    assert p.tolist() == [[1.0], [1.0]]
    assert optimizer.state[p]["step"] == 0  # no update of which a later one would correct its bias
    assert p.grad is None
    assert schedule.get_last_lr() == [0.5]
    assert grad_norm([p]) == 0.0


@pytest.mark.parametrize("sharded", [False, True])
def test_steps_are_torchs_to_the_last_bit(sharded):
    """With weight decay, parameters without a gradient, states loaded in between."""
    torch.manual_seed(0)
    shapes = [(3, 5), (7,), (2, 2), (4,)]
    values = [torch.randn(s) for s in shapes]
    spread = (lambda t: distribute_tensor(t, init_world("cpu").mesh["shard"])) if sharded else (lambda t: t)
    config = OptimConfig(lr=0.1, weight_decay=0.3)
    ours, theirs = ([torch.nn.Parameter(spread(v.clone())) for v in values] for _ in range(2))
    optimizer = build_optimizer(ours, config)
    groups = [{"params": [p for p in theirs if (p.ndim == 2) == flat]} for flat in (True, False)]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = 0.3, 0.0
    plain = torch.optim.AdamW(groups, lr=0.1, betas=config.betas, eps=config.eps, fused=True)
    for step in range(4):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(shapes[i])
            a.grad, b.grad = (None, None) if i == step else (spread(gradient), spread(gradient))
        optimizer.step()
        plain.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(own_part(a.detach()), own_part(b.detach()))
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = build_optimizer(ours, OptimConfig())
            optimizer.load_state_dict(saved)
    for a, b in zip(ours, theirs, strict=True):
        assert optimizer.state[a].keys() == plain.state[b].keys()
        assert optimizer.state[a]["step"] == plain.state[b]["step"]
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
