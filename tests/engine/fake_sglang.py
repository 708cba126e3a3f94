"""A server that speaks SGLang's HTTP API and holds a tiny model: the embedded engine behind the standard library's.

It answers as SGLang 0.5.17 does (entrypoints/http_server.py, model_runner_components/weight_updater.py), refusals and
oddities included: ids it has not queued are not aborted, a flush fails while anything runs, plain log-probs are of the
untruncated distribution and the others come only with a top_k. As newer ones do, it wants a session for broadcast
weights and bounds that top_k, where `info` has such a version and `sampling_mask_max_tokens`. Run as a program it
serves on a free port, which it prints; `POST /fault` makes it misbehave.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_models import stock
from torch import Tensor
from transformers import AutoConfig

from lightrl.engine.base import GenerateRequest, SamplingParams
from lightrl.engine.transformers import TransformersEngine
from lightrl.types import Status

_REASONS = {Status.COMPLETED: "stop", Status.TRUNCATED: "length", Status.ABORTED: "abort"}
CHUNK_PAUSE = 0.02  # seconds between two events of a stream


class Refusal(Exception):
    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class FakeSGLang:
    """The model and what the server knows. `info` is what `/server_info` says, to be changed by tests."""

    def __init__(self, folder: Path, *, key: str | None = None, version: str = "0.5.17") -> None:
        config = AutoConfig.from_pretrained(folder)
        model = stock(config, seed=99)  # other weights than any policy's
        self.held: dict[str, Tensor] = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.version, self.key = "default", key
        self.vocabulary = self._embeddings = config.vocab_size
        context = config.max_position_embeddings
        self.info: dict[str, Any] = {
            "version": version, "tp_size": 1, "dp_size": 1, "pp_size": 1, "device": "cuda", "dtype": "auto",
            "context_length": context, "quantization": None, "incremental_streaming_output": False,
        }  # fmt: skip
        self.about = {"model_type": config.model_type, "architectures": [type(model).__name__]}
        self.engine = TransformersEngine(config, eos_token_ids=[], context_length=context, max_batch=8)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.running: dict[str, threading.Event] = {}  # the event: abort it
        self.seen: list[str] = []
        self.groups: dict[str, Any] = {}
        self.faults: dict[str, Any] = {}
        self.session = False
        self._stale, self._lock = True, threading.Lock()

    # ---- generation

    def generate(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The answer as it grows; the last is complete."""
        rid, sampling = body["rid"] if "rid" in body else str(time.monotonic()), body["sampling_params"]
        for token in body.get("token_ids_logprob", ()):
            if token >= self.vocabulary:
                valid = f"valid range is [0, {self.vocabulary})"
                raise Refusal(f"token_ids_logprob contains out-of-vocabulary token id {token}; {valid}.")
        if max(body["input_ids"]) >= self._embeddings:
            os._exit(1)  # nobody checks: the scheduler dies of them
        limit = self.info.get("sampling_mask_max_tokens")
        if body.get("return_sampling_mask") and limit is not None and not 1 <= sampling["top_k"] <= limit:
            raise Refusal(f"finite 1 < top_k <= {limit}; Lower top_k or increase --sampling-mask-max-tokens.")
        if rid in self.running:
            raise Refusal(f"Duplicate request ID {rid}")
        if self.faults.get("overload", 0) > 0:
            self.faults["overload"] -= 1
            raise Refusal("The request queue is full.", 503)
        self.running[rid] = abort = threading.Event()
        self.seen.append(rid)
        try:
            yield from self._grow(rid, body, sampling, abort)
        finally:
            del self.running[rid]

    def _grow(
        self, rid: str, body: dict[str, Any], sampling: dict[str, Any], abort: threading.Event
    ) -> Iterator[dict[str, Any]]:
        params = SamplingParams(
            max_new_tokens=sampling["max_new_tokens"],
            temperature=sampling["temperature"],
            top_p=sampling.get("top_p", 1.0),
            top_k=max(sampling.get("top_k", -1), 0),
            top_logprobs=body.get("top_logprobs_num", 0),
            return_routing=body.get("return_routed_experts", False),
            stop_token_ids=tuple(sampling.get("stop_token_ids", ())),
        )
        seed = sampling.get("sampling_seed")
        seeds = None if seed is None else (seed,)
        request = GenerateRequest(id=rid, tokens=body["input_ids"], sampling=params, seeds=seeds)
        with self._lock:
            if self._stale:
                self.engine.load_weights(self.held.items(), 0)
                self._stale = False
        (completion,) = asyncio.run_coroutine_threadsafe(self.engine.generate(request), self.loop).result()
        tokens, logprobs, status = completion.tokens, completion.logprobs, completion.status
        routing = None if completion.routing is None else self._in_all_layers(completion.routing)
        body = body | {"routing": routing}
        body = body | {"likeliest": list(zip(completion.top_logprobs, completion.top_ids, strict=True))}
        if body.get("stream"):
            step = sampling.get("stream_interval", 1)
            for end in range(step, len(tokens), step):
                yield self._answer(rid, body, params, tokens[:end], logprobs[:end], None)
                time.sleep(CHUNK_PAUSE)
                if abort.is_set():
                    tokens, logprobs, status = tokens[: end + 1], logprobs[: end + 1], Status.ABORTED
                    break
        yield self._answer(rid, body, params, tokens, logprobs, status)

    def _in_all_layers(self, routing: Tensor) -> Tensor:
        """int32, zeros in blocks without a router."""
        shape = self.engine._model.routing_shape
        assert shape is not None
        whole = torch.zeros(len(routing), shape.num_layers, shape.top_k, dtype=torch.int32)
        whole[:, list(shape.layers)] = routing.to(torch.int32)
        return whole

    def _answer(
        self,
        rid: str,
        body: dict[str, Any],
        params: SamplingParams,
        tokens: list[int],
        logprobs: list[float],
        status: Status | None,
    ) -> dict[str, Any]:
        truncated = params.top_k > 0 or params.top_p < 1
        plain = [x - 1 for x in logprobs] if truncated else logprobs  # not those of what was drawn from
        if len(tokens) == params.max_new_tokens and status is not None:
            status = Status.TRUNCATED  # it looks at the length first
        reason = None if status is None else {"type": _REASONS[status], "matched": tokens[-1] if tokens else None}
        meta = {"id": rid, "finish_reason": reason, "weight_version": self.version}
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[x, t, None] for x, t in zip(plain, tokens, strict=True)]
        if params.top_logprobs:
            places = body["likeliest"][: len(tokens)]
            meta["output_top_logprobs"] = [[[x, t, None] for x, t in zip(*p, strict=True)] for p in places]
        if body.get("return_sampling_mask") and params.top_k > 0:
            meta["output_token_sampling_logprobs"] = logprobs
        if body["routing"] is not None and status is not None:  # with the last of a stream's events
            rows = len(body["input_ids"]) + len(tokens) - 1
            meta["routed_experts"] = base64.b64encode(body["routing"][:rows].numpy().tobytes()).decode()
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def abort(self, body: dict[str, Any]) -> None:
        for rid, event in list(self.running.items()):
            if rid.startswith(body["rid"]):
                event.set()
                self.loop.call_soon_threadsafe(self.engine.abort, rid)

    # ---- weights

    def take(self, weights: dict[str, Tensor], body: dict[str, Any]) -> None:
        """As models in SGLang do: what they do not know is skipped, and what does not come stays as it was."""
        with self._lock:
            for name, tensor in weights.items():
                if name in self.held:
                    self.held[name] = tensor.clone()
            self._stale = True
        if self.faults.pop("tear", None):
            next(iter(self.held.values())).flatten()[0] += 1
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]

    def from_disk(self, body: dict[str, Any]) -> None:
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if body["load_format"] != "safetensors" or not files:
            message = f"Failed to get weights iterator: Cannot find any model weights with `{body['model_path']}`."
            raise Refusal(message)
        self.take({n: t for file in files for n, t in load_file(file).items()}, body)

    def join(self, body: dict[str, Any]) -> None:
        """`init_custom_process_group`, by the same functions of torch."""
        from torch.distributed import distributed_c10d as c10d

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        name = body["group_name"]
        where = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(c10d.rendezvous(where, body["rank_offset"], body["world_size"]))
        group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            c10d.Backend(body["backend"]),
            c10d.PrefixStore(name, store),
            group_name=name,
            timeout=c10d.default_pg_timeout,
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        self.groups[name] = group

    def from_broadcast(self, body: dict[str, Any]) -> None:
        if self.faults.get("die"):
            os._exit(1)
        if text := self.faults.get("refuse"):
            raise Refusal(text)
        if self.info["version"] >= "0.5.21" and not self.session:
            raise Refusal("must run between begin_weight_update() and end_weight_update()")
        assert body["load_format"] == "flattened_bucket"
        dtypes = [getattr(torch, d) for d in body["dtypes"]]
        sizes = [d.itemsize * int(torch.Size(s).numel()) for d, s in zip(dtypes, body["shapes"], strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self.groups[body["group_name"]])
        parts = zip(body["names"], flat.split(sizes), dtypes, body["shapes"], strict=True)
        self.take({name: part.view(dtype).reshape(shape) for name, part, dtype, shape in parts}, body)

    def begin(self, _: dict[str, Any]) -> None:
        if self.info["version"] < "0.5.21":
            raise Refusal("Not Found", 404)
        if self.session:
            raise Refusal("a weight-update session is already open; call end_weight_update() first")
        self.session = True

    def end(self, _: dict[str, Any]) -> None:
        if not self.session:
            raise Refusal("no weight-update session is open; call begin_weight_update() first")
        self.session = False

    def leave(self, body: dict[str, Any]) -> None:
        if body["group_name"] not in self.groups:
            raise Refusal("The group to be destroyed does not exist.")
        dist.destroy_process_group(self.groups.pop(body["group_name"]))

    def checksums(self) -> dict[str, str]:
        """Of every tensor; SGLang's on a CPU is the same function."""
        return {n: hashlib.sha256(t.flatten().view(torch.uint8).numpy()).hexdigest()[:16] for n, t in self.held.items()}

    def flush(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.running:
            if time.monotonic() > end:
                raise Refusal(f"Flush cache failed. #running-req: {len(self.running)}")
            time.sleep(0.01)

    # ---- requests

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> dict[str, Any]:
        if path == "/server_info":
            return self.info
        if path == "/model_info":
            return self.about | {"weight_version": self.version}
        if path == "/weights_checker":
            return {"success": True, "message": "", "ranks": [{"checksums": self.checksums()}]}
        if path == "/flush_cache":
            self.flush(float(query["timeout"][0]))
        elif path == "/fault":
            self.faults.update(body)
        else:
            actions = {
                "/abort_request": self.abort,
                "/update_weights_from_disk": self.from_disk,
                "/init_weights_update_group": self.join,
                "/update_weights_from_distributed": self.from_broadcast,
                "/destroy_weights_update_group": self.leave,
                "/begin_weight_update": self.begin,
                "/end_weight_update": self.end,
            }
            if path not in actions:
                raise Refusal("Not Found", 404)
            actions[path](body)
        return {"success": True, "message": "Success"}


def serve(fake: FakeSGLang, port: int = 0) -> ThreadingHTTPServer:
    """Serve in threads until `shutdown`; the port is in `server_address`."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._handle({})

        def do_POST(self) -> None:
            self._handle(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def _handle(self, body: dict[str, Any]) -> None:
            url = urlsplit(self.path)
            try:
                if fake.key is not None and self.headers["Authorization"] != f"Bearer {fake.key}":
                    raise Refusal("Unauthorized", 401)
                if url.path == "/generate":
                    self._generate(body)
                else:
                    self._reply(200, fake.answer(url.path, parse_qs(url.query), body))
            except Refusal as error:
                self._reply(error.status, {"error": {"message": str(error)}})
            except (BrokenPipeError, ConnectionResetError):
                pass
            except Exception as error:
                self._reply(500, {"error": {"message": f"{type(error).__name__}: {error}"}})

        def _generate(self, body: dict[str, Any]) -> None:
            if fake.faults.get("drop", 0) > 0:
                fake.faults["drop"] -= 1
                return
            answers = fake.generate(body)
            if not body.get("stream"):
                self._reply(200, list(answers)[-1])
                return
            self.send_response(200)
            self.end_headers()
            for answer in answers:
                self.wfile.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def _reply(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    class Listener(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    listener = Listener(("127.0.0.1", port), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    return listener


if __name__ == "__main__":
    torch.set_num_threads(1)
    listener = serve(FakeSGLang(Path(sys.argv[1]), version=(sys.argv[2:] or ["0.5.17"])[0]))
    print(listener.server_address[1], flush=True)
    sys.stdin.read()  # until whoever started it is gone
