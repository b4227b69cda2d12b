"""Short hostile programs. The sandbox must refuse what they try, or end them at a limit.

The numbers of system calls are those of x86-64. `call` raises OSError if the kernel refuses the
call. FOLDER, OWNER, PORT and DATAGRAMS are replaced by things outside of the sandbox: a folder with
the file `secret`, the process of the tests, and sockets on which this process listens.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, os, resource, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mmap.restype = ctypes.c_void_p
def call(number, *words):
    found = libc.syscall(number, *[w if isinstance(w, bytes) else ctypes.c_long(w) for w in words])
    if found == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return found
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
"""

# Each program must end with an error; otherwise the sandbox does not hold. The programs are quick,
# so many of them share a sandbox.
REFUSED = {
    # things outside
    "writes to the root": "write('/escaped', 'x')",
    "writes beside Python": "write(os.path.join(os.path.dirname(os.__file__), 'x'), 'x')",
    "reads shared memory": "open('/dev/shm/gspo_escape_OWNER').read()",
    "changes the harness": "open('/harness.py', 'w')",
    "makes the root writable": (
        "import subprocess; subprocess.run(['mount', '-o', 'remount,rw', '/'], check=True)"
    ),
    "a link to the outside": (
        "os.symlink('/proc/1/root/etc/passwd', '/tmp/passwd'); open('/tmp/passwd').read()"
    ),
    "a link up": "os.symlink('../../../../FOLDER/secret', '/tmp/up'); open('/tmp/up')",
    "reads the run folder": "open('FOLDER/secret').read()",
    "reads the package": "import gspo_megatron",
    "reads installed packages": "import pip",  # a Python usually has it
    "reads homes": "assert os.listdir('/home') or os.listdir('/root')",
    "reads passwords": "open('/etc/shadow').read()",
    "reads the environment": "assert 'SECRET' in os.environ",
    "reads the environment of others": (
        "import glob; assert any('SECRET' in open(p).read() for p in glob.glob('/proc/*/environ'))"
    ),
    "sees other processes": "assert sum(name.isdigit() for name in os.listdir('/proc')) > 9",
    "an old root of process 1": "os.listdir('/proc/1/root/old')",
    "folders of process 1": (
        "p = '/proc/1/fd'; assert any(os.path.isdir(f'{p}/{n}') for n in os.listdir(p))"
    ),
    "the working folder of process 1": "assert 'secret' in os.listdir('/proc/1/cwd')",
    "descriptors of the owner": (
        "found = []\nfor n in range(256):\n"
        " try: found.append(os.readlink(f'/proc/self/fd/{n}'))\n"
        " except OSError: pass\n"
        "assert [f for f in found if not f.startswith(('/memfd:sandbox', 'pipe:'))]\n"
    ),
    "keeps capabilities": (  # other than those with which the harness becomes another user
        "sets = dict(line.split(':') for line in open('/proc/self/status') if line[:3] == 'Cap')\n"
        "sets = [sets[f'Cap{name}'] for name in ('Inh', 'Prm', 'Eff', 'Amb')]\n"
        "assert any(int(text, 16) & ~0xC0 for text in sets)"
    ),
    "asks the kernel to act": "write('/proc/sysrq-trigger', 'c')",
    "connects": "socket.create_connection(('127.0.0.1', PORT), 1)",
    "asks a name server": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(0.3)\n"
        "s.sendto(b'who is example.org?', ('127.0.0.1', DATAGRAMS)); s.recv(99)"
    ),
    "sees links of the network": "assert [n for _, n in socket.if_nameindex() if n != 'lo']",
    "a socket without a name": "socket.socket(socket.AF_UNIX).connect('\\0gspo_escape_OWNER')",
    # memory that belongs to no process
    "shmget": "call(29, 0, 1 << 20, 0o1600)",
    "shmget by libc": "assert libc.shmget(0, 1 << 20, 0o1600) >= 0",
    "shmget of huge pages": "call(29, 0, 1 << 21, 0o5600)",
    "shmat": "call(30, 0, 0, 0)",
    "shmctl": "call(31, 0, 14, bytes(256))",
    "shmdt": "call(67, 0)",
    "semget": "call(64, 0, 32000, 0o1600)",
    "semop": "call(65, 0, bytes(6), 1)",
    "semctl": "call(66, 0, 0, 3, bytes(256))",
    "semtimedop": "call(220, 0, bytes(6), 1, 0)",
    "msgget": "call(68, 0, 0o1600)",
    "msgsnd": "call(69, 0, bytes(64), 8, 0)",
    "msgrcv": "call(70, 0, bytes(64), 8, 0, 0)",
    "msgctl": "call(71, 0, 3, bytes(256))",
    "memfd": "os.memfd_create('x')",
    "memfd of huge pages": "os.memfd_create('x', 4)",
    "secret memory": "call(447, 0)",
    "a queue of messages": "call(240, b'x', 0o102, 0o600, 0)",
    "removes a queue": "call(241, b'x')",
    "sends to a queue": "call(242, 3, b'x', 1, 0, 0)",
    "receives from a queue": "call(243, 3, bytes(9), 9, 0, 0)",
    "is told of a queue": "call(244, 3, 0)",
    "settings of a queue": "call(245, 3, 0, bytes(64))",
    "huge pages": "assert libc.mmap(0, 1 << 21, 3, 0x40022, -1, 0) + 1 != 1 << 64",
    "gives pages to a pipe": "r, w = os.pipe(); call(278, w, bytes(16), 1, 0)",
    "large pipes": "import fcntl; r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20)",
    "large buffer to send": "socket.socketpair()[0].setsockopt(1, 7, 1 << 22)",
    "large buffer to receive": "socket.socketpair()[0].setsockopt(1, 8, 1 << 22)",
    "forced buffer to send": "socket.socketpair()[0].setsockopt(1, 32, 1 << 22)",
    "forced buffer to receive": "socket.socketpair()[0].setsockopt(1, 33, 1 << 22)",
    "a file beside shared memory": "open('/dev/x', 'w')",
    "a device in shared memory": "os.mknod('/dev/shm/x', 0o20666, os.makedev(1, 3))",
    "more of shared memory": (
        "assert libc.mount(b't', b'/dev/shm', b'tmpfs', 32, b'size=1g') == 0"
    ),
    "more files than allowed": "l = [os.open('/dev/null', 0) for _ in range(99)]",
    "more sockets than allowed": "l = [socket.socketpair() for _ in range(99)]",
    "a larger file": "os.ftruncate(os.open('/tmp/x', 66), 1 << 40)",
    "space for a larger file": "os.posix_fallocate(os.open('/tmp/y', 66), 0, 1 << 34)",
    # keyrings
    "adds a key": "call(248, b'user', b'x', b'secret', 6, -3)",
    "adds a key of the user": "call(248, b'user', b'x', b'secret', 6, -4)",
    "requests a key": "call(249, b'user', b'x', 0, -3)",
    "the session's keyring": "call(250, 0, -3, 0)",
    "the user's keyring": "call(250, 0, -4, 1)",
    "joins a keyring by name": "call(250, 1, b'_ses')",
    "describes a keyring": "call(250, 6, -3, bytes(99), 99)",
    "searches a keyring": "call(250, 10, -3, b'user', b'x', 0)",
    "reads a key": "call(250, 11, -3, bytes(99), 99)",
    "keeps a persistent keyring": "call(250, 22, -1, -3)",
    "reads the list of keys": "open('/proc/keys').read()",
    "reads the users of keys": "open('/proc/key-users').read()",
    # sockets
    "vsock": "socket.socket(40, 1)",
    "vsock datagrams": "socket.socket(40, 2)",
    "the device of vsock": "open('/dev/vsock')",
    "raw packets": "socket.socket(17, 3, 0x300)",
    "raw internet": "socket.socket(2, 3, 1)",
    "raw internet, version 6": "socket.socket(10, 3, 58)",
    "bluetooth": "socket.socket(31, 3, 1)",
    "cryptography of the kernel": "socket.socket(38, 5)",
    "CAN": "socket.socket(29, 3, 1)",
    "TIPC": "socket.socket(30, 5)",
    "RDS": "socket.socket(21, 5)",
    "Xen or other hypervisors": "socket.socket(44, 3)",
    "KCM": "socket.socket(41, 5)",
    "RxRPC": "socket.socket(33, 2)",
    "AppleTalk": "socket.socket(5, 2)",
    "SCTP": "socket.socket(2, 1, 132)",
    "SCTP by its type": "socket.socket(2, 5)",
    "DCCP": "socket.socket(2, 6)",
    "MPTCP": "socket.socket(2, 1, 262)",
    "UDP-Lite": "socket.socket(2, 2, 136)",
    "ping": "socket.socket(2, 2, 1)",
    "netlink of audit": "socket.socket(16, 3, 9)",
    "netlink of netfilter": "socket.socket(16, 3, 12)",
    "netlink of uevents": "socket.socket(16, 3, 15)",
    "netlink of XFRM": "socket.socket(16, 3, 6)",
    "pair of vsock": "socket.socketpair(40, 1)",
    "a high word in the family": "call(41, (1 << 32) | 40, 1, 0)",
    "makes a link of the network": (
        "s = socket.socket(16, 3, 0)\n"
        "s.send(struct.pack('IHHII', 32, 16, 0x605, 1, 0) + bytes(16))\n"
        "assert struct.unpack_from('i', s.recv(4096), 16)[0] == 0"
    ),
    "the outside by address": "socket.create_connection(('8.8.8.8', 53), 1)",
    "the cloud's metadata": "socket.create_connection(('169.254.169.254', 80), 1)",
    # namespaces and mounts
    "a user namespace": "call(272, 0x10000000)",
    "a mount namespace": "call(272, 0x20000)",
    "a network namespace": "call(272, 0x40000000)",
    "a namespace of ids": "call(272, 0x20000000)",
    "a cgroup namespace": "call(272, 0x02000000)",
    "a time namespace": "call(272, 0x80)",
    "a clone in a user namespace": "os._exit(9) if call(56, 0x10000011, 0, 0, 0, 0) == 0 else 0",
    "a clone in many": "os._exit(9) if call(56, 0x7E020011, 0, 0, 0, 0) == 0 else 0",
    "clone3": "call(435, struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)",
    "enters a namespace": "call(308, os.open('/proc/1/ns/mnt', 0), 0)",
    "the program unshare": (
        "import subprocess; subprocess.run(['unshare', '-Ur', 'true'], check=True)"
    ),
    "mount": "call(165, b't', b'/tmp', b'tmpfs', 0, 0)",
    "umount": "call(166, b'/tmp', 2)",
    "lazy umount of the kernel's files": "call(166, b'/proc', 2)",
    "pivot_root": "call(155, b'/tmp', b'/tmp')",
    "chroot": "call(161, b'/tmp')",
    "open_tree": "call(428, -100, b'/', 1)",
    "move_mount": "call(429, -100, b'/tmp', -100, b'/usr', 0)",
    "fsopen": "call(430, b'tmpfs', 0)",
    "mount_setattr": "call(442, -100, b'/usr', 0, bytes(32), 32)",
    "a device": "os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0)); open('/tmp/disk')",
    # processes and the kernel
    "ptrace": "assert libc.ptrace(0, 0, 0, 0) == 0",
    "attaches to process 1": "assert libc.ptrace(16, 1, 0, 0) == 0",
    "memory of others": "call(310, 1, bytes(16), 1, bytes(16), 1, 0)",
    "writes memory of others": "call(311, 1, bytes(16), 1, bytes(16), 1, 0)",
    "descriptors of others": "call(438, os.pidfd_open(os.getppid()), 0, 0)",
    "bpf": "call(321, 0, bytes(72), 72)",
    "performance counters": "call(298, bytes(128), 0, -1, -1, 0)",
    "userfaultfd": "call(323, 1)",
    "io_uring": "call(425, 8, bytes(120))",
    "io_uring enters": "call(426, 3, 1, 0, 0, 0, 0)",
    "io_uring registers": "call(427, 3, 0, 0, 0)",
    "fanotify": "call(300, 0, 0)",
    "inotify": "call(253)",
    "inotify with flags": "call(294, 0)",
    "open by handle": "call(304, -100, bytes(16), 0)",
    "kexec": "call(246, 0, 0, 0, 0)",
    "a module": "call(313, 0, b'', 0)",
    "reboot": "call(169, 0xFEE1DEAD, 672274793, 0x1234567, 0)",
    "the kernel's log": "call(103, 3, bytes(99), 99)",
    "the kernel's log, as a file": "open('/dev/kmsg').read(1)",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "the host's name": "socket.sethostname('x')",
    "a personality": "call(135, 0x0040000)",
    "local descriptors": "call(154, 1, bytes(16), 16)",
    "ports": "call(172, 3)",
    "accounting": "call(163, b'/tmp/x')",
    "swap": "call(167, b'/tmp/x', 0)",
    "the other ABI": "call(0x40000000 | 39)",
    "a call of the future": "call(9999)",
    "types into the terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",
    # files and settings
    "oom_score_adj": "write('/proc/self/oom_score_adj', '0')",
    "oom_score_adj of process 1": "write('/proc/1/oom_score_adj', '0')",
    "the old oom_adj": "write('/proc/self/oom_adj', '0')",
    "maps users": "write('/proc/self/uid_map', '0 0 1')",
    "maps groups": "write('/proc/self/setgroups', 'allow')",
    "filter of core dumps": "write('/proc/self/coredump_filter', '0x7f')",
    "where core dumps go": "write('/proc/sys/kernel/core_pattern', '|/tmp/x')",
    "overcommitted memory": "write('/proc/sys/vm/overcommit_memory', '1')",
    "buffers of the network": "write('/proc/sys/net/ipv4/tcp_rmem', '1 2 3')",
    "the highest process id": "write('/proc/sys/kernel/pid_max', '99')",
    "settings of the hardware": "write('/sys/kernel/mm/ksm/run', '1')",
    "the machine's cgroups": "os.listdir('/sys/fs/cgroup')",
    "memory of process 1": "open('/proc/1/mem', 'rb').read(1)",
    "memory of process 1, to write": "os.open('/proc/1/mem', os.O_RDWR)",
    "another root by process 1": (
        "assert sorted(os.listdir('/proc/1/root')) != sorted(os.listdir('/'))"
    ),
    "a link to the harness": "os.link('/harness.py', '/tmp/h'); open('/tmp/h', 'w')",
    "a link out of /tmp": "os.symlink('/harness.py', '/tmp/l'); open('/tmp/l', 'w')",
    "renames the solution": "os.rename('/solution.py', '/tmp/s')",
    "removes the harness": "os.unlink('/harness.py')",
    "a folder in the root": "os.mkdir('/x')",
    "becomes root": "os.setuid(0)",
    "becomes root by a program": (
        "import subprocess; subprocess.run(['su', '-c', 'true'], check=True)"
    ),
    "another group": "os.setgid(0)",
    "other groups": "os.setgroups([0])",
    "more memory by its limit": (
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); bytearray(1 << 30)"
    ),
    "more files by its limit": "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
    "more processes by its limit": "resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))",
    "more time by its limit": "resource.setrlimit(resource.RLIMIT_CPU, (900, 900))",
    "a higher priority": "os.nice(-5)",
    "real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "a process of the machine": "os.kill(99999, 0)",
    "a group of the machine": "os.killpg(99998, 9)",
    # If this succeeds, all programs in the sandbox end.
    "a signal to the first process": (
        " os.kill(1, 9); os.kill(1, 15); time.sleep(0.1); os.kill(1, 0); 1 / 0"
    ),
}

