"""A seccomp filter for bubblewrap: the system calls that a program in a sandbox may not make.

Namespaces do not cover everything. A program could still use memory that belongs to no process
(System V segments, memfds), new user namespaces, the kernel's keyrings, sockets of hypervisors, and
seldom used parts of the kernel. The filter denies the system calls for all these with an error,
which a program can handle. It allows the calls that solutions in Python or C++ need. It is a
classic BPF program (linux/filter.h, linux/seccomp.h).
"""

from __future__ import annotations

import errno
import functools
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_NEWEST = 462  # mseal, of Linux 6.10. Calls with higher numbers get ENOSYS, as on an older kernel.

# The number of each call on x86-64, and on aarch64. None: the machine has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # memory without an owner, which the limits of a process do not count
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184),
    "mq_getsetattr": (245, 185),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    # keyrings, which outlive a program
    "add_key": (248, 217),
    "request_key": (249, 218),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # access to other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # parts of the kernel that are often attacked, or that all processes of a user share
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    # changes of the whole machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
_CLONE3 = 435  # the same number on both kinds of machines
_JOIN_SESSION_KEYRING = 1
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW* of clone(2)
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_STREAM, _DATAGRAM, _TCP, _UDP = 1, 2, 6, 17
# SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE.
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)
_SET_PIPE_SIZE = 1031
_PUT_INTO_TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_HUGE_PAGES = 0x40000  # MAP_HUGETLB

# linux/bpf_common.h
_LOAD, _RETURN, _EQUAL, _AT_LEAST, _ANY_BIT, _AND = 0x20, 0x06, 0x15, 0x35, 0x45, 0x54
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


@dataclass(frozen=True)
class _Machine:
    audit: int  # AUDIT_ARCH_* of linux/audit.h
    column: int  # the machine's column in _DENIED
    socket: int
    socketpair: int
    setsockopt: int
    clone: int
    fcntl: int
    ioctl: int
    mmap: int
    keyctl: int


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 0, 41, 53, 54, 56, 72, 16, 9, 250),
    "aarch64": _Machine(0xC00000B7, 1, 198, 199, 208, 220, 25, 29, 222, 219),
}


def fault(machine: str | None = None) -> str | None:
    """Return why there is no filter for a kind of machine, or None if there is a filter."""
    name = machine or platform.machine()
    if name in _MACHINES:
        return None
    return (
        f"no filter of system calls is known for {name}; there are some for {', '.join(_MACHINES)}"
    )


def denied_calls() -> int:
    """Return how many calls are denied whatever their arguments are."""
    column = _MACHINES[platform.machine()].column
    return sum(numbers[column] is not None for numbers in _DENIED.values())


def join_session_keyring() -> int:
    """Return the number of keyctl, the call by which the harness leaves the run's keyring."""
    return _MACHINES[platform.machine()].keyctl


def memfd_create() -> int:
    """Return the number of the call memfd_create, which makes the files for a sandbox."""
    number = _DENIED["memfd_create"][_MACHINES[platform.machine()].column]
    assert number is not None
    return number


@functools.cache
def program(machine: str | None = None) -> bytes:
    """Return the filter in the form that bwrap reads. The machine must have no `fault`."""
    return b"".join(struct.pack("<HBBI", *each) for each in instructions(machine))


def instructions(machine: str | None = None) -> list[Instruction]:
    calls = _MACHINES[machine or platform.machine()]
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, calls.audit),
        # Calls of another architecture end the program. In 32-bit calls, for example, the same
        # numbers mean other calls.
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    # Calls of x32, the other ABI of x86-64, have numbers above all others.
    code += [(_AT_LEAST, 0, 1, _NEWEST + 1), _error(errno.ENOSYS)]
    for numbers in _DENIED.values():
        number = numbers[calls.column]
        if number is not None:
            code += [(_EQUAL, 0, 1, number), _error(errno.EPERM)]
    # The arguments of clone3 are in memory, where no filter can look. libc falls back to clone.
    code += [(_EQUAL, 0, 1, _CLONE3), _error(errno.ENOSYS)]
    for number, rule in _rules(calls):
        code += [(_EQUAL, 0, len(rule), number), *rule]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _rules(calls: _Machine) -> list[tuple[int, list[Instruction]]]:
    """Return the numbers of the calls that are denied only with some arguments, each with the
    instructions that decide."""
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    family, kind, protocol = (_argument(n) for n in range(3))
    no_family = _error(errno.EAFNOSUPPORT)
    internet = [
        kind,
        (_AND, 0, 0, 0xF),  # ignores the flags SOCK_NONBLOCK and SOCK_CLOEXEC
        (_EQUAL, 2, 0, _STREAM),
        (_EQUAL, 1, 0, _DATAGRAM),
        no_family,
        protocol,
        (_EQUAL, 3, 0, 0),
        (_EQUAL, 2, 0, _TCP),
        (_EQUAL, 1, 0, _UDP),
        no_family,
        allow,
    ]
    netlink = [protocol, (_EQUAL, 1, 0, 0), no_family, allow]  # NETLINK_ROUTE: names of links
    socket = [family, (_EQUAL, 0, 1, _UNIX), allow, (_EQUAL, 0, len(netlink), _NETLINK), *netlink]
    socket += [(_EQUAL, 2, 0, _INET), (_EQUAL, 1, 0, _INET6), no_family, *internet]
    denied = _error(errno.EPERM)
    return [
        (calls.socket, socket),
        (calls.socketpair, [family, (_EQUAL, 1, 0, _UNIX), no_family, allow]),
        (calls.clone, [_argument(0), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), denied, allow]),
        (calls.mmap, [_argument(3), (_ANY_BIT, 0, 1, _HUGE_PAGES), denied, allow]),
        (
            calls.setsockopt,
            [
                _argument(1),
                (_EQUAL, 1, 0, _SOL_SOCKET),
                allow,
                _argument(2),
                *_unless(_BUFFER_SIZES),
            ],
        ),
        (calls.fcntl, [_argument(1), *_unless((_SET_PIPE_SIZE,))]),
        (calls.ioctl, [_argument(1), *_unless(_PUT_INTO_TERMINAL)]),
        (
            # The only operation that a program may call is to join a new keyring without a name,
            # which is empty. Other programs could later read data in any other keyring.
            calls.keyctl,
            [
                _argument(0),
                (_EQUAL, 1, 0, _JOIN_SESSION_KEYRING),
                denied,
                _argument(1),
                (_EQUAL, 1, 0, 0),
                denied,
                _argument(1, high=True),
                (_EQUAL, 1, 0, 0),
                denied,
                allow,
            ],
        ),
    ]


def _unless(values: Sequence[int]) -> list[Instruction]:
    """Return instructions that deny the call if the loaded argument is one of the values."""
    code: list[Instruction] = []
    for value in values:
        code += [(_EQUAL, 0, 1, value), _error(errno.EPERM)]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _argument(number: int, *, high: bool = False) -> Instruction:
    """Return the instruction that loads the low or the high 32 bits of an argument. Both kinds of
    machines store the low bits first."""
    return (_LOAD, 0, 0, 16 + 8 * number + 4 * high)


def _error(number: int) -> Instruction:
    return (_RETURN, 0, 0, 0x00050000 | number)
