"""`parallel.rollout_ranks` in one process: what is refused, what travels, and how the two sides speak."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_engine import FakeEngine, answer

from lightrl.config.load import load_config
from lightrl.config.preferences import of_command
from lightrl.config.schema import Config, ParallelConfig
from lightrl.distributed.mesh import find_part
from lightrl.engine.base import Completion, EngineLostError, GenerateRequest, SamplingParams
from lightrl.engine.remote.channel import Listener, connect
from lightrl.engine.remote.client import RemoteEngine, RemoteGroupEngine, RolloutRank
from lightrl.engine.remote.messages import (
    pack_completion,
    pack_error,
    pack_request,
    unpack_completion,
    unpack_error,
    unpack_request,
)
from lightrl.engine.remote.service import RolloutService, accept_all
from lightrl.engine.sglang_requests import completion_of
from lightrl.errors import LostError, UserError
from lightrl.sync.broadcast import join_group
from lightrl.training import rollout_ranks
from lightrl.types import Status

CPU = torch.device("cpu")


# ---- what is refused


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"engine": {"kind": "sglang_server", "urls": ["http://a:1"]}},
            ["parallel.rollout_ranks", "engine.kind = 'sglang_server'"],
        ),
        (
            {"engine": {"kind": "sglang", "tensor_parallel": 2}},
            ["parallel.rollout_ranks", "engine.tensor_parallel = 2 does not divide"],
        ),
        ({"debug": {"rollouts": "dump"}}, ["parallel.rollout_ranks", "debug.rollouts"]),
    ],
)
def test_settings_that_do_not_go_together(sections: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load_config(parallel={"rollout_ranks": 3}, **sections)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_engines_on_their_own_ranks_may_work_beside_training() -> None:
    rest: dict[str, Any] = {"engine": {"kind": "sglang"}, "correction": {"use_tis": True}}
    for schedule in ("one_step_off", "async"):
        load_config(parallel={"rollout_ranks": 1}, rollout={"schedule": schedule}, **rest)
        with pytest.raises(UserError, match=r"parallel\.rollout_ranks"):
            load_config(rollout={"schedule": schedule}, **rest)


@pytest.mark.parametrize("command", ["sft", "dpo", "rm"])
def test_commands_that_generate_nothing(command: str) -> None:
    config = Config(parallel=ParallelConfig(rollout_ranks=1))
    assert ("parallel.rollout_ranks", f"lightrl {command} generates nothing") in [
        (key, text.partition(":")[0]) for key, text in of_command(config, command)
    ]


def test_parts_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # whatever other tests left behind
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match=r"parallel\.rollout_ranks: 1, .* single process.*--nproc-per-node 2"):
        find_part(1)
    monkeypatch.setenv("WORLD_SIZE", "5")
    found = []
    for rank in range(5):
        monkeypatch.setenv("RANK", str(rank))
        found.append(find_part(2))
    assert [(p.trains, p.rank, p.size) for p in found] == [
        (True, 0, 3), (True, 1, 3), (True, 2, 3), (False, 0, 2), (False, 1, 2),
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"parallel\.rollout_ranks: 5 of the 5 ranks .* none is left to train"):
        find_part(5)


# ---- what travels


def test_messages_are_exact() -> None:
    request = GenerateRequest(
        id="a/1",
        tokens=[1, 2],
        sampling=SamplingParams(max_new_tokens=7, temperature=0.1 + 0.2, stop=("x",), stop_token_ids=(3,)),
        n=2,
        seeds=(2**63 + 1, 5),
        resumed=1,
    )
    assert unpack_request(pack_request(request)) == request
    bare = GenerateRequest(id="b", tokens=[], sampling=SamplingParams(max_new_tokens=1))
    assert unpack_request(pack_request(bare)) == bare
    for routing in (None, torch.arange(12, dtype=torch.int16).view(2, 3, 2), torch.zeros(0, 3, 2, dtype=torch.uint8)):
        completion = Completion(
            tokens=[4, 5], logprobs=[-0.1 - 0.2, float("-inf")], status=Status.TRUNCATED, policy_versions=[3, 4],
            version_tokens=[1, 1], top_ids=[[1], [2]], top_logprobs=[[-1.5], [-2.5]], routing=routing,
        )  # fmt: skip
        found = unpack_completion(pack_completion(completion))
        if routing is not None:
            assert torch.equal(found.routing, routing)  # type: ignore[arg-type]
            assert found.routing.dtype == routing.dtype  # type: ignore[union-attr]
        found.routing = completion.routing = None
        assert found == completion


def test_errors_keep_their_kind() -> None:
    lost = unpack_error(pack_error(EngineLostError("gone\nits log", {1: answer(5)})))
    assert isinstance(lost, EngineLostError)
    assert (str(lost), lost.finished) == ("gone\nits log", {1: answer(5)})
    for error in (UserError("a"), LostError("b"), ValueError("c")):
        found = unpack_error(pack_error(error))
        assert (type(found), str(found)) == (type(error), str(error))
    assert str(unpack_error(pack_error(KeyError("d")))) == "KeyError: 'd'"


@pytest.mark.parametrize(
    ("tokens", "status"),
    [([8, 9, 7], Status.TRUNCATED), ([8, 2], Status.COMPLETED), ([8, 9], Status.ABORTED), ([], Status.ABORTED)],
)
def test_an_answer_that_ended_as_it_was_aborted(tokens: list[int], status: Status) -> None:
    """SGLang names the abort alone: what is whole must not be gone on with."""
    model = SimpleNamespace(eos_token_ids=[2], routing=None, context_length=99)
    request = GenerateRequest(id="r", tokens=[5, 6], sampling=SamplingParams(max_new_tokens=3))
    output = {"tokens": tokens, "logprobs": [-1.0] * len(tokens), "reason": "abort", "matched": None, "version": "4"}
    output |= {"top_ids": [], "top_logprobs": []}
    assert completion_of(model, request, output, None, 4).status is status  # type: ignore[arg-type]


# ---- the two sides


class World:
    """A training rank by itself."""

    rank, size = 0, 1

    def gather(self, record: Any) -> list[Any]:
        return [record]


class LoadingEngine(FakeEngine):
    """It wants every set of weights twice, and keeps what it was given."""

    passes: Sequence[Any] = ()
    failing = ""
    why_lost = "its log says why"

    def load_groups(self, groups: Any, version: int) -> None:
        self.passes = [[(name, t.clone()) for group in groups for name, t in group] for _ in range(2)]
        if self.failing:
            raise RuntimeError(self.failing)
        self.policy_version = version

    def close(self) -> None:
        """Nothing to free."""


@contextmanager
def both_sides(engine: Any, kind: type[RemoteEngine] = RemoteGroupEngine, **more: Any) -> Iterator[Any]:
    """A training rank's engine over one that serves in a thread."""
    listener, ended = Listener(), []
    store = dist.HashStore()

    def join(rank: int) -> Callable[[str], Any]:
        return lambda name: join_group(dist.PrefixStore(name, store), rank, 2, CPU, timedelta(seconds=30))

    def serve() -> None:
        channels = accept_all(listener, 1, 10)
        service = RolloutService(channels, start=lambda about: engine, join=join(1), device=CPU, beat=0.2)
        try:
            asyncio.run(service.run())
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    rank = RolloutRank(connect(str(listener.path)), name="rank 1", hang_timeout=3.0, rank=0)
    try:
        yield kind(
            [rank], about={}, join=join(0), world=World(), device=CPU, bucket_bytes=1 << 12, **more
        ), ended  # fmt: skip
    finally:
        rank.close()
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


