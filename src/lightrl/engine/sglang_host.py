"""The process that holds SGLang: `python -m lightrl.engine.sglang_host FD`, started by `engine/sglang.py`.

The only module that imports sglang; what differs between its versions is in `sglang_versions.py`. SGLang sets signal
handlers, event-loop policies and environment variables, and ends all child processes when it shuts down: in a process
of its own it does so to nobody else, and when it dies the trainer lives to say why. No port is opened but SGLang's own
rendezvous on loopback; messages come over an inherited socket pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from lightrl.engine import frames
from lightrl.engine import sglang_versions as versions
from lightrl.engine.sglang_answers import fields_of
from lightrl.engine.sglang_arguments import check_names
from lightrl.errors import UserError


def main() -> None:
    """Start the engine that the first message describes, then serve messages until the socket closes."""
    _die_with_parent()
    guard = _guard_group()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    first = frames.read(connection)
    if first is None:
        return
    if folder := first.get("folder"):
        tempfile.tempdir = folder  # of this process alone: SGLang's sockets, which it leaves behind
        if guard is not None:
            os.write(guard, f"{folder}\n".encode())
    try:
        engine = _start(first)
        engine.loop.run_until_complete(_warm_up(engine))
        _unlink_shared(engine)
    except BaseException as error:
        traceback.print_exc()
        wrong = isinstance(error, UserError)
        text = str(error) if wrong else f"{type(error).__name__}: {error}"
        connection.sendall(frames.encode({"id": 0, "user_error" if wrong else "error": text}))
        raise SystemExit(1) from None
    connection.sendall(frames.encode({"id": 0, "result": {"seeds": _honours_seeds(engine)}}))
    connection.setblocking(False)
    engine.loop.run_until_complete(_Service(engine, connection, first["hang_timeout"]).run())
    engine.shutdown()


def _die_with_parent() -> None:
    """The kernel ends this process when the trainer is gone, however it went; SGLang's own children do the same."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            raise SystemExit("the trainer is gone")


