"""Servers elsewhere as an engine, against a stand-in that speaks SGLang's HTTP API (`fake_sglang.py`)."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import contract
import pytest
import tiny_run
import torch
from fake_sglang import FakeSGLang, serve
from serving import ask, check_logprobs, serve_while
from tiny_models import CONFIGS, CONTEXT, EOS, OTHERS, VOCAB, stock
from torch import Tensor

from lightrl.config.load import load_for_run
from lightrl.config.schema import EngineConfig, SyncConfig
from lightrl.engine.base import Engine, GenerateRequest, GroupLoader, SamplingParams
from lightrl.engine.sglang import Model
from lightrl.engine.sglang_http import Server, ServerError, UnreachableError
from lightrl.engine.sglang_server import SGLangServers
from lightrl.errors import UserError
from lightrl.models.routing import RoutingShape
from lightrl.observe.rollouts import RolloutDump
from lightrl.sync.broadcast import plan
from lightrl.sync.peers import SyncError
from lightrl.types import Status

PAUSES = (0.01, 0.01)
ROUTING = RoutingShape(layers=(1,), num_layers=2, top_k=2, num_experts=8)


class Alone:
    """A job of one rank."""

    rank, size = 0, 1

    def gather(self, record: Any) -> list[Any]:
        return [record]


def letters(ids: list[int]) -> str:
    return "".join(chr(ord("a") + i % 26) for i in ids)


def url_of(listener: Any) -> str:
    return f"http://127.0.0.1:{listener.server_address[1]}"


def make_engine(
    model: torch.nn.Module,
    checkpoint: Path,
    *urls: str,
    dtype: torch.dtype = torch.float32,
    engine: dict[str, Any] | None = None,
    routing: RoutingShape | None = None,
    **sync: Any,
) -> SGLangServers:
    return SGLangServers(
        Model(
            path=checkpoint,
            layout=[(n, tuple(p.shape), dtype) for n, p in model.named_parameters()],
            eos_token_ids=[EOS],
            decode=letters,
            dtype=dtype,
            context_length=CONTEXT,
            vocab_size=VOCAB,
            routing=routing,
        ),
        EngineConfig(kind="sglang_server", urls=list(urls), **(engine or {})),
        SyncConfig(**({"transport": "disk", "timeout": 20} | sync)),
        device=torch.device("cpu"),
        ranks=Alone(),
        folder=checkpoint / "sync",
        pauses=PAUSES,
    )


def groups_of(model: torch.nn.Module) -> list[list[tuple[str, Tensor]]]:
    """Three tensors a group, as FSDP's groups come."""
    named = [(n, p.detach()) for n, p in model.named_parameters()]
    return [named[i : i + 3] for i in range(0, len(named), 3)]


def checksums(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, str]:
    tensors = {n: p.detach().to(dtype).flatten().view(torch.uint8) for n, p in model.named_parameters()}
    return {n: hashlib.sha256(t.numpy()).hexdigest()[:16] for n, t in tensors.items()}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return stock(CONFIGS["qwen3"]())


@pytest.fixture(scope="module")
def checkpoint(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


@pytest.fixture
def fake(checkpoint: Path) -> Iterator[FakeSGLang]:
    made = FakeSGLang(checkpoint)
    listener = serve(made)
    made.url = url_of(listener)
    yield made
    listener.shutdown()
    listener.server_close()


@pytest.fixture
def engine(model: torch.nn.Module, checkpoint: Path, fake: FakeSGLang) -> Iterator[SGLangServers]:
    made = make_engine(model, checkpoint, fake.url)
    made.load_groups(groups_of(model), 7)
    yield made
    made.close()


# ---- generation


def test_contract_of_all_engines(engine: SGLangServers, model: torch.nn.Module) -> None:
    assert isinstance(engine, Engine)
    assert isinstance(engine, GroupLoader)
    contract.check_greedy(engine, model, VOCAB)
    for truncation in ({}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}):
        contract.check_sampled_logprobs(engine, model, VOCAB, temperature=0.7, **truncation)
    contract.check_likeliest(engine, model, VOCAB)
    contract.check_length_and_eos(engine, VOCAB, EOS)
    contract.check_stop_ids(engine, VOCAB)
    contract.check_bad_requests(engine, VOCAB, CONTEXT)