def ask(name: str, *seeds: int) -> GenerateRequest:
    return GenerateRequest(
        id=name, tokens=[1], sampling=SamplingParams(max_new_tokens=4), n=len(seeds), seeds=tuple(seeds)
    )


def groups() -> list[list[tuple[str, torch.Tensor]]]:
    """Uneven sizes and dtypes, one tensor larger than a bucket, an empty one, a view with strides."""
    torch.manual_seed(0)
    return [
        [("a", torch.randn(3)), ("b", torch.randn(5, 7).bfloat16()), ("c", torch.arange(9))],
        [("d", torch.randn(70, 41)), ("e", torch.randn(0, 4))],
        [("f", torch.randn(6, 4).T)] + [(f"g{i}", torch.randn(301)) for i in range(9)],
    ]


def test_weights_arrive_in_order_and_as_often_as_the_engine_wants() -> None:
    engine = LoadingEngine()
    with both_sides(engine, dtypes={"a": torch.bfloat16}) as (remote, ended):
        for version in (3, 4):
            remote.load_groups(groups(), version)
            assert (remote.policy_version, engine.policy_version) == (version, version)
            expected = [(n, t.bfloat16() if n == "a" else t) for group in groups() for n, t in group]
            assert len(engine.passes) == 2
            for found in engine.passes:
                assert [name for name, _ in found] == [name for name, _ in expected]
                assert all(
                    torch.equal(t, e) and t.dtype == e.dtype for (_, t), (_, e) in zip(found, expected, strict=True)
                )
        engine.failing = "other weights than the trainer's"
        with pytest.raises(RuntimeError, match="other weights than the trainer's"):
            remote.load_groups(groups(), 5)
    assert ended == [None]


