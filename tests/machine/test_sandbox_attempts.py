"""Attempts to leave the sandbox, to damage what is outside, to keep something behind or to use more than is allowed.

One table: a name, the code, and what must happen by either kind of isolation. After each attempt the outside is
compared: a process, a file, IPC objects and the folder of the program.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from bagu.machine.sandbox import Limits, Sandbox, SandboxUnavailable
from bagu.machine.sandbox.client import Isolation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code is isolated on Linux alone")
# refused: ends with an error of the system. contained: runs within its walls. stopped: does not run to its end.
Outcome = Literal["refused", "contained", "stopped"]
SYSTEM_ERRORS = (
    "PermissionError",
    "OSError",
    "FileNotFoundError",
    "ProcessLookupError",
    "BlockingIOError",
    "ConnectionRefused",
)
LIMITS = Limits(seconds=20.0, disk_bytes=4 << 20, output_bytes=10_000)
SHORT = replace(LIMITS, seconds=0.5)
KEY, QUEUE = 0xBA6038, "/bagu-attempt"

# The calls of the attempts: the numbers of x86-64 and of the generic table.
PRELUDE = """
import ctypes, fcntl, mmap, os, platform, resource, signal, socket, struct, sys, time
print(os.getcwd(), os.listdir("."), flush=True)
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = dict(
    tkill=(200, 130), tgkill=(234, 131), rt_sigqueueinfo=(129, 138), rt_tgsigqueueinfo=(297, 240),
    timer_create=(222, 107),
    pidfd_send_signal=(424, 424), pidfd_open=(434, 434), pidfd_getfd=(438, 438), kcmp=(312, 272), ptrace=(101, 117),
    process_vm_readv=(310, 270), process_vm_writev=(311, 271), process_madvise=(440, 440), shmget=(29, 194),
    semget=(64, 190), msgget=(68, 186), mq_open=(240, 180), memfd_create=(319, 279), add_key=(248, 217),
    keyctl=(250, 219), request_key=(249, 218), io_uring_setup=(425, 425), bpf=(321, 280), perf_event_open=(298, 241),
    userfaultfd=(323, 282), mount=(165, 40), umount2=(166, 39), open_tree=(428, 428), fsopen=(430, 430),
    pivot_root=(155, 41), unshare=(272, 97), setns=(308, 268), clone=(56, 220), clone3=(435, 435), seccomp=(317, 277),
    name_to_handle_at=(303, 264), open_by_handle_at=(304, 265), setpriority=(141, 140), ioprio_set=(251, 30),
    sched_setscheduler=(144, 119), swapon=(167, 224), reboot=(169, 142), init_module=(175, 105), acct=(163, 89),
    sethostname=(170, 161), settimeofday=(164, 170), syslog=(103, 116), quotactl=(179, 60), personality=(135, 92),
    inotify_init1=(294, 26), fanotify_init=(300, 262), mlock=(149, 228), setuid=(105, 146), capset=(126, 91),
    memfd_secret=(447, 447), io_setup=(206, 0), signalfd4=(289, 74), move_pages=(279, 239), unknown=(999, 999),
)
def call(name, *args):
    number = NUMBERS[name][platform.machine() != "x86_64"]
    done = libc.syscall(ctypes.c_long(number), *args)
    if done == -1:
        raise OSError(ctypes.get_errno(), name)
    return done
def info(sig):  # a siginfo as sigqueue fills it
    return struct.pack("iii", sig, 0, -1) + bytes(116)
def fill(name, count, size=1 << 20):
    with open(name, "wb", buffering=0) as file:
        for _ in range(count):
            file.write(bytes(size))
