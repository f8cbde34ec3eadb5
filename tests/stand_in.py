"""`python` as launchers start it in tests: asks a server (tests/warm_python.py) for a process that has imported torch.

This one only lends its place: it passes signals on to that process, and ends as that one ends. Started without `site`
it costs hundredths of a second. The server may say that the real interpreter is to do it.
"""

import array
import marshal
import os
import signal
import socket
import sys

PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM")
SET_PARENT_DEATH_SIGNAL = 1  # prctl's

own, arguments = sys.argv[0], sys.argv[1:]
if os.path.basename(own) == "torchrun":
    arguments = ["-m", "torch.distributed.run", *arguments]

server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(os.path.join(os.path.dirname(os.path.realpath(own)), "server"))
numbers = [getattr(signal, name) for name in PASSED_ON]
ignored = [int(number) for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
inherited = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
inherited = [file for file in inherited if os.path.exists(f"/proc/self/fd/{file}") and os.get_inheritable(file)]
place = os.open(".", os.O_RDONLY)
asked = marshal.dumps((os.path.abspath(own), arguments, os.getcwd(), dict(os.environ), ignored, inherited))
files = array.array("i", [0, 1, 2, place, *inherited])
server.sendmsg([asked], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])

while True:
    word, number = marshal.loads(server.recv(100) or marshal.dumps(("gone", 0)))
    if word == "fresh":
        os.execv(sys.executable, [sys.executable, *arguments])
    elif word == "runs":
        for each in numbers:
            signal.signal(each, lambda number, frame: server.send(marshal.dumps(number)))
        with open("/proc/self/comm", "w") as file:  # where tests find it
            file.write(
                f"warm-{number}"
            )  # with a blank Slurm could not read its line in /proc, and would not signal it
    elif word == "dies with its launcher":
        import ctypes

        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, number)
    elif word == "ended" and number >= 0:
        os._exit(number)
    elif word == "ended":
        if -number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-number, signal.SIG_DFL)
        os.kill(os.getpid(), -number)
    else:
        sys.exit("the server of warm processes is gone")