OUT_OF_TIME = "time limit of 1 s"

# Each program runs in a sandbox of its own. The second text is the beginning of the reported
# reason.
LIMITED: dict[str, tuple[str, str | tuple[str, ...]]] = {
    "an error": ("1 / 0", "ZeroDivisionError: division by zero"),
    "no program": ("def f(:", "SyntaxError: invalid syntax"),
    "an exit code": ("sys.exit(3)", "exit code 3"),
    "ends its parent": (
        "p = os.getppid(); os.kill(p, 9); time.sleep(0.1)\nassert os.getppid() != p",
        ("AssertionError", "PermissionError"),
    ),
    "ends everybody": ("os.kill(-1, 9); os.abort()", ""),
    "ends the tests": ("os.kill(OWNER, 9)", ""),
    "computes": ("while True: pass", OUT_OF_TIME),
    "computes with closed streams": (
        "os.close(1), os.close(2)\nwhile True: pass",
        OUT_OF_TIME,
    ),
    "a fork bomb": ("while True: os.fork()", "BlockingIOError"),
    "a fork bomb that waits": (
        "while True:\n try: os.fork()\n except OSError: time.sleep(0.01)",
        OUT_OF_TIME,
    ),
    "a bomb of the shell": (
        "os.execv('/bin/sh', ['sh', '-c', ':(){ :|:& };:; sleep 9'])",
        "",
    ),
    "threads": (
        "import threading\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
        "RuntimeError: can't start new thread",
    ),
    "sessions": (
        "for _ in range(9):\n if os.fork() == 0: os.setsid(); time.sleep(900)\nos.abort()",
        "ended by signal 6",
    ),
    "orphans": (
        "if os.fork() == 0:\n if os.fork() == 0: time.sleep(900)\n os._exit(0)\nos.abort()",
        "ended by signal 6",
    ),
    "ignores SIGXCPU": (
        "import signal; signal.signal(24, signal.SIG_IGN)\nwhile True: pass",
        "",
    ),
    "sleeps": ("time.sleep(900)", OUT_OF_TIME),
    "stops": ("os.kill(os.getpid(), 19)", OUT_OF_TIME),
    "waits for input": ("os.read(os.pipe()[0], 1)", OUT_OF_TIME),
    "memory": ("bytearray(4 << 30)", "memory limit of 256 MB"),
    "memory in pieces": ("l = []\nwhile True: l.append(bytes(1 << 20))", "memory limit of 256 MB"),
    "output": ("while True: os.write(1, bytes(1 << 16))", "output limit of 1048576 bytes"),
    "output of children": (
        "os.fork()\nwhile True: os.write(2, bytes(1 << 16))",
        "output limit of 1048576 bytes",
    ),
    "a large file": ("write('/tmp/x', 'x' * (64 << 20))", "OSError: [Errno 27] File too large"),
    "many files": (
        "for n in range(99): write(f'/tmp/{n}', 'x' * (1 << 20))",
        "OSError: [Errno 28] No space left",
    ),
    "a file that is open and removed": (
        "for n in range(9): f = os.open(f'/tmp/{n}', 66); os.unlink(f'/tmp/{n}')\n"
        "for n in range(9): os.write(f - n, bytes(4 << 20))",
        "OSError: [Errno 28] No space left",
    ),
    "files in shared memory": (
        "for n in range(9): write(f'/dev/shm/{n}', 'x' * (1 << 18))",
        "OSError: [Errno 28] No space left",
    ),
    "semaphores": (
        "import multiprocessing as m\nl = [m.Lock() for _ in range(999)]",
        "OSError: [Errno 28] No space left",
    ),
    "a deep folder": (
        "while True: os.mkdir('d'); os.chdir('d')",
        "",
    ),
    "a segmentation fault": ("ctypes.string_at(0)", "ended by signal 11"),
    "a 32-bit call": (
        "code = libc.mmap(0, 4096, 7, 0x22, -1, 0)\n"
        "ctypes.memmove(code, b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3', 8)\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(code)())",
        "ended by signal 31",
    ),
    "deep recursion": (
        "sys.setrecursionlimit(1 << 30)\ndef f(): return [f()]\nf()",
        "",
    ),
    "no text": ("os.write(2, b'\\xff\\xfe\\x00'); os._exit(3)", ""),
}
