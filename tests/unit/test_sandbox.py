"""A model's Python code behind limits: whatever it does, it ends in time, is named, and leaves no process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lightrl.config.schema import SandboxConfig
from lightrl.rewards import sandbox as sandbox_module
from lightrl.rewards.sandbox import Ran, Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox's limits are Linux's")
LIMITS = SandboxConfig(timeout=1.0, memory_mib=512, file_mib=1, processes=8, output_kib=16, concurrency=4)
PATIENT = dataclasses.replace(LIMITS, timeout=30.0)  # for code that ends by itself, on a busy machine

ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("parent")
"""
BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""


def processes() -> list[int]:
    """Of any sandbox: forked ones keep their command line."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if any(str(sandbox_module._CHILD) == word for word in process.info["cmdline"] or ()):
            found.append(process.info["pid"])
    return found


def wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(300):
        if holds():
            return
        time.sleep(0.03)
    pytest.fail(f"processes of the sandbox: {processes()}")


@pytest.fixture(params=[True, False], ids=["namespaces", "without"])
def namespaces(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def sandbox(namespaces: bool) -> Iterator[Sandbox]:
    sandbox = Sandbox(LIMITS, namespaces=namespaces)
    yield sandbox
    sandbox.close()
    assert processes() == []


@pytest.fixture
def patient(namespaces: bool) -> Iterator[Sandbox]:
    sandbox = Sandbox(PATIENT, namespaces=namespaces)
    yield sandbox
    sandbox.close()
    assert processes() == []


def test_code_runs(patient: Sandbox) -> None:
    code = "import os, sys\nx = sys.stdin.read()\nprint(x, sorted(os.environ), os.listdir('.'))"
    code += "\nprint('e', file=sys.stderr)"
    ran = patient.run_sync(code, stdin="in")
    assert (ran.kind, ran.exit_code, ran.stderr) == ("ok", 0, "e\n")
    assert ran.stdout in ("in [] []\n", "in ['LC_CTYPE'] []\n")  # Python's own, where the locale is C's
    assert patient.run_sync("6 * 7", echo=True).stdout == "42\n"
    assert patient.run_sync("6 * 7").stdout == ""
    script = "if __name__ == '__main__':\n    def f(n): return n and n * f(n - 1)\n    print(f(3), __file__)"
    assert patient.run_sync(script).stdout == "0 code.py\n"


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        ("while True: pass", "timeout", ""),
        ("import signal\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n  except OSError: pass\n"
         "while True: pass", "timeout", ""),
        ("while True: print('x' * 1000)", "output", "xxx"),
        ("1 / 0", "error", 'File "code.py", line 1'),
        ("print(", "error", "SyntaxError"),
        ("import sys; print('so'); sys.exit(3)", "error", "so"),
        ("raise BaseException('odd')", "error", "odd"),
        ("x = bytearray(4 << 30)", "memory", "MemoryError"),
        ("import os; os.abort()", "killed", ""),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)))", "binary", ""),
        ("open('f', 'wb').write(bytes(3 << 20))", "error", "OSError"),
        ("import socket; socket.create_connection(('127.0.0.1', PORT), 0.5)", "error", "Error"),
        ("import os; os._exit(0)", "ok", ""),
        ("def f(): f()\nf()", "error", "RecursionError"),
    ],
    ids=lambda value: value[:24].replace("\n", " ") if isinstance(value, str) else "",
)  # fmt: skip
def test_misbehaviour_is_named(sandbox: Sandbox, patient: Sandbox, code: str, kind: str, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # there is somebody to connect to
        ran = (sandbox if kind == "timeout" else patient).run_sync(code.replace("PORT", str(server.getsockname()[1])))
    assert ran.kind == kind, ran
    assert says in ran.stdout + ran.stderr
    assert len(ran.stdout) + len(ran.stderr) <= 16 * 1024
    assert ran.ok == (kind == "ok")


@pytest.mark.parametrize("code", [ORPHAN, BOMB, "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)"])
def test_no_process_is_left(sandbox: Sandbox, code: str) -> None:
    ran = sandbox.run_sync(code)
    assert processes() == []
    if code is ORPHAN:
        assert (ran.kind, ran.stdout) == ("ok", "parent\n")
    elif code is BOMB:
        assert ran.kind in ("timeout", "killed")


REACH = """
import asyncio, ctypes, os, socket, subprocess
PID, ENDS = __PID__, __ENDS__
libc = ctypes.CDLL(None, use_errno=True)
def stream():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(ENDS + "stream")
def datagram():
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"x", ENDS + "datagram")
def namespace():
    if libc.unshare(0x10000000) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