def test_routing(tmp_path: Path) -> None:
    """The first block is dense. Stops are seen while the answer grows, and its routing comes at its end."""
    config = OTHERS["qwen3_moe"]()
    config.mlp_only_layers = [0]
    mixture = stock(config)
    mixture.config.architectures = [type(mixture).__name__]
    mixture.config.save_pretrained(tmp_path)
    fake = FakeSGLang(tmp_path)
    listener = serve(fake)
    try:
        with pytest.raises(UserError, match=r"it returns no routing .*start it with --enable-return-routed-experts"):
            make_engine(mixture, tmp_path, url_of(listener), routing=ROUTING)
        fake.info |= {"enable_return_routed_experts": True, "enable_hierarchical_cache": True}
        with pytest.raises(UserError, match=r"brings back: start it without --enable-hierarchical-cache"):
            make_engine(mixture, tmp_path, url_of(listener), routing=ROUTING)
        fake.info["enable_hierarchical_cache"] = False
        engine = make_engine(mixture, tmp_path, url_of(listener), routing=ROUTING)
        engine.load_groups(groups_of(mixture), 7)
        contract.check_routing(engine, mixture, VOCAB, 8)
        (whole,) = contract.run(engine, [request(length=30, return_routing=True)])[0]
        text = letters(whole.tokens[8:10])
        (cut,) = contract.run(engine, [request("cut", length=30, return_routing=True, stop=(text,))])[0]
        assert len(cut.tokens) <= 10
        assert torch.equal(cut.routing, whole.routing[: len(cut.routing)])
        assert len(cut.routing) == len(request().tokens) + len(cut.tokens) - 1
        engine.close()
    finally:
        listener.shutdown()
        listener.server_close()


def request(name: str = "r", length: int = 60, n: int = 1, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True} | sampling)
    return GenerateRequest(id=name, tokens=contract.prompt(9, VOCAB), sampling=params, n=n)


def test_stop_strings_are_seen_while_an_answer_grows(engine: SGLangServers, fake: FakeSGLang) -> None:
    ((free,),) = contract.run(engine, [request("free")])
    text = letters(free.tokens)
    stop = text[18:22]
    end = text.index(stop) + len(stop)
    ((answer,),) = contract.run(engine, [request("stop", stop=(stop,))])
    assert (answer.tokens, answer.status, answer.policy_versions) == (free.tokens[:end], Status.COMPLETED, [7])
    assert answer.logprobs == free.logprobs[:end]
    assert not fake.running


def test_abort(engine: SGLangServers, fake: FakeSGLang) -> None:
    """One of two requests; one that is still on its way to the server; and those that a cancelled caller left."""

    async def scenario() -> tuple[Any, Any]:
        long = asyncio.create_task(engine.generate(request("long", 390, n=2)))
        short = asyncio.create_task(engine.generate(request("short", 30)))
        while len(fake.running) < 3:
            await asyncio.sleep(0.002)
        engine.abort("long")
        engine.abort("no such request")
        return await long, await short

    long, short = asyncio.run(scenario())
    assert [a.status for a in long] == [Status.ABORTED] * 2
    assert all(len(a.tokens) == len(a.logprobs) < 390 for a in long)
    assert (short[0].status, len(short[0].tokens)) == (Status.TRUNCATED, 30)

    async def at_once() -> Any:
        task = asyncio.create_task(engine.generate(request("at once", 390)))
        await asyncio.sleep(0)
        engine.abort()
        return await task

    assert [a.status for a in asyncio.run(at_once())] == [Status.ABORTED]

    async def cancelled() -> None:
        task = asyncio.create_task(engine.generate(request("cancelled", 390, n=2)))
        while not fake.running:
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancelled())
    engine.offload()
    fake.flush(5)  # the server is free again