"""


@dataclass(frozen=True)
class Attempt:
    name: str
    code: str
    outcome: Outcome = "refused"
    limits: Limits = LIMITS


def _short(name: str, code: str) -> Attempt:
    return Attempt(name, code, "stopped", SHORT)


SIGNALS = [
    Attempt("kill", "os.kill(victim, 9)"),
    Attempt("kill all", "os.kill(-1, 9)"),
    Attempt("kill the caller", "os.kill(caller, 9)"),
    Attempt("kill the group of the caller", "os.killpg(os.getpgid(caller), 9)"),
    Attempt("stop the own group", "try:\n    os.kill(0, signal.SIGSTOP)\nexcept OSError: pass", "contained"),
    Attempt("kill the parent", "parent = os.getppid()\nif parent: os.kill(parent, 9)\nelse: raise OSError('none')"),
    Attempt("tkill", "call('tkill', victim, 9)"),
    Attempt("tgkill", "call('tgkill', victim, victim, 9)"),
    Attempt("rt_sigqueueinfo", "call('rt_sigqueueinfo', victim, 9, info(9))"),
    Attempt("rt_tgsigqueueinfo", "call('rt_tgsigqueueinfo', victim, victim, 9, info(9))"),
    Attempt("pidfd_send_signal", "call('pidfd_send_signal', call('pidfd_open', victim, 0), 9, None, 0)"),
    Attempt(
        "F_SETOWN and F_SETSIG",
        "r, w = os.pipe()\nfcntl.fcntl(r, 8, victim)\nfcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, 4, os.O_ASYNC)\nos.write(w, b'x')",
    ),
    Attempt("F_SETOWN_EX", "fcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, victim))"),
    Attempt("F_SETSIG", "fcntl.fcntl(os.pipe()[0], 10, 9)"),
    Attempt("FIOSETOWN", "fcntl.ioctl(os.pipe()[0], 0x8901, struct.pack('i', victim))"),
    Attempt(
        "a timer's SIGEV_THREAD_ID",
        "call('timer_create', 0, struct.pack('qiii', 0, 9, 4, victim) + bytes(48), bytes(8))",
    ),
    Attempt("PR_SET_PDEATHSIG", "if libc.prctl(1, 9): raise OSError('refused')"),
    Attempt("setpriority", "call('setpriority', 0, victim, 19)"),
    Attempt("setpriority of a user", "call('setpriority', 2, 0, 19)"),
    Attempt("sched_setscheduler", "call('sched_setscheduler', victim, 3, bytes(4))"),
    Attempt("sched_setaffinity", "os.sched_setaffinity(victim, {0})"),
    Attempt("ioprio_set", "call('ioprio_set', 1, victim, 3 << 13)"),
    Attempt("prlimit of another", "resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1))"),
]  # fmt: skip
PROCESSES = [
    Attempt("ptrace", "call('ptrace', 16, victim, 0, 0)"),
    Attempt("process_vm_readv", "call('process_vm_readv', victim, bytes(16), 1, bytes(16), 1, 0)"),
    Attempt("process_vm_writev", "call('process_vm_writev', victim, bytes(16), 1, bytes(16), 1, 0)"),
    Attempt("process_madvise", "call('process_madvise', 0, bytes(16), 1, 21, 0)"),
    Attempt("move_pages", "call('move_pages', victim, 0, None, None, None, 0)"),
    Attempt("/proc/PID/mem", "open(f'/proc/{victim}/mem', 'rb')"),
    Attempt("the grader's memory", "open(f'/proc/{caller}/mem', 'rb')"),
    Attempt("the grader's environment", "open(f'/proc/{caller}/environ').read()"),
    Attempt("the grader's command", "open(f'/proc/{caller}/cmdline').read()"),
    Attempt("the grader's folder", "os.listdir(f'/proc/{caller}/cwd/')"),
    Attempt("the grader's files", "os.readlink(f'/proc/{caller}/fd/0')"),
    Attempt("pidfd_getfd", "call('pidfd_getfd', call('pidfd_open', victim, 0), 0, 0)"),
    Attempt("kcmp", "call('kcmp', victim, os.getpid(), 0, 0, 0)"),
    Attempt("the own environment", "print(dict(os.environ))\nassert not os.environ", "contained"),
    Attempt(
        "a daemon",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\nos.wait()",
        "contained",
    ),
]  # fmt: skip
IPC = [
    Attempt("System V shared memory", "call('shmget', key, 1 << 20, 0o1666)"),
    Attempt("System V shared memory of the host", "call('shmget', host_key, 4096, 0)"),
    Attempt("private System V shared memory", "call('shmget', 0, 900 << 20, 0o1600)"),
    Attempt("System V semaphores", "call('semget', key, 1, 0o1666)"),
    Attempt("System V messages", "call('msgget', key, 0o1666)"),
    Attempt("POSIX shared memory", "open('/dev/shm' + queue, 'w').write('x')"),
    Attempt(
        "multiprocessing.shared_memory",
        "from multiprocessing.shared_memory import SharedMemory\nSharedMemory(create=True, size=1)",
    ),
    Attempt("multiprocessing.Lock", "import multiprocessing\nmultiprocessing.Lock()"),
    Attempt("message queue", "call('mq_open', queue[1:].encode(), 0o102, 0o666, None)"),
    Attempt("memfd_create", "call('memfd_create', b'x', 0)"),
    Attempt("memfd_secret", "call('memfd_secret', 0)"),
    Attempt("add_key", "call('add_key', b'user', b'bagu', b'x', 1, -3)"),
    Attempt("request_key", "call('request_key', b'user', b'bagu', None, 0)"),
    Attempt("keyctl", "call('keyctl', 0, -3, 1)"),
]  # fmt: skip
KERNEL = [
    Attempt("io_uring", "call('io_uring_setup', 4, bytes(120))"),
    Attempt("aio", "call('io_setup', 4, bytes(8))"),
    Attempt("bpf", "call('bpf', 0, bytes(72), 72)"),
    Attempt("perf_event_open", "call('perf_event_open', bytes(128), 0, -1, -1, 0)"),
    Attempt("userfaultfd", "call('userfaultfd', 1)"),
    Attempt("seccomp", "call('seccomp', 2, 0, None)"),
    Attempt("signalfd", "call('signalfd4', -1, bytes(8), 8, 0)"),
    Attempt("inotify", "call('inotify_init1', 0)"),
    Attempt("fanotify", "call('fanotify_init', 0, 0)"),
    Attempt("personality", "call('personality', 0x0040000)"),
    Attempt("mlock", "call('mlock', None, 4096)"),
    Attempt("mount", "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)"),
    Attempt("umount", "call('umount2', b'/tmp', 2)"),
    Attempt("open_tree", "call('open_tree', -100, b'/', 1)"),
    Attempt("fsopen", "call('fsopen', b'tmpfs', 0)"),
    Attempt("pivot_root", "call('pivot_root', b'.', b'.')"),
    Attempt("chroot", "os.chroot('/')"),
    Attempt("unshare a user namespace", "call('unshare', 0x10000000)"),
    Attempt("unshare mounts", "call('unshare', 0x00020000)"),
    Attempt("setns", "call('setns', 0, 0)"),
    Attempt("clone a user namespace", "call('clone', 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)"),
    Attempt("clone3", "call('clone3', bytes(88), 88)"),
    Attempt("setuid", "call('setuid', 0)"),
    Attempt("capset", "call('capset', struct.pack('Ii', 0x20080522, 0), bytes([255] * 24))"),
    Attempt("swapon", "call('swapon', b'x', 0)"),
    Attempt("reboot", "call('reboot', 0, 0, 0, 0)"),
    Attempt("init_module", "call('init_module', b'', 0, b'')"),
    Attempt("acct", "call('acct', b'x')"),
    Attempt("sethostname", "call('sethostname', b'bagu', 4)"),
    Attempt("settimeofday", "call('settimeofday', bytes(16), None)"),
    Attempt("syslog", "call('syslog', 3, bytes(64), 64)"),
    Attempt("quotactl", "call('quotactl', 0, None, 0, None)"),
    Attempt("a call that does not exist", "call('unknown')"),
]  # fmt: skip
SOCKETS = [
    Attempt("an abstract Unix socket of the host", "socket.socket(socket.AF_UNIX).connect('\\0' + abstract)"),
    Attempt("a Unix socket of the host by path", "socket.socket(socket.AF_UNIX).connect(socket_path)"),
    Attempt("TCP to the host", "socket.create_connection(('127.0.0.1', port), timeout=1)"),
    *(
        Attempt(f"a socket: {name}", f"socket.socket({family}, {kind}, {protocol})")
        for name, family, kind, protocol in (
            ("inet", 2, 1, 0), ("inet datagram", 2, 2, 0), ("inet6", 10, 1, 0), ("raw", 2, 3, 1), ("netlink", 16, 3, 0),
            ("packet", 17, 3, 0), ("vsock", 40, 1, 0), ("crypto", 38, 5, 0), ("bluetooth", 31, 3, 1), ("can", 29, 3, 1),
            ("xdp", 44, 3, 0),
        )
    ),
]  # fmt: skip
FILES = [
    Attempt("read by path", "print(open(secret).read())"),
    Attempt("write by path", "open(secret, 'w')"),
    Attempt("truncate by path", "os.truncate(secret, 0)"),
    Attempt("open to read and truncate", "os.open(secret, os.O_RDONLY | os.O_TRUNC)"),
    Attempt("read by a symbolic link", "os.symlink(secret, 'link')\nprint(open('link').read())"),
    Attempt("read by a hard link", "os.link(secret, 'link')\nprint(open('link').read())"),
    Attempt("rename into the folder", "os.rename(secret, 'mine')"),
    Attempt("read by /proc/self/root", "print(open('/proc/self/root' + secret).read())"),
    Attempt("read by /proc/PID/root", "print(open(f'/proc/{victim}/root' + secret).read())"),
    Attempt("read by dots", "print(open('../' * 20 + secret).read())"),
    Attempt(
        "inherited descriptors",
        "for fd in range(3, 4096):\n    try: os.fstat(fd)\n    except OSError: continue\n    sys.exit('inherited')\n"
        "raise OSError('none')",
    ),
    Attempt(
        "name_to_handle_at",
        "call('name_to_handle_at', -100, b'/usr', struct.pack('Ii', 128, 0) + bytes(128), bytes(8), 0)",
    ),
    Attempt("open_by_handle_at", "call('open_by_handle_at', 0, struct.pack('Ii', 8, 1) + bytes(128), 0)"),
    Attempt("chmod", "os.chmod(secret, 0)"),
    Attempt("fchmod of a library", "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o777)"),
    Attempt("chown", "os.chown(secret, 1, 1)"),
    Attempt("utime", "os.utime(secret, (0, 0))"),
    Attempt("setxattr", "os.setxattr(os.__file__, 'user.bagu', b'x')"),
    Attempt("remove", "os.remove(secret)"),
    Attempt("a new file outside", "open(secret + '.new', 'w')"),
    Attempt("a new folder outside", "os.mkdir(secret + '.new')"),
    Attempt("a file in /tmp", "try:\n    open(host_tmp, 'w')\nexcept OSError: pass", "contained"),
    Attempt("a file in /var/tmp", "open('/var/tmp' + queue, 'w')"),
    Attempt("a file in /usr", "open('/usr' + queue, 'w')"),
    Attempt("/etc/passwd", "open('/etc/passwd')"),
    Attempt("/etc/shadow", "open('/etc/shadow')"),
    Attempt("a device node", "os.mknod('sda', 0o60666, os.makedev(8, 0))"),
    *(Attempt(f"/dev/{name}", f"open('/dev/{name}', 'rb')") for name in ("mem", "kmsg", "fuse", "ptmx", "vda")),
    Attempt("core_pattern", "open('/proc/sys/kernel/core_pattern', 'w')"),
    Attempt("/sys", "os.listdir('/sys/kernel')"),
    Attempt("/proc/self/mem", "open('/proc/self/mem', 'r+b')\nraise OSError('its own memory')"),
]  # fmt: skip
RESOURCES = [
    _short("a fork bomb", "while True: os.fork()"),
    _short("a bomb of threads", "import threading\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()"),
    _short("CPU time", "while True: pass"),
    _short("ignored signals", "for s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"),
    _short("wall time", "time.sleep(60)"),
    _short("an endless output", "while True: os.write(1, bytes(1 << 16))"),
    Attempt("memory of the heap", "x = bytearray(1 << 30)", "stopped"),
    Attempt("mapped memory", "x = [mmap.mmap(-1, 64 << 20) for _ in range(16)]", "stopped"),
    Attempt(
        "an output flood",
        "for _ in range(64): os.write(1, b'x' * (1 << 16)); os.write(2, b'x' * (1 << 16))",
        "contained",
    ),
    Attempt("one large file", "fill('a', 64)", "stopped"),
    Attempt("many files", "for i in range(64): fill(f'{i}', 3)", "stopped"),
    Attempt("many empty files", "for i in range(20000): open(f'{i}', 'w').close()", "stopped"),
    Attempt("a sparse file", "f = open('a', 'wb')\nf.truncate(1 << 30)", "stopped"),
    Attempt(
        "a sparse file filled by a mapping",
        "for i in range(64):\n    f = open(f'{i}', 'w+b')\n    f.truncate(3 << 20)\n    m = mmap.mmap(f.fileno(), 0)\n"
        "    m[:] = b'x' * len(m)\n    m.close()",
        "stopped",
    ),
    Attempt(
        "deleted files that are open",
        "kept = []\nfor i in range(40):\n    f = open('a', 'wb', buffering=0)\n    os.remove('a')\n    kept.append(f)\n"
        "    for _ in range(3): f.write(bytes(1 << 20))\n    time.sleep(0.02)",
        "stopped",
    ),
    Attempt(
        "deleted files that are mapped",
        "kept = []\nfor i in range(40):\n    with open('a', 'w+b', buffering=0) as f:\n"
        "        for _ in range(3): f.write(bytes(1 << 20))\n        kept.append(mmap.mmap(f.fileno(), 4096))\n"
        "    os.remove('a')\n    time.sleep(0.02)",
        "stopped",
    ),
    Attempt(
        "fallocate",
        "for i in range(64): os.posix_fallocate(os.open(f'{i}', os.O_CREAT | os.O_RDWR), 0, 3 << 20)",
        "stopped",
    ),
    Attempt("deep folders", "for _ in range(3000):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)", "stopped"),
    Attempt("folders without a mode", "os.mkdir('a', 0)\nos.mkdir('b')\nos.mkdir('b/c', 0)", "contained"),
    Attempt("raise the file size", "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))\nfill('a', 64)", "stopped"),
    Attempt("raise the memory", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nx = bytearray(1 << 30)", "stopped"),
    Attempt("raise by prlimit", "resource.prlimit(0, resource.RLIMIT_AS, (-1, -1))\nx = bytearray(1 << 30)", "stopped"),
    Attempt("larger pipes", "for _ in range(8): fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)", "stopped"),
]  # fmt: skip
ATTEMPTS = [*SIGNALS, *PROCESSES, *IPC, *KERNEL, *SOCKETS, *FILES, *RESOURCES]


@pytest.fixture(scope="module")
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    kind: Isolation = request.param
    try:
        made = Sandbox(workers=1, isolation=[kind], limits=LIMITS)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    with made:
        yield made
        assert made.run("import os\nprint(os.listdir('.'))").stdout == "[]\n", "the last attempt left a file"


class Outside:
    """What attempts are made on: a process, a file, a segment of shared memory, listening sockets."""

    def __init__(self, folder: Path) -> None:
        self.secret = folder / "secret"
        self.secret.write_text("the key")
        self.before = self._secret()
        self.victim = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"])
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.abstract, self.by_path = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0bagu-{os.getpid()}")
        self.by_path.bind(str(folder / "socket"))
        for listener in (self.abstract, self.by_path):
            listener.listen()
        self.tmp = Path(f"/tmp/bagu-attempt-{os.getpid()}")
        self.libc = ctypes.CDLL(None)
        self.segment = self.libc.shmget(KEY + 1, 4096, 0o1666)
        caller = max(os.getpid(), 100)  # the first numbers are the program's own in a process namespace
        self.names = {
            "victim": self.victim.pid, "caller": caller, "secret": str(self.secret), "key": KEY,
            "host_key": KEY + 1, "queue": QUEUE, "abstract": f"bagu-{os.getpid()}", "port": self.tcp.getsockname()[1],
            "socket_path": str(folder / "socket"), "host_tmp": str(self.tmp),
        }  # fmt: skip

    def _secret(self) -> tuple[object, ...]:
        state = self.secret.stat()
        names = sorted(path.name for path in self.secret.parent.iterdir() if path.name != "socket")
        return state.st_mode, state.st_uid, state.st_mtime_ns, state.st_size, state.st_nlink, names

    def changes(self) -> list[str]:
        """What is not as it was."""
        ipc = [Path(f"/proc/sysvipc/{kind}").read_text() for kind in ("shm", "sem", "msg")]
        left = [Path("/dev/shm" + QUEUE), Path("/var/tmp" + QUEUE), Path("/usr" + QUEUE), self.tmp]
        found = {
            "the process was signalled": self.victim.poll() is not None,
            "the process has another priority": os.getpriority(0, self.victim.pid) != os.getpriority(0, 0),
            "the file or its folder was changed": self._secret() != self.before,
            "System V IPC was left": any(line.split()[0] == str(KEY) for text in ipc for line in text.splitlines()),
            "files were left": any(path.exists() for path in left),
        }
        return [name for name, changed in found.items() if changed]

    def close(self) -> None:
        self.libc.shmctl(self.segment, 0, None)
        self.victim.kill()
        self.victim.wait()
        for one in (self.tcp, self.abstract, self.by_path):
            one.close()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    made = Outside(tmp_path_factory.mktemp("outside"))
    yield made
    made.close()


IN = [  # of those under Landlock alone, every second is in `make test`
    pytest.param(kind, each, id=f"{kind}-{each.name}", marks=pytest.mark.slow if kind == "landlock" and i % 2 else ())
    for kind in ("namespaces", "landlock") for i, each in enumerate(ATTEMPTS)
]  # fmt: skip


@pytest.mark.parametrize("sandbox, attempt", IN, indirect=["sandbox"])
def test_an_attempt_fails_and_leaves_nothing(sandbox: Sandbox, outside: Outside, attempt: Attempt) -> None:
    given = "\n".join(f"{name} = {value!r}" for name, value in outside.names.items())
    result = sandbox.run(f"{PRELUDE}\n{given}\n{attempt.code}", attempt.limits)
    error = result.stderr.splitlines()[-1] if result.stderr else ""
    said = (result.status, error)
    if attempt.outcome == "refused":
        assert result.status == "error" and error.startswith(SYSTEM_ERRORS), said
    elif attempt.outcome == "stopped":
        assert result.status != "ok" and not error.startswith(("NameError", "SyntaxError", "TypeError")), said
    else:
        assert result.status in ("ok", "killed") or error.startswith(SYSTEM_ERRORS), said
    assert "the key" not in result.stdout
    assert len(result.stdout) <= LIMITS.output_bytes and len(result.stderr) <= LIMITS.output_bytes
    assert outside.changes() == []
    folder, files = result.stdout.splitlines()[0].split(maxsplit=1)
    assert folder == "/tmp" or not Path(*Path(folder).parts[:3]).exists()  # with namespaces /tmp is the program's own
    assert files == "[]", "the attempt before this one left a file"