def test_requests_answers_aborts_and_cancelled_ones() -> None:
    engine = LoadingEngine(ticks=lambda seed: 10**9 if seed > 90 else 1 + seed)

    async def talk(remote: Any) -> None:
        one, two = await asyncio.gather(remote.generate(ask("x", 3, 1)), remote.generate(ask("y", 7)))
        assert (one, two) == ([answer(3), answer(1)], [answer(7)])
        long = asyncio.ensure_future(remote.generate(ask("z", 4, 99)))
        with pytest.raises(ValueError, match="under way already"):
            await asyncio.gather(remote.generate(ask("z", 1)), long)
        remote.abort("z")
        found = await long
        assert found[0] == answer(4) or found[0].status is Status.ABORTED
        assert found[1].status is Status.ABORTED
        at_once = asyncio.ensure_future(remote.generate(ask("u", 99)))
        await asyncio.sleep(0)
        remote.abort()
        assert (await at_once)[0].status is Status.ABORTED
        gone = asyncio.ensure_future(remote.generate(ask("w", 99)))
        await asyncio.sleep(0.2)
        assert "0/w" in engine.running
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await asyncio.sleep(0.2)
        assert not engine.running
        remote.offload()

    with both_sides(engine) as (remote, _):
        with pytest.raises(RuntimeError, match="no weights"):
            asyncio.run(remote.generate(ask("x", 1)))
        remote.load_groups(groups(), 1)
        asyncio.run(talk(remote))
        asyncio.run(talk(remote))  # on another event loop


def test_a_lost_engine_hands_over_what_it_had_and_is_started_anew_once() -> None:
    engine = LoadingEngine(deaths=(2,), ticks=lambda seed: 1 + 1000 * seed)

    async def losing(remote: Any) -> None:
        with pytest.raises(EngineLostError, match="the engine died") as lost:
            await remote.generate(ask("x", 0, 5, 0))
        assert lost.value.finished == {0: answer(0), 2: answer(0)}
        with pytest.raises(EngineLostError):
            await remote.generate(ask("y", 1))

    with both_sides(engine) as (remote, _):
        remote.load_groups(groups(), 1)
        assert not remote.lost
        asyncio.run(losing(remote))
        assert remote.lost
        assert remote.why_lost == "its log says why"
        remote.restart()
        remote.restart()
        assert not remote.lost
        assert engine.life == 1
        with pytest.raises(EngineLostError, match="no weights yet"):  # of one that does not know of the loss
            asyncio.run(remote.generate(ask("x", 0)))
        remote.load_groups(groups(), 1)
        assert asyncio.run(remote.generate(ask("x", 0))) == [answer(0)]


def test_a_rank_that_gives_no_sign_is_lost() -> None:
    """It is connected and silent: whoever waits is told which rank, and which key says how long."""
    listener = Listener()
    rank = RolloutRank(connect(str(listener.path)), name="rank 7, which generates,", hang_timeout=0.5, rank=0)
    channel = accept_all(listener, 1, 5)[0]
    waiting = rank.submit("flush")
    time.sleep(0.7)
    rank.check()  # it has not begun to speak
    channel.send({"event": "beat"})
    with pytest.raises(LostError, match=r"rank 7, which generates, gave no sign of life .*engine\.hang_timeout"):
        rank.wait(waiting)
    with pytest.raises(LostError, match="no sign of life"):
        rank.submit("flush")
    rank.close()
    channel.close()
    listener.close()


def test_a_training_rank_that_does_not_come() -> None:
    listener = Listener()
    channel = connect(str(listener.path))
    channel.send({"rank": 1})
    with pytest.raises(LostError, match=r"parallel\.timeout: training ranks 0 did not come"):
        accept_all(listener, 2, 0.3)
    channel.close()
    listener.close()


def test_ranks_on_another_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("lightrl/rollout_rank/0", json.dumps({"path": "/nowhere", "host": "node7"}))
    monkeypatch.setattr(rollout_ranks, "job_store", lambda timeout: store)
    config = Config(parallel=ParallelConfig(rollout_ranks=1, timeout=0.2))
    with pytest.raises(UserError, match=r"parallel\.rollout_ranks: rank 1 is on node7, rank 0 on .*sglang_server"):
        rollout_ranks.meet_rollout_ranks(config, World())  # type: ignore[arg-type]
    config = Config(parallel=ParallelConfig(rollout_ranks=2, timeout=0.2))
    store.set("lightrl/rollout_rank/0", json.dumps({"path": "/nowhere", "host": socket.gethostname()}))
    with pytest.raises(UserError, match="rank 1 has no socket at /nowhere"):
        rollout_ranks.meet_rollout_ranks(config, World())  # type: ignore[arg-type]
