"""What `warm_python.executable` runs: has a process started with its own arguments, folder, environment and streams.

    python -I -S warm_client.py SOCKET ARGUMENTS...

It passes on the signals it gets, ends as that process ends, and takes it along when it is killed.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()  # noqa: PTH109 (pathlib takes its time to import)
message = len(request).to_bytes(8, "big") + request
sent = socket.send_fds(server, [message], [0, 1, 2])
server.sendall(message[sent:])
for number in PASSED_ON:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda received, _: server.sendall(bytes([received])))
answer = server.recv(16)
status = int(answer or b"70")  # no answer: the server itself is gone
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