def _guard_group() -> int | None:
    """End the whole process group when this process is gone, however it went, and remove the folder that is written
    as a line into the pipe whose end is returned.

    SGLang's children see to their end themselves, but late in their start: one whose parent is gone by then stays for
    ever. A small process waits for the end of a pipe that nobody else has.
    """
    if os.getpgid(0) != os.getpid():
        return None  # somebody started this by hand
    mine, other = os.pipe()
    command = f'IFS= read -r folder; read _; [ -z "$folder" ] || rm -rf -- "$folder"; kill -s KILL -- -{os.getpid()}'
    subprocess.Popen(["/bin/sh", "-c", command], stdin=mine, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(mine)
    return other


def _unlink_shared(engine: Any) -> None:
    """Of the file in which SGLang's scheduler tells its load, once it is open: it would stay when that is killed."""
    if versions.in_effect(engine.server_args, "dp_size") not in (None, 1):
        return  # who shares the work among several opens it later
    for pid in engine.get_all_child_pids():
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                if (target := os.readlink(link)).startswith("/dev/shm/sglang_loads_"):
                    os.unlink(target)


def _start(message: dict[str, Any]) -> Any:
    import sglang
    from sglang.srt.server_args import ServerArgs

    return sglang.Engine(**engine_arguments(message, versions.argument_names(ServerArgs)))


def engine_arguments(message: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """All of `sglang.Engine`, which takes those `known`, for the trainer's first message."""
    check_names(message["args"], known)
    arguments = _defaults(message["settings"], known) | message["args"]
    if ours := message["settings"].get("override"):
        key = "json_model_override_args"
        arguments[key] = json.dumps(json.loads(message["args"].get(key) or "{}") | ours)
    return arguments


def _defaults(settings: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Arguments of `sglang.Engine` for our settings, those that the installed version has."""
    receiver = "lightrl.engine.sglang_receiver."
    max_batch = settings["max_batch"]
    arguments: dict[str, Any] = {
        "model_path": settings["model_path"],
        "dtype": settings["dtype"],
        "trust_remote_code": settings["trust_remote_code"],
        "context_length": settings["context_length"],
        "tp_size": settings["tensor_parallel"],
        "base_gpu_id": settings["gpu"],
        "random_seed": settings["seed"],
        "mem_fraction_static": settings["memory_fraction"],
        "max_running_requests": max_batch,
        "max_prefill_tokens": settings["max_prefill_tokens"],
        "host": "127.0.0.1",
        "port": settings["port"],
        "load_format": "dummy",  # the trainer sends the weights before anything is generated
        "skip_tokenizer_init": True,
        "enable_memory_saver": True,
        "custom_weight_loader": [receiver + name for name in ("open_buffers", "receive", "verify", "close_buffers")],
        "log_level": "warning",
        "sampling_backend": "pytorch",  # FlashInfer's is compiled at the first start, and takes no seeds
        "grammar_backend": "none",
        "disable_custom_all_reduce": settings["tensor_parallel"] > 1,  # it wants NVLink multicast
        # 58 captures by default: minutes, and prompts are long enough to fill the GPU without
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": max_batch,
        "sampling_mask_max_tokens": settings["vocab_size"],  # top_p alone may keep any number of tokens
    }
    if settings.get("device") == "cpu":
        arguments |= {"device": "cpu", "attention_backend": "torch_native", "enable_memory_saver": False}
    if settings.get("routing"):
        arguments["enable_return_routed_experts"] = True
        if settings["routing"] == "triton":
            arguments["moe_runner_backend"] = "triton"  # others may choose experts in a kernel that tells nobody
    if settings["capability"] == [9, 0]:
        arguments["attention_backend"] = "fa3"
    return versions.present(arguments, known)


async def _warm_up(engine: Any) -> None:
    """One answer, of weights that mean nothing: what is compiled at the first batch takes its time now, while nobody
    takes silence for a hang."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 1.0}
    request = GenerateReqInput(input_ids=[0] * 4, sampling_params=sampling, rid="warm-up", return_logprob=True)
    async for _ in engine.tokenizer_manager.generate_request(request, None):
        pass


def _honours_seeds(engine: Any) -> bool:
    return bool(versions.in_effect(engine.server_args, "enable_deterministic_inference"))


class _Service:
    """Answers messages, every one in a task of its own, and says that this process and SGLang's live."""

    def __init__(self, engine: Any, connection: socket.socket, hang_timeout: float) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._connection = connection
        self._hang_timeout = hang_timeout
        self._pending: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._live: set[str] = set()
        self._aborted: set[str] = set()
        self._closing = asyncio.Event()

    async def run(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=1 << 20)
        running = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._pulse())]
        await self._closing.wait()
        for task in running:
            task.cancel()

    async def _pulse(self) -> None:
        """Say that this process lives; and when SGLang, which has something to do, gives no sign for too long, say so.

        A sign is anything that its schedulers send, and they are asked for one: they answer between two batches.
        """
        every, limit = self._hang_timeout / 15, self._hang_timeout * 0.75
        before = heard = time.monotonic()
        seen: float | None = None
        ping: asyncio.Task[Any] | None = None
        while True:
            self._writer.write(frames.encode({"beat": True}))
            await asyncio.sleep(every)
            now, stamp = time.monotonic(), self._manager.last_receive_tstamp
            if stamp != seen or now - before > every + limit / 4 or not self._asked():  # or this process was stopped
                seen, heard = stamp, now
            elif now - heard > limit / 4 and (ping is None or ping.done()):
                ping = asyncio.create_task(self._manager.get_internal_state())
                ping.add_done_callback(lambda task: task.cancelled() or task.exception())
            before = now
            if now - heard > limit:
                work = ", ".join(f"{count} x {name}" for name, count in self._pending.items() if count)
                hung = f"did not answer for {now - heard:.0f} s: SGLang's scheduler is stuck (under way: {work})"
                self._writer.write(frames.encode({"hung": hung}))
                return

    def _asked(self) -> bool:
        """Whether SGLang is to answer. While it takes weights it waits for the trainer, which watches it then."""
        return self._pending.total() > 0 and not self._pending["update"]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(8), "big")
                message = json.loads(await reader.readexactly(length))
                task = asyncio.create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the trainer is gone or has closed
        finally:
            self._closing.set()

    async def _answer(self, message: dict[str, Any]) -> None:
        operation: Callable[..., Coroutine[Any, Any, Any]] = getattr(self, f"_do_{message['op']}")
        self._pending[message["op"]] += 1
        try:
            answer: dict[str, Any] = {"result": await operation(message)}
        except ValueError as error:
            answer = {"value_error": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            self._pending[message["op"]] -= 1
        if not self._closing.is_set():
            self._writer.write(frames.encode({"id": message["id"]} | answer))

    # ---- operations

    async def _do_generate(self, message: dict[str, Any]) -> dict[str, Any]:
        """One answer. With `watch`, what there is so far goes out now and then as `{"id": …, "partial": …}`."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        extra = {"return_sampling_mask": True} if message["truncated"] else {}
        if message.get("top_logprobs"):
            extra["top_logprobs_num"] = message["top_logprobs"]
        if message.get("routing"):
            extra["return_routed_experts"] = True
        request = GenerateReqInput(
            input_ids=message["tokens"],
            sampling_params=message["sampling"],
            rid=message["rid"],
            return_logprob=True,
            stream=message["watch"],
            **extra,
        )
        rid = message["rid"]
        output: dict[str, Any] = {"meta_info": {}}
        self._live.add(rid)
        try:
            async for output in self._manager.generate_request(request, None):
                if message["watch"]:
                    partial = fields_of(output, message["truncated"])
                    self._writer.write(frames.encode({"id": message["id"], "partial": partial}))
        except Exception:
            if rid not in self._aborted:
                raise
            return fields_of(output, message["truncated"]) | {"reason": "abort"}  # cut off before it ran
        finally:
            self._live.discard(rid)
            self._aborted.discard(rid)
        return fields_of(output, message["truncated"])

    async def _do_abort(self, message: dict[str, Any]) -> None:
        """SGLang ignores ids that it has not queued yet: repeat until they are gone."""
        self._aborted |= self._live & set(message["rids"])
        for _ in range(100):
            if not (left := self._live & set(message["rids"])):
                return
            for rid in left:
                self._manager.abort_request(rid=rid)
            await asyncio.sleep(0.02)

    async def _do_update(self, message: dict[str, Any]) -> dict[str, Any]:
        """Weights: `payloads` one a tensor-parallel rank, in base64; `loader` says how they are read."""
        import base64

        from sglang.srt.managers import io_struct

        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[base64.b64decode(payload) for payload in message["payloads"]],
            load_format=message["loader"],
            flush_cache=False,
            weight_version=message.get("version"),
        )
        if message["flush"]:  # not with the weights: SGLang ends its scheduler where a last batch is still put away
            await self._idle()
        async with versions.weight_session(self._manager, io_struct):
            done, text = await self._manager.update_weights_from_tensor(request, None)
        if not done:
            raise RuntimeError(text)
        return {}

    async def _do_flush(self, _: dict[str, Any]) -> None:
        await self._idle()

    async def _do_release(self, message: dict[str, Any]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._idle()  # SGLang ends its scheduler when it is asked while a last batch is still being put away
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=message["tags"]), None)

    async def _do_resume(self, message: dict[str, Any]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=message["tags"]), None)

    async def _do_pids(self, _: dict[str, Any]) -> list[int]:
        return [int(pid) for pid in self._engine.get_all_child_pids()]

    async def _do_close(self, _: dict[str, Any]) -> None:
        asyncio.get_running_loop().call_later(0.1, self._closing.set)

    async def _idle(self) -> None:
        """Flush the prefix cache, which SGLang does only when nothing runs: so it also tells when that is."""
        for _ in range(400):
            if (await self._manager.flush_cache()).success:
                return
            await asyncio.sleep(0.005)
        raise RuntimeError("requests are still under way")


if __name__ == "__main__":
    main()