def test_lost_connections_are_tried_again_and_named(engine: SGLangServers, fake: FakeSGLang) -> None:
    fake.faults["drop"], fake.faults["overload"] = 1, 1
    ((answer,),) = contract.run(engine, [request("again", 5)])
    assert len(answer.tokens) == 5
    fake.faults["drop"] = 99
    with pytest.raises(UnreachableError, match=rf"{fake.url} broke off the connection: .* \(3 attempts\)"):
        contract.run(engine, [request("never", 5)])
    fake.faults["drop"] = 0
    fake.version = "default"  # as after a restart
    with pytest.raises(ServerError, match=f"{fake.url} answers with weights 'default' instead of .*: it was restarted"):
        contract.run(engine, [request("restarted", 5)])


def test_requests_are_spread(model: torch.nn.Module, checkpoint: Path, fake: FakeSGLang) -> None:
    other = FakeSGLang(checkpoint)
    listener = serve(other)
    engine = make_engine(model, checkpoint, fake.url, url_of(listener))
    engine.load_groups(groups_of(model), 0)
    contract.run(engine, [request(f"r{i}", 4, n=2) for i in range(4)])
    assert len([s for s in fake.seen if s.startswith("r")]) == len([s for s in other.seen if s.startswith("r")]) == 4
    assert {s.split("#")[0] for s in fake.seen}.isdisjoint({s.split("#")[0] for s in other.seen})  # prefixes are shared
    listener.shutdown()
    listener.server_close()


def test_too_small_a_limit_for_truncated_answers(engine: SGLangServers, fake: FakeSGLang) -> None:
    fake.info["sampling_mask_max_tokens"] = 100
    advice = rf": start it with --sampling-mask-max-tokens {VOCAB}, or set rollout.top_k to no more than its limit$"
    with pytest.raises(ValueError, match=advice):
        contract.run(engine, [request(temperature=1.0, top_p=0.9)])
    contract.run(engine, [request(temperature=1.0, top_p=0.9, top_k=100), request("plain", temperature=1.0)])


# ---- what is checked at the start


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.5.16"}, "SGLang 0.5.16 runs there; supported are 0.5.17 to"),
        ({"context_length": 100}, "its context is 100 tokens, the policy's 400"),
        ({"dtype": "float16"}, "it computes in float16, the policy in float32: start it with --dtype float32"),
        ({"quantization": "fp8"}, r"quantises its weights \(fp8\)"),
        ({"dp_size": 2}, "needs servers with --dp-size 1"),
        ({"pp_size": 2}, "needs servers without pipeline parallelism"),
        ({"model_type": "llama"}, "it serves a model of model_type llama, the policy is qwen3"),
        ({"vocabulary": VOCAB - 1}, "its model's vocabulary is 127, the policy's 128"),
    ],
)
def test_servers_that_cannot_work(
    model: torch.nn.Module, checkpoint: Path, fake: FakeSGLang, changes: dict[str, Any], message: str
) -> None:
    fake.vocabulary = changes.get("vocabulary", VOCAB)
    fake.info |= changes
    fake.about |= {k: v for k, v in changes.items() if k in fake.about}
    with pytest.raises(UserError, match=f"^engine.urls: {fake.url}: .*{message}"):
        make_engine(model, checkpoint, fake.url, transport="nccl")


def test_server_that_is_not_there(model: torch.nn.Module, checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"engine.urls: {url} cannot be reached: .* \(3 attempts\)"):
            make_engine(model, checkpoint, url)