def clone():
    pid = libc.syscall(ctypes.c_long(__CLONE__), 0x10000000 | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
def written():
    open(ENDS + "written", "w")
def added():
    open(ENDS + "there", "a")
def removed():
    os.unlink(ENDS + "there")
def environment():
    open(f"/proc/{PID}/environ", "rb").read()
def memory():
    open(f"/proc/{PID}/mem", "r+b")
def signal():
    os.kill(PID, 9)
for way in (stream, datagram, namespace, clone, written, added, removed, environment, memory, signal):
    try:
        way()
        print("REACHED", way.__name__)
    except OSError:
        pass
# what stays possible
open("a", "w").write("abc"); os.mkdir("d"); os.rename("a", "d/b"); os.truncate("d/b", 1)
open("/dev/null", "w").write("x")
child = subprocess.Popen(["/bin/sleep", "9"]); child.kill(); child.wait()
async def four():
    return 4
print(asyncio.run(four()), subprocess.run(["/bin/echo", "five"], capture_output=True).stdout)
"""


def test_nothing_outside_is_in_reach(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sockets that have a path, files, other processes of the same user: their memory, environment, and lives."""
    machine, ends = platform.machine(), tmp_path_factory.mktemp("ends")
    if machine not in ("x86_64", "aarch64"):
        pytest.skip(f"no filter of calls for {machine}")
    (ends / "there").touch()
    code = REACH.replace("__ENDS__", repr(f"{ends}/")).replace("__CLONE__", {"x86_64": "56"}.get(machine, "220"))
    kinds = {"stream": socket.SOCK_STREAM, "datagram": socket.SOCK_DGRAM}
    with contextlib.ExitStack() as stack:
        for name, kind in kinds.items():
            stack.enter_context(server := socket.socket(socket.AF_UNIX, kind))
            server.bind(f"{ends}/{name}")
            os.chmod(ends / name, 0o777)
            if name == "stream":
                server.listen()
        victim = stack.enter_context(subprocess.Popen(["sleep", "30"]))
        stack.callback(victim.kill)
        ran = sandbox.run_sync(code.replace("__PID__", str(victim.pid)))
        alive = victim.poll() is None
    if ran.isolation == "seccomp":
        pytest.skip("neither namespaces nor Landlock here")
    assert (ran.kind, ran.stdout) == ("ok", "4 b'five\\n'\n"), ran
    assert alive
    assert sorted(path.name for path in ends.iterdir()) == ["datagram", "stream", "there"]


def test_namespaces_show_nothing_else() -> None:
    sandbox = Sandbox(PATIENT)
    sees = "print(os.getpid() < 10, len([p for p in os.listdir('/proc') if p.isdigit()]) < 10)"
    ran = sandbox.run_sync(f"import os\n{sees}")
    if ran.isolation != "namespaces":
        pytest.skip(f"no namespaces here: {ran.isolation}")
    assert ran.stdout == "True True\n"
    assert sandbox.run_sync("import os\nos.setgroups([0])").kind == "error"  # no rights are left, not even root's


SHARES = """
import multiprocessing as mp
from multiprocessing import shared_memory
import os
import sys

if not os.access(sys.executable, os.X_OK):
    print("no Python")
    sys.exit()

def square(x):
    with lock:
        return x * x

lock = mp.Lock()
with mp.Pool(2) as pool:
    print(pool.map(square, [1, 2, 3]))
memory = shared_memory.SharedMemory(create=True, size=9)
print(os.listdir("/dev/shm") == os.listdir(".") == [memory.name])
memory.close()
memory.unlink()
written = 0
for place in ("x", "/dev/shm/y"):
    with open(place, "wb", buffering=0) as file:
        try:
            while True:
                written += file.write(bytes(4096))
        except OSError:
            pass
print(0 < written <= 1 << 20)
"""


def test_locks_and_shared_memory_are_within_its_folder() -> None:
    """Both count to `file_mib`, and nothing of the host's is there."""
    host = "/dev/shm/lightrl-sandbox-test"
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm here")
    Path(host).write_text("of the host")
    try:
        ran = Sandbox(PATIENT).run_sync(SHARES)
        assert Path(host).read_text() == "of the host"
        assert not Path("/dev/shm/y").exists()
    finally:
        os.unlink(host)
    if ran.isolation != "namespaces":
        pytest.skip(f"no namespaces here: {ran.isolation}")
    if ran.stdout == "no Python\n":  # multiprocessing starts one to keep count of shared memory
        pytest.skip("the user that code runs as cannot enter the folder of this Python")
    assert ran.stdout == "[1, 4, 9]\nTrue\nTrue\n", ran


def test_running_code_ends_with_the_sandbox() -> None:
    sandbox, found = Sandbox(SandboxConfig(timeout=60.0)), []

    def run() -> None:
        found.append(sandbox.run_sync("while True: pass"))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: bool(processes()))
    sandbox.close()
    thread.join(30)
    assert [r.kind for r in found] == ["timeout"] or [r.kind for r in found] == ["killed"]
    assert processes() == []
    with pytest.raises(RuntimeError, match="the sandbox is closed"):
        sandbox.run_sync("1")


@pytest.mark.parametrize("namespaces", [True, False])
def test_running_code_ends_with_the_trainer(namespaces: bool) -> None:
    """The process that started it is killed: nothing is left to end it but the kernel."""
    host = os.fork()
    if host == 0:
        code = "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\nwhile True: pass"
        Sandbox(SandboxConfig(timeout=60.0), namespaces=namespaces).run_sync(code)
        os._exit(0)
    wait_for(lambda: len(processes()) >= 4)
    os.kill(host, 9)
    os.waitpid(host, 0)
    wait_for(lambda: not processes())


def test_many_at_once() -> None:
    sandbox = Sandbox(PATIENT)

    async def work() -> list[Ran]:
        codes = ["print(1)", "1 / 0", "while True: print('x' * 999)"] * 3
        return list(await asyncio.gather(*(sandbox.run(code) for code in codes)))

    assert [ran.kind for ran in asyncio.run(work())] == ["ok", "error", "output"] * 3
    assert processes() == []
    assert sandbox.run_sync("\ud800").kind == "error"
