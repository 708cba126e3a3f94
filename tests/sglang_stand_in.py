"""A package `sglang` that behaves, and misbehaves, as SGLang does, for tests of the process that holds it."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

# Its "scheduler" is a process that gives every line back. Prompts and model paths choose what goes wrong.
STAND_IN = """
import asyncio, json, os, pathlib, signal, subprocess, tempfile, time
from lightrl.sync.mailbox import Mailbox

class Manager:
    def __init__(self):
        self.aborted, self.last_receive_tstamp, self.lock, self.boxes = set(), 0.0, asyncio.Lock(), {}
    async def launch(self):
        pipe = asyncio.subprocess.PIPE
        self.scheduler = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
        self.watching = asyncio.create_task(self.watch())
    async def watch(self):
        code = await self.scheduler.wait()
        print(f"Subprocess scheduler_0 crashed with exit code {code}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    async def ask(self):
        async with self.lock:
            self.scheduler.stdin.write(b"?\\n")
            await self.scheduler.stdout.readline()
        self.last_receive_tstamp = time.time()
    async def get_internal_state(self): await self.ask()
    async def generate_request(self, request, _):
        if request.input_ids == [13]: raise ValueError("too long")
        if request.input_ids == [14]: raise KeyError("a defect")
        if request.input_ids == [16] and "#0#" in request.rid: request.sampling_params["max_new_tokens"] = 2
        if request.input_ids == [15]: await asyncio.sleep(1.2 * HANG)
        tokens = []
        for step in range(request.sampling_params["max_new_tokens"]):
            await asyncio.sleep(0.01)
            await self.ask()
            if request.rid in self.aborted: break
            tokens.append(step)
            if request.stream: yield output(tokens, None)
        yield output(tokens, "abort" if request.rid in self.aborted else "length")
    def abort_request(self, rid): self.aborted.add(rid)
    async def update_weights_from_tensor(self, request, _):
        if not request.load_format: await asyncio.sleep(1.2 * HANG)  # it waits for the trainer and answers nobody
        else: await asyncio.gather(*(asyncio.to_thread(self.take, request.load_format, place, payload)
                                     for place, payload in enumerate(request.serialized_named_tensors)))
        return True, ""
    def take(self, loader, place, payload):
        loader = loader.rsplit(".", 1)[1]
        if place == 0: print("loader", loader, flush=True)
        if loader == "close_buffers": return
        if loader == "open_buffers":
            message = json.loads(payload)
            self.boxes[place] = message["buckets"], Mailbox(pathlib.Path(message["mailbox"]))
        count, mailbox = self.boxes[place]
        for number in range(1, count + 1) if loader != "open_buffers" else ():
            mailbox.wait("filled", number, timeout=None, check=mailbox.check_sender)
            mailbox.set("drained", number)
        if place == 0 and loader == os.environ.get("STAND_IN_DIES_IN"):  # when the other ranks' parts are done
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        mailbox.report({"differing": {}})
        mailbox.set("drained", count + 1)
    async def flush_cache(self):
        await self.ask()
        return type("Flushed", (), {"success": True})
    async def release_memory_occupation(self, request, _): await self.ask()
    async def resume_memory_occupation(self, request, _): await self.ask()

def output(tokens, reason):
    meta = {"output_token_logprobs": [[-0.5, t, None] for t in tokens], "finish_reason": reason and {"type": reason},
            "weight_version": "7"}
    return {"output_ids": tokens, "meta_info": meta}

class Engine:
    def __init__(self, **arguments):
        self.server_args = arguments
        print("starting with", arguments, flush=True)
        tempfile.NamedTemporaryFile(delete=False)  # as SGLang's sockets, which stay
        if arguments["model_path"] == "orphan": print("sleeper", subprocess.Popen(["sleep", "600"]).pid, flush=True)
        taken = pathlib.Path(arguments["model_path"], "port_taken")  # a letter for each start that meets it
        if taken.is_file() and (left := taken.read_text()):
            taken.write_text(left[1:])
            raise RuntimeError("[Errno 98] Address already in use")
        if arguments["model_path"] == "full": raise RuntimeError("CUDA out of memory")
        if arguments["model_path"] == "silent": time.sleep(600)
        if arguments["model_path"] == "crash":
            print("Traceback:\\nValueError: no backend x\\n\\nReceived sigquit from a child process", flush=True)
            os._exit(1)
        if arguments["model_path"] == "exits":
            if os.fork() == 0: time.sleep(600)  # has the connection as well
            os._exit(3)
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), Manager()
        self.loop.run_until_complete(self.tokenizer_manager.launch())
    def get_all_child_pids(self): return [self.tokenizer_manager.scheduler.pid]
    def shutdown(self): self.tokenizer_manager.scheduler.kill()
"""
HANG = 3.0
# What LightRL sets, which all supported versions have.
NAMES = """
model_path dtype trust_remote_code context_length tp_size base_gpu_id random_seed mem_fraction_static
max_running_requests max_prefill_tokens host port load_format skip_tokenizer_init enable_memory_saver
custom_weight_loader log_level sampling_backend grammar_backend disable_custom_all_reduce disable_prefill_cuda_graph
cuda_graph_max_bs_decode attention_backend device
"""
SERVER_ARGS = f"""
import dataclasses
ServerArgs = dataclasses.make_dataclass("ServerArgs", {NAMES.split()})
"""
IO_STRUCT = """
class GenerateReqInput:
    stream = False
    def __init__(self, **fields): self.__dict__.update(fields)
class UpdateWeightsFromTensorReqInput(GenerateReqInput): pass
class ReleaseMemoryOccupationReqInput(GenerateReqInput): pass
class ResumeMemoryOccupationReqInput(GenerateReqInput): pass
"""


def install(folder: Path) -> Path:
    """Write the package; returns what to put on the path."""
    package = folder / "site" / "sglang"
    (package / "srt" / "managers").mkdir(parents=True)
    for inner in (package / "srt", package / "srt" / "managers"):
        (inner / "__init__.py").touch()
    (package / "__init__.py").write_text(STAND_IN.replace("HANG", str(HANG)))
    (package / "srt" / "server_args.py").write_text(SERVER_ARGS)
    (package / "srt" / "managers" / "io_struct.py").write_text(IO_STRUCT)
    return package.parent


def introduction(sender: Any) -> str:
    """What the stand-in needs to know of a `BucketSender`, in place of `BucketSender.introduction`."""
    message = {"mailbox": str(sender.mailbox.path), "buckets": len(sender.plan.buckets)}
    return base64.b64encode(json.dumps(message).encode()).decode()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 15
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[p for p in pids if alive(p)]}"
        time.sleep(0.05)
