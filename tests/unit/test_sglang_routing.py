"""Routed experts as SGLang returns them: replies in the form that 0.5.17 to 0.5.23 give them."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_stand_in
import torch
from torch import Tensor

from lightrl.engine import sglang_arguments, sglang_host, sglang_start
from lightrl.engine.base import GenerateRequest, SamplingParams
from lightrl.engine.sglang_answers import fields_of
from lightrl.engine.sglang_requests import Model, Stops, completion_of
from lightrl.errors import UserError
from lightrl.models.routing import RoutingShape
from lightrl.types import Status

SHAPE = RoutingShape(layers=(1, 2), num_layers=3, top_k=2, num_experts=8)
"""The first block is dense, as with first_k_dense_replace = 1."""


def reply(experts: Tensor | None, tokens: list[int], reason: str = "length") -> dict[str, Any]:
    """What `/generate` and the engine answer."""
    meta: dict[str, Any] = {
        "id": "a", "finish_reason": {"type": reason}, "prompt_tokens": 2, "weight_version": "7", "cached_tokens": 1,
        "output_token_logprobs": [[-0.5, t, None] for t in tokens],
    }  # fmt: skip
    if experts is not None:
        meta["routed_experts"] = base64.b64encode(experts.to(torch.int32).numpy().tobytes()).decode()
    return json.loads(json.dumps({"output_ids": tokens, "meta_info": meta}))


def recorded(rows: int) -> Tensor:
    """[rows, 3, 2], zeros in the dense block; row r of block b chose r + b and r."""
    experts = torch.zeros(rows, 3, 2, dtype=torch.int64)
    for row in range(rows):
        for block in (1, 2):
            experts[row, block] = torch.tensor([row + block, row])
    return experts


def complete(
    answer: dict[str, Any],
    shape: RoutingShape | None = SHAPE,
    stops: Stops | None = None,
    wanted: bool = True,
    context_length: int = 64,
) -> Any:
    model = SimpleNamespace(eos_token_ids=[2], routing=shape, context_length=context_length)
    sampling = SamplingParams(max_new_tokens=3, return_routing=wanted)
    request = GenerateRequest(id="r", tokens=[5, 6], sampling=sampling)
    output = json.loads(json.dumps(fields_of(answer, False)))  # its way from the process that holds SGLang
    return completion_of(model, request, output, stops, 7)  # type: ignore[arg-type]


def test_every_token_that_was_fed() -> None:
    """Prompt 5 6, answer 8 9 7: four rows; the dense block is left out."""
    found = complete(reply(recorded(4), [8, 9, 7]))
    assert found.routing.dtype == torch.uint8
    assert found.routing.tolist() == [[[r + 1, r], [r + 2, r]] for r in range(4)]
    assert complete(reply(recorded(4), [8, 9, 7]), wanted=False).routing is None
    assert complete(reply(recorded(2), [8])).routing.tolist() == found.routing[:2].tolist()


def test_many_experts_take_two_bytes() -> None:
    shape = RoutingShape(layers=(1, 2), num_layers=3, top_k=2, num_experts=512)
    experts = recorded(4)
    experts[3, 2] = torch.tensor([511, 300])
    found = complete(reply(experts, [8, 9, 7]), shape)
    assert found.routing.dtype == torch.int16
    assert found.routing[3].tolist() == [[4, 3], [511, 300]]
    assert found.routing[0].tolist() == [[1, 0], [2, 0]]
    assert complete(reply(recorded(4), [8, 9, 7]), shape).routing.dtype == torch.int16  # one byte on the way


def test_what_is_not_recorded() -> None:
    """Equal experts (a slot that nothing was written to), -1 (a row of padding), and rows that did not come."""
    experts = recorded(4)
    experts[1, 1], experts[2, 2] = 0, -1
    found = complete(reply(experts[:3], [8, 9, 7])).routing
    assert found.tolist() == [[[1, 0], [2, 0]], [[255, 255], [3, 1]], [[3, 2], [255, 255]], [[255, 255]] * 2]


def test_an_answer_that_is_cut() -> None:
    """At a stop string, which SGLang generated beyond; and one that was aborted, with and without its routing."""
    stops = Stops(SamplingParams(max_new_tokens=3, stop=("i",)), lambda ids: "".join(chr(97 + i) for i in ids))
    found = complete(reply(recorded(4), [7, 8, 9], "abort"), stops=stops)
    assert (found.tokens, found.status) == ([7, 8], Status.COMPLETED)
    assert found.routing.tolist() == [[[r + 1, r], [r + 2, r]] for r in range(3)]
    assert complete(reply(recorded(3), [7, 9], "abort")).routing[2].tolist() == [[3, 2], [4, 2]]
    assert (complete(reply(None, [7, 9], "abort")).routing == 255).all()
    assert complete(reply(None, [], "abort")).routing is None


def test_an_answer_that_came_to_its_end_as_it_was_aborted() -> None:
    """SGLang says `abort` of those too: they have ended, and must not be gone on with."""

    def status(tokens: list[int], reason: str = "abort", **more: int) -> Status:
        return complete(reply(None, tokens, reason), wanted=False, **more).status

    assert status([8, 2]) is Status.COMPLETED
    assert status([8, 9, 2]) is Status.COMPLETED
    assert status([8, 9, 7]) is Status.TRUNCATED
    assert status([8, 9]) is Status.ABORTED
    assert status([8, 9], context_length=4) is Status.TRUNCATED
    assert status([]) is Status.ABORTED
    assert status([8, 9, 2], "length") is Status.COMPLETED
    assert status([8, 9, 7], "length") is Status.TRUNCATED


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "SGLang returned no routed experts: is it run with enable_return_routed_experts"),
        (recorded(4)[:, :2].flatten()[:-3], r"returned 13 routed experts, no multiple of 3 layers x 2 experts"),
        (recorded(4) + 5, "chose expert 10, the policy has 8"),
        (torch.zeros(4, 3, 2), "chooses by itself; set engine.args.moe_runner_backend = 'triton'"),
    ],
)
def test_answers_that_cannot_be_used(experts: Tensor | None, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^request 'r': .*{message}"):
        complete(reply(experts, [8, 9, 7]))
    with pytest.raises(RuntimeError, match="which the engine was not started for"):
        complete(reply(experts, [8, 9, 7]), None)


SETTINGS: dict[str, Any] = {
    "model_path": "m", "dtype": "bfloat16", "trust_remote_code": False, "context_length": 64, "vocab_size": 9,
    "tensor_parallel": 1, "device": "cuda", "gpu": 0, "capability": [9, 0], "seed": 0, "memory_fraction": 0.5,
    "max_batch": 8, "max_prefill_tokens": 64, "port": 1,
}  # fmt: skip


def test_what_sglang_is_started_with() -> None:
    """An expert kernel that records, unless the user or FP8 chose one."""
    known = {"enable_return_routed_experts", "moe_runner_backend", *sglang_stand_in.NAMES.split()}
    plain = sglang_host.engine_arguments({"settings": SETTINGS, "args": {}}, known)
    assert "enable_return_routed_experts" not in plain
    assert "moe_runner_backend" not in plain
    for routing, args, backend in (
        ("triton", {}, "triton"),
        ("triton", {"moe_runner_backend": "cutlass"}, "cutlass"),
        ("any", {}, None),
    ):
        message = {"settings": SETTINGS | {"routing": routing}, "args": args}
        found = sglang_host.engine_arguments(message, known)
        assert found["enable_return_routed_experts"] is True
        assert found.get("moe_runner_backend") == backend
    with pytest.raises(UserError, match=r"enable_return_routed_experts: set by LightRL \(correction.routing_replay\)"):
        sglang_arguments.check_names({"enable_return_routed_experts": True}, known)


def test_a_cpu_is_refused(tmp_path: Any) -> None:
    model = Model(
        path=tmp_path, layout=[], eos_token_ids=[], decode=str, dtype=torch.float32, context_length=9, vocab_size=9,
        routing=SHAPE,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"^correction.routing_replay: SGLang records routing on GPUs only"):
        sglang_start.check_routing(model, torch.device("cpu"))
    sglang_start.check_routing(model, torch.device("cuda"))
