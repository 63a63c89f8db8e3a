"""Attacks on the files and the resources of others: of the user who runs the program, and of the programs beside it."""

# ruff: noqa: E501 - an attack is one string, and a line of it may be long

from __future__ import annotations

from attrs import frozen


@frozen
class NeighbourAttack:
    """
    One hostile program.

    Attributes:
        name: its row in the README's table.
        code: the program. It prints "BREACH" if it reaches something; VICTIM is replaced by the path of the victim.
        statuses: the correct statuses.
    """

    name: str
    code: str
    statuses: tuple[str, ...] = ("ok",)


_CALLS = """
import ctypes, errno, os, posix, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
DATA, LIBRARY, HOME = 'VICTIM/data.txt', 'VICTIM/library/module.py', 'VICTIM'

def attempt(action):
    try:
        value = action()
    except (OSError, ValueError, AttributeError, OverflowError) as error:
        print('refused:', error)
    else:
        print('BREACH', value)

def call(x86, arm, *arguments):
    number = x86 if os.uname().machine == 'x86_64' else arm
    if number is None:
        raise OSError(errno.ENOSYS, 'this processor has no such call')
    values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = libc.syscall(ctypes.c_long(number), *values)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def opened():
    # Descriptors of the victim, as far as the sandbox gives any: Landlock checks no access if a file is opened for
    # neither reading nor writing.
    for path in (DATA, LIBRARY, HOME, HOME + '/library', os.__file__, '..'):
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE, os.O_PATH, os.O_RDONLY | os.O_DIRECTORY):
            try:
                yield path, posix.open(path, flags)
            except OSError as error:
                print('refused:', path, error)

PATHS = [DATA, LIBRARY, HOME, HOME + '/library', os.__file__, '..', '/', '/dev/null']
"""

