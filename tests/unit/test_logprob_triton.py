"""The GPU's path of `linear_logprobs` in Triton's interpreter, against autograd through plain float64 logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.interpreter
CASES = [((1, 8, 97), False), ((63, 40, 300), True), ((257, 16, 131), False), ((5, 24, 129), True), ((20, 8, 1), True)]


@pytest.fixture
def triton_path() -> Any:
    """The module, and plans whose tiles are small enough for several on each side of tiny inputs."""
    from lightrl.kernels import logprob_triton

    tile = logprob_triton.Tile(rows=32, columns=64, depth=16, warps=4, programs=1, group=2)
    sizes = {"gradient_bytes": 1, "max_columns": 128, "tile": tile, "backward_tile": tile}
    plan = logprob_triton.Plan(**sizes)
    return SimpleNamespace(call=logprob_triton.linear_logprobs_triton, plan=plan, module=logprob_triton)


def make_inputs(num_rows: int, width: int, vocab: int, dtype: torch.dtype, *, bias: bool) -> dict[str, Any]:
    g = torch.Generator().manual_seed(num_rows + vocab)
    return {
        "hidden": torch.randn(num_rows, width, generator=g).to(dtype),
        "weight": torch.randn(vocab, width, generator=g).to(dtype),
        "targets": torch.randint(vocab, (num_rows,), generator=g),
        "bias": torch.randn(vocab, generator=g).to(dtype) if bias else None,
    }


def results(call: Any, inputs: dict[str, Any], cotangents: Any, wanted: set[str], **settings: Any) -> dict[str, Any]:
    """Values, and the gradients of `wanted`; a cotangent that is None leaves its output out of the loss."""
    leaves = {k: v.clone().requires_grad_(k in wanted) if k in wanted else v for k, v in inputs.items()}
    logprobs, entropy = call(**leaves, **settings)
    outputs = [(out, c) for out, c in zip((logprobs, entropy), cotangents, strict=True) if c is not None]
    names = sorted(wanted)
    gradients = torch.autograd.grad([o for o, _ in outputs], [leaves[n] for n in names], [c for _, c in outputs])
    return {"logprobs": logprobs, "entropy": entropy, **dict(zip(names, gradients, strict=True))}


def plain(hidden: Any, weight: Any, targets: Any, bias: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    log_p = (logits / temperature).log_softmax(-1)
    share = log_p.exp() * log_p.clamp_min(-1e6)  # a masked word's 0 * -inf is 0
    return log_p.gather(-1, targets[:, None])[:, 0], -share.sum(-1)


def reference(inputs: dict[str, Any], cotangents: Any, wanted: set[str], temperature: float) -> dict[str, Any]:
    exact = {k: v.double() if v is not None and v.is_floating_point() else v for k, v in inputs.items()}
    exact_cotangents = [None if c is None else c.double() for c in cotangents]
    return results(plain, exact, exact_cotangents, wanted, temperature=temperature)


def assert_equal(found: dict[str, Any], expected: dict[str, Any], dtype: torch.dtype) -> None:
    for name, value in expected.items():
        rounded = name not in ("logprobs", "entropy") and dtype == torch.float16
        assert found[name].dtype == (dtype if name not in ("logprobs", "entropy") else torch.float32)
        scale = max(1.0, float(value.detach().abs().max()))
        tolerance = scale * (2e-3 if rounded else 2e-5)
        torch.testing.assert_close(found[name].double(), value, atol=tolerance, rtol=0, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize(("shape", "bias"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_and_gradients_equal_autograd(triton_path, dtype, shape, bias) -> None:
    inputs = make_inputs(*shape, dtype, bias=bias)
    temperature = 0.7 if shape[0] % 2 else 1.0
    cotangents = torch.randn(2, shape[0], generator=torch.Generator().manual_seed(0))
    wanted = {"hidden", "weight"} | ({"bias"} if bias else set())
    plan = triton_path.plan
    found = results(triton_path.call, inputs, cotangents, wanted, temperature=temperature, plan=plan)
    assert_equal(found, reference(inputs, cotangents, wanted, temperature), dtype)


@pytest.mark.parametrize("wanted", [{"hidden"}, {"weight"}, {"bias"}, {"hidden", "weight", "bias"}], ids=str)
@pytest.mark.parametrize("of", [(True, False), (False, True)], ids=["log-prob", "entropy"])
def test_gradients_of_one_output_and_one_input(triton_path, wanted, of) -> None:
    inputs = make_inputs(33, 16, 200, torch.float32, bias=True)
    random = torch.randn(2, 33, generator=torch.Generator().manual_seed(1))
    cotangents = [c if used else None for c, used in zip(random, of, strict=True)]
    found = results(triton_path.call, inputs, cotangents, wanted, temperature=1.3, plan=triton_path.plan)
    assert_equal(found, reference(inputs, cotangents, wanted, 1.3), torch.float32)


def test_masked_vocabulary(triton_path) -> None:
    """A bias of -inf: over a whole chunk, over the first words, and at one row's target."""
    inputs = make_inputs(9, 16, 390, torch.float32, bias=True)
    inputs["targets"] = torch.arange(40, 49)
    for masked in (slice(0, 3), slice(128, 256), slice(380, None)):
        inputs["bias"][masked] = -torch.inf
    cotangents = torch.randn(2, 9, generator=torch.Generator().manual_seed(2))
    call, settings = triton_path.call, {"temperature": 0.8, "plan": triton_path.plan}
    found = results(call, inputs, cotangents, {"hidden", "weight"}, **settings)
    assert_equal(found, reference(inputs, cotangents, {"hidden", "weight"}, 0.8), torch.float32)

    inputs["targets"][4] = 200
    found = results(call, inputs, cotangents, {"hidden", "weight"}, **settings)
    assert found["logprobs"][4] == -torch.inf
    assert found["logprobs"].isfinite().sum() == 8
    assert all(found[name].isfinite().all() for name in ("entropy", "hidden", "weight"))