def test_key(model: torch.nn.Module, checkpoint: Path, fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.key = "s3cret"
    setting = {"api_key_env": "FAKE_SGLANG_KEY"}
    with pytest.raises(UserError, match=r"engine\.api_key_env: the environment variable FAKE_SGLANG_KEY is not set"):
        make_engine(model, checkpoint, fake.url, engine=setting)
    monkeypatch.setenv("FAKE_SGLANG_KEY", "wr0ng")
    with pytest.raises(UserError, match=r"refuses the key \(HTTP 401\): set engine.api_key_env") as caught:
        make_engine(model, checkpoint, fake.url, engine=setting)
    monkeypatch.setenv("FAKE_SGLANG_KEY", "wr0ng\nline")
    with pytest.raises(UserError, match="not printable ASCII") as also:
        make_engine(model, checkpoint, fake.url, engine=setting)
    assert "wr0ng" not in str(caught.value) + str(also.value) + repr(Server(fake.url, "wr0ng"))
    monkeypatch.setenv("FAKE_SGLANG_KEY", "s3cret\n")  # as files end
    make_engine(model, checkpoint, fake.url, engine=setting).load_groups(groups_of(model), 0)
    assert fake.version.endswith(".0")


# ---- weights


def test_nccl_of_another_kind_is_refused(
    engine: SGLangServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setattr(engine, "_sync", SyncConfig(transport="nccl"))
    with pytest.raises(UserError, match=r"sync\.transport = 'nccl': .*broadcasts_to_servers=True"):
        engine._make_transport(torch.device("cuda", 0), tmp_path)


def test_disk_sync_is_bitwise(model: torch.nn.Module, checkpoint: Path, fake: FakeSGLang) -> None:
    """float32 masters arrive as the engine's bfloat16, in several files, and only the last sync is kept."""
    left_over = checkpoint / "sync" / "weights_000009"
    left_over.mkdir(parents=True)
    engine = make_engine(model, checkpoint, fake.url, dtype=torch.bfloat16)
    assert not left_over.exists()
    engine._transport._shard_bytes = 20_000
    for version, weights in enumerate((model, stock(model.config, seed=3))):
        engine.load_groups(groups_of(weights), version)
        assert fake.checksums() == checksums(weights, torch.bfloat16)
        (present,) = (checkpoint / "sync").iterdir()
        assert len(list(present.glob("*.safetensors"))) > 2
    assert engine.policy_version == 1
    assert fake.version.endswith(".1")
    engine.close()
    assert not list((checkpoint / "sync").iterdir())


def test_weights_that_do_not_arrive_are_errors(model: torch.nn.Module, checkpoint: Path, fake: FakeSGLang) -> None:
    engine = make_engine(model, checkpoint, fake.url)
    groups = groups_of(model)
    with pytest.raises(RuntimeError, match="no weights"):
        contract.run(engine, [request()])
    with pytest.raises(ValueError, match=r"nothing came for model\.norm\.weight|nothing came for lm_head"):
        engine.load_groups(groups[:-1], 0)
    with pytest.raises(ValueError, match="extra is not in the layout"):
        engine.load_groups([*groups, [("extra", torch.zeros(1))]], 0)
    assert fake.version == "default"
    fake.faults["tear"] = True
    with pytest.raises(SyncError, match=r"holds other values of .* when the same weights are sent again"):
        engine.load_groups(groups, 0)
    other = FakeSGLang(checkpoint)
    listener = serve(other)
    engine = make_engine(model, checkpoint, fake.url, url_of(listener))
    other.held["another"] = other.held.pop("model.norm.weight")  # it loads one weight under a wrong name
    fake.held["another"] = torch.zeros(32)
    with pytest.raises(SyncError, match=f"{url_of(listener)} and {fake.url} hold different values of 0/another"):
        engine.load_groups(groups, 0)
    listener.shutdown()
    listener.server_close()
    fake.from_disk = lambda body: FakeSGLang.from_disk(fake, body | {"model_path": "/elsewhere"})
    with pytest.raises(SyncError, match=r"Cannot find any model weights .*every server must see \(sync.folder\)"):
        make_engine(model, checkpoint, fake.url).load_groups(groups, 0)


@pytest.fixture
def processes(checkpoint: Path) -> Iterator[list[str]]:
    """Two servers in processes of their own: one without and one with sessions for weights."""
    command = [sys.executable, str(Path(__file__).with_name("fake_sglang.py")), str(checkpoint)]
    started = [
        subprocess.Popen([*command, version], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for version in ("0.5.17", "0.5.21")
    ]
    yield [f"http://127.0.0.1:{int(p.stdout.readline())}" for p in started]
    for process in started:
        process.kill()
        process.wait()


def held(url: str) -> dict[str, str]:
    return Server(url).post("/weights_checker", {}, 10)["ranks"][0]["checksums"]


def test_broadcast(model: torch.nn.Module, checkpoint: Path, processes: list[str]) -> None:
    """Over gloo into two processes: bitwise, in several buckets; errors, and a server that dies, end it."""
    Server(processes[1]).post("/begin_weight_update", {}, 5)  # a trainer that died has left it open
    engine = make_engine(model, checkpoint, *processes, dtype=torch.bfloat16, transport="nccl")
    engine._transport._buckets = plan(engine._model.layout, 20_000)
    assert len(engine._transport._buckets) == 4  # the embedding, two layers, norm and head
    for version, weights in enumerate((model, stock(model.config, seed=3))):
        engine.load_groups(groups_of(weights), version)
        for url in processes:
            assert held(url) == checksums(weights, torch.bfloat16)
        with pytest.raises(ServerError, match="no weight-update session is open"):  # it was closed
            Server(processes[1]).post("/end_weight_update", {}, 5)
    engine.close()
    engine.close()
    for url in processes:  # both left the group
        with pytest.raises(ServerError, match="The group to be destroyed does not exist"):
            Server(url).post("/destroy_weights_update_group", {"group_name": f"lightrl_{engine._token}"}, 5)

    engine = make_engine(model, checkpoint, *processes, transport="nccl")
    engine.load_groups(groups_of(model), 0)
    Server(processes[0]).post("/fault", {"refuse": "out of memory"}, 5)
    with pytest.raises(ServerError, match=f"{processes[0]}/update_weights_from_distributed: HTTP 400: out of memory"):
        engine.load_groups(groups_of(model), 1)
    with pytest.raises(SyncError, match=r"broke earlier: .*out of memory"):
        engine.load_groups(groups_of(model), 1)
    engine.close()

    Server(processes[0]).post("/fault", {"refuse": None}, 5)
    engine = make_engine(model, checkpoint, processes[1], transport="nccl")
    engine.load_groups(groups_of(model), 0)
    Server(processes[1]).post("/fault", {"die": True}, 5)
    with pytest.raises(UnreachableError, match=f"{processes[1]} broke off the connection"):
        engine.load_groups(groups_of(model), 1)
    engine.close()


def test_an_abort_that_a_busy_server_refuses_is_repeated() -> None:
    """Else a group that the filter has dropped would be generated, and waited for, to its end."""
    asked = []

    class Busy:
        def post_once(self, path: str, *_: object) -> None:
            asked.append(path)
            if len(asked) < 3:
                raise UnreachableError("busy")
            engine._live.clear()

    engine = SGLangServers.__new__(SGLangServers)
    engine._live = {"train/4": {"a": Busy()}}
    engine._abort(engine._live["train/4"]["a"], "train/4", "a")
    assert asked == ["/abort_request"] * 3


# ---- without a run


@pytest.mark.parametrize("transport", ["disk", "nccl"])
def test_lightrl_serve_gives_servers_its_model_and_asks_them(tmp_path: Path, transport: str) -> None:
    tiny_run.make_model(tmp_path / "model")
    fake = FakeSGLang(tmp_path / "model")
    listener = serve(fake)
    flags = ["--run.device=cpu", f"--run.dir={tmp_path}/run", f"--model.path={tmp_path}/model", "--sync.timeout=30"]
    flags += ["--model.compute_dtype=float32", "--engine.kind=sglang_server", f"--sync.transport={transport}"]
    config = load_for_run([], [*flags, f'--engine.urls=["{url_of(listener)}"]'], command="serve")
    body = {"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 6}
    statuses: list[int] = []

    def use(url: str, key: str) -> None:
        statuses.extend(ask(url, key, "chat/completions", body)[0] for _ in range(2))

    serve_while(config, use, record=tmp_path / "dump")
    listener.shutdown()
    listener.server_close()
    assert statuses == [200, 200]
    samples = [s for step in (1, 2) for g in RolloutDump(tmp_path / "dump").groups(step) for s in g.samples]
    assert len(samples) == 2
    check_logprobs(tmp_path / "model", samples)