NEIGHBOUR_ATTACKS = (
    NeighbourAttack(
        "modes by path",
        """
for path in PATHS:
    name = path.encode()
    attempt(lambda: posix.chmod(path, 0o777))
    attempt(lambda: posix.chmod(path, 0o700, dir_fd=os.open('.', os.O_RDONLY)) if not path.startswith('/') else call(268, 53, -100, name, 0))
    attempt(lambda: call(90, None, name, 0))
    attempt(lambda: call(452, 452, -100, name, 0, 0))
    attempt(lambda: os.chmod(path, 0))
""",
    ),
    NeighbourAttack(
        "modes by descriptor",
        """
for path, fd in opened():
    attempt(lambda: os.fchmod(fd, 0))
    attempt(lambda: posix.chmod(f'/proc/self/fd/{fd}', 0))
    attempt(lambda: posix.chmod(f'/dev/fd/{fd}', 0))
    attempt(lambda: call(452, 452, fd, b'', 0, 0x1000))
""",
    ),
    NeighbourAttack(
        "times by path",
        """
times = (ctypes.c_long * 4)(1, 0, 1, 0)
for path in PATHS:
    name = path.encode()
    attempt(lambda: posix.utime(path, (1, 1)))
    attempt(lambda: posix.utime(path))
    attempt(lambda: posix.utime(path, (1, 1), follow_symlinks=False))
    attempt(lambda: call(132, None, name, times))
    attempt(lambda: call(235, None, name, times))
    attempt(lambda: call(261, None, -100, name, times))
    attempt(lambda: call(280, 88, -100, name, times, 0))
""",
    ),
    NeighbourAttack(
        "times by descriptor",
        """
times = (ctypes.c_long * 4)(1, 0, 1, 0)
for path, fd in opened():
    attempt(lambda: posix.utime(fd, (1, 1)))
    attempt(lambda: call(280, 88, fd, 0, times, 0))
    attempt(lambda: call(280, 88, fd, b'', times, 0x1000))
    attempt(lambda: call(261, None, fd, 0, times))
""",
    ),
    NeighbourAttack(
        "owners",
        """
for path in PATHS:
    attempt(lambda: posix.chown(path, os.getuid(), os.getgid()))
    attempt(lambda: posix.lchown(path, os.getuid(), os.getgid()))
    attempt(lambda: call(92, None, path.encode(), os.getuid(), os.getgid()))
for path, fd in opened():
    attempt(lambda: os.fchown(fd, os.getuid(), os.getgid()))
    attempt(lambda: call(260, 54, fd, b'', os.getuid(), os.getgid(), 0x1000))
attempt(lambda: posix.chown('.', os.getuid(), os.getgid()))
""",
    ),
    NeighbourAttack(
        "truncation",
        """
for path in (DATA, LIBRARY, os.__file__):
    name = path.encode()
    attempt(lambda: posix.truncate(path, 0))
    attempt(lambda: os.truncate(path, 0))
    attempt(lambda: call(76, 45, name, 0))
    attempt(lambda: call(85, None, name, 0o600))
    for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE):
        attempt(lambda: posix.open(path, mode | os.O_TRUNC))
        attempt(lambda: posix.open(path, mode | os.O_TRUNC | os.O_CREAT | os.O_NOFOLLOW))
        attempt(lambda: call(2, None, name, mode | os.O_TRUNC))
        attempt(lambda: call(437, 437, -100, name, struct.pack('QQQ', mode | os.O_TRUNC, 0, 0), 24))
for path, fd in opened():
    attempt(lambda: os.ftruncate(fd, 0))
    attempt(lambda: os.posix_fallocate(fd, 0, 1 << 20))
    attempt(lambda: call(285, 47, fd, 3, 0, 1 << 20))
""",
    ),
    NeighbourAttack(
        "names and attributes",
        """
for path in (DATA, LIBRARY, HOME, HOME + '/library'):
    attempt(lambda: os.unlink(path))
    attempt(lambda: os.rmdir(path))
    attempt(lambda: os.rename(path, path + '.moved'))
    attempt(lambda: os.rename(path, 'stolen'))
    attempt(lambda: os.link(path, 'linked'))
    attempt(lambda: call(316, 276, -100, path.encode(), -100, b'.', 2))
    attempt(lambda: os.setxattr(path, 'user.x', b'x'))
    attempt(lambda: os.symlink('x', HOME + '/link'))
    attempt(lambda: os.mkdir(HOME + '/folder'))
    attempt(lambda: os.mkfifo(HOME + '/pipe'))
for path, fd in opened():
    attempt(lambda: os.setxattr(fd, 'user.x', b'x'))
    attempt(lambda: call(16, 29, fd, 0x40086602, ctypes.byref(ctypes.c_long(0x10))))
    attempt(lambda: os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=fd) if path != '.' else 1 / 0)
""",
    ),
    NeighbourAttack(
        "socket buffers",
        """
total, pairs = 0, []
for _ in range(300):
    try: pair = socket.socketpair()
    except OSError: break
    pairs.append(pair)
    for each in pair:
        for option in (7, 8, 32, 33):
            try: each.setsockopt(1, option, 1 << 30)
            except OSError: pass
        each.setblocking(False)
        try:
            while True: total += each.send(b'x' * 65536)
        except OSError: pass
print('BREACH' if total > 32 << 20 else 'held', total)
for option in (7, 8, 32, 33):
    attempt(lambda: pairs[0][0].setsockopt(1, option, 1 << 20))
""",
    ),
    NeighbourAttack(
        "socket filters",
        """
one, other = socket.socketpair()
program = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0xFFFF))
for option in (26, 27, 36, 44, 50, 51, 52):
    attempt(lambda: one.setsockopt(1, option, struct.pack('HxxxxxxQ', 1, ctypes.addressof(program))))
    attempt(lambda: one.setsockopt(1, option, 1))
for level in (0, 6, 41, 255, 270):
    attempt(lambda: one.setsockopt(level, 1, 1))
""",
    ),
    NeighbourAttack(
        "pipe buffers",
        """
import fcntl
total, pipes = 0, []
for _ in range(300):
    try: pipes.append(os.pipe())
    except OSError: break
    try: fcntl.fcntl(pipes[-1][1], 1031, 1 << 20)
    except OSError: pass
    os.set_blocking(pipes[-1][1], False)
    try:
        while True: total += os.write(pipes[-1][1], b'x' * 65536)
    except OSError: pass
print('BREACH' if total > 4 << 20 else 'held', total)
attempt(lambda: fcntl.fcntl(pipes[0][1], 1031, 1 << 20))
""",
    ),
    NeighbourAttack(
        "urgent data",
        """
one, other = socket.socketpair()
attempt(lambda: one.send(b'x', socket.MSG_OOB))
attempt(lambda: one.send(b'x', socket.MSG_OOB | socket.MSG_DONTWAIT))
attempt(lambda: one.sendmsg([b'x'], [], socket.MSG_OOB))
other.send(b'y')
attempt(lambda: one.recv(1, socket.MSG_OOB))
attempt(lambda: one.recv(1, socket.MSG_OOB | socket.MSG_PEEK))
attempt(lambda: one.recvmsg(1, 0, socket.MSG_OOB))
attempt(lambda: call(299, 243, one.fileno(), ctypes.create_string_buffer(64), 1, 1, 0))
attempt(lambda: one.setsockopt(1, 10, 1))
""",
    ),
    NeighbourAttack(
        "cycles of sockets in flight",
        """
for _ in range(100):
    one, other = socket.socketpair()
    attempt(lambda: socket.send_fds(one, [b'x'], [one.fileno(), other.fileno()]))
    attempt(lambda: call(307, 269, one.fileno(), ctypes.create_string_buffer(64), 1, 0))
    one.close(), other.close()
""",
    ),
    NeighbourAttack(
        "futexes with priority inheritance",
        """
word, second = ctypes.c_int(0), ctypes.c_int(0)
for operation in (2, 6, 7, 8, 11, 12, 13):
    for flags in (0, 128, 256, 384):
        attempt(lambda: call(202, 98, ctypes.byref(word), operation | flags, 0, 0, ctypes.byref(second), 0))
""",
    ),
    NeighbourAttack(
        "barriers on every processor",
        "for command in range(0, 12):\n    attempt(lambda: call(324, 283, 1 << command >> 1, 0, 0))",
    ),
    NeighbourAttack(
        "locks on libraries",
        """
import fcntl
# The host holds every kind of lock on the library and on Python's own module: a real lock would conflict.
with open(LIBRARY) as library:
    for action in (fcntl.LOCK_EX, fcntl.LOCK_SH):
        try: fcntl.flock(library, action | fcntl.LOCK_NB)
        except BlockingIOError: print('BREACH: it sees the lock of another')
    try: fcntl.lockf(library, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError: print('BREACH: it sees the lock of another')
    for lease in (1024, 1026): attempt(lambda: fcntl.fcntl(library, lease, 1))
""",
    ),
    NeighbourAttack(
        "timers",
        """
timer = ctypes.c_int()
for _ in range(1000):
    attempt(lambda: call(222, 107, 1, 0, ctypes.byref(timer)))
""",
    ),
    NeighbourAttack(
        "pending signals",
        """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
info = ctypes.create_string_buffer(struct.pack('iii', 40, 0, -1), 128)
queued = 0
for _ in range(100_000):
    try:
        call(129, 138, os.getpid(), 40, info)
    except OSError:
        break
    queued += 1
print('BREACH' if queued > 64 else 'held', queued)
""",
    ),
    NeighbourAttack(
        "one processor for all",
        """
for pid in (0, os.getpid(), os.getppid(), 1):
    attempt(lambda: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))}))
    attempt(lambda: os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(1)))
    attempt(lambda: os.setpriority(os.PRIO_PROCESS, pid, -1))
    attempt(lambda: os.setpriority(os.PRIO_USER, 0, 5))
""",
    ),
    NeighbourAttack(
        "every thread of the user",
        """
import _thread, time
_thread.stack_size(65536)
end = time.monotonic() + 1
while time.monotonic() < end:
    # Thread.start() would wait for a sign of the new thread, which a thread without memory never gives.
    try: _thread.start_new_thread(time.sleep, (0.5,))
    except (RuntimeError, MemoryError): time.sleep(0.01)
os._exit(0)
""",
        ("ok", "error", "memory"),
    ),
    NeighbourAttack(
        "directories of other programs",
        """
import time
names = [str(n) for n in range(50)] + [os.path.basename(os.getcwd())[:-1] + c for c in '0123456789abcdef']
names = [name for name in names if name != os.path.basename(os.getcwd())]
end = time.monotonic() + 1
while time.monotonic() < end:
    for name in names:
        for action in (posix.chmod, os.chmod):
            try: action('../' + name, 0); print('BREACH', name)
            except OSError: pass
    for action in (posix.listdir, os.rmdir, lambda path: posix.chmod(path, 0), lambda path: os.rename('.', path + '/0'),
                   lambda path: os.open(path, os.O_TMPFILE | os.O_RDWR), lambda path: os.mkdir(path + '/0'),
                   lambda path: os.open(path, os.O_RDONLY)):
        try: found = action('..')
        except OSError: continue
        if found: print('BREACH', found)
""",
    ),
)


def build_program(attack: NeighbourAttack, victim: str) -> str:
    """Return the program of an attack on a victim."""
    return (_CALLS + attack.code).replace("VICTIM", victim)