def test_large_logits_keep_their_entropy(triton_path) -> None:
    """Logits near 300: log-sum-exp less mean logit would lose the entropy's last digits."""
    inputs = make_inputs(12, 16, 150, torch.float32, bias=True)
    inputs["bias"] = inputs["bias"] * 0.1 + 300
    inputs["weight"] *= 0.1
    wanted = {"hidden", "weight"}
    cotangents = torch.randn(2, 12, generator=torch.Generator().manual_seed(3))
    found = results(triton_path.call, inputs, cotangents, wanted, temperature=1.0, plan=triton_path.plan)
    expected = reference(inputs, cotangents, wanted, 1.0)
    torch.testing.assert_close(found["entropy"].double(), expected["entropy"], atol=5e-5, rtol=0)
    torch.testing.assert_close(found["logprobs"].double(), expected["logprobs"], atol=2e-4, rtol=0)  # 300 to 6 digits


def test_nan_stays_in_its_row(triton_path) -> None:
    inputs = make_inputs(4, 16, 300, torch.float32, bias=False)
    inputs["hidden"][2, 5] = torch.nan
    logprobs, entropy = triton_path.call(**inputs, plan=triton_path.plan)
    for values in (logprobs, entropy):
        assert values.isnan().tolist() == [False, False, True, False]


def test_target_outside_the_vocabulary_is_nan(triton_path) -> None:
    inputs = make_inputs(4, 16, 30, torch.float32, bias=True)
    inputs["targets"] = torch.tensor([0, 30, -100, 29])
    logprobs, entropy = triton_path.call(**inputs)
    assert logprobs.isnan().tolist() == [False, True, True, False]
    assert entropy.isfinite().all()


def test_what_fits(triton_path) -> None:
    """Rows, one dtype, and addresses that the hardware can read by tile."""
    fits = triton_path.module.fits
    hidden, weight = torch.zeros(4, 16), torch.zeros(9, 16)
    assert fits(hidden, weight)
    assert fits(hidden.T.contiguous().T, weight)
    assert not fits(hidden[:0], weight)
    assert not fits(hidden, weight.half())
    assert not fits(hidden.double(), weight.double())
    assert not fits(torch.zeros(4, 18), torch.zeros(9, 18))
    assert not fits(hidden, torch.zeros(9 * 16 + 1)[1:].view(9, 16))


def test_repeats_to_the_last_bit_and_takes_strided_inputs(triton_path) -> None:
    inputs = make_inputs(40, 32, 150, torch.float32, bias=False)
    strided = inputs | {"hidden": inputs["hidden"].T.contiguous().T, "weight": inputs["weight"].repeat(1, 2)[:, :32]}
    cotangents = torch.ones(2, 40)
    first, second, third = (
        results(triton_path.call, x, cotangents, {"hidden", "weight"}, plan=triton_path.plan)
        for x in (inputs, inputs, strided)
    )
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.equal(value, third[name])


def test_chunks_are_whole_tiles_equally_wide_and_bounded(triton_path) -> None:
    for vocab in (1, 97, 32_000, 151_936, 248_320):
        for num_rows in (0, 1, 63, 4096, 16_384, 100_000):
            plan = triton_path.module.Plan()
            columns = plan.columns(num_rows, vocab, 2)
            count = -(-vocab // columns)
            assert columns % 128 == 0
            assert columns * (count - 1) < vocab
            assert columns <= plan.max_columns
            assert columns * num_rows * 2 <= 1.5 * plan.gradient_bytes or columns <= 1536
    assert triton_path.module.Plan().columns(16_384, 151_936, 2) == 8064  # 18 of them and one of 6,784
