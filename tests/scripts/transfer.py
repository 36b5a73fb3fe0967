"""What a rank of an emulated cluster runs: it tells where it is, and times transfers over plain
sockets.

transfer.py FOLDER BYTES
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

FOLDER, BYTES = Path(sys.argv[1]), int(sys.argv[2])
NAMES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
NAMES += ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
RANK, RANKS_PER_NODE = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
TRANSFERS = [(0, 1), (0, 2), (2, 0), (3, 1)]  # (from, to), one after the other


def place(rank):
    return f"10.78.0.{rank // RANKS_PER_NODE + 1}", 40000 + rank


def shaped_bytes():
    """Bytes that have left over the shaped link."""
    lines = map(str.strip, Path("/proc/net/dev").read_text().splitlines())
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.startswith("nic:"))


def connected(to):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            return socket.create_connection(place(to))
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise TimeoutError(f"rank {to} does not listen")


def send(to):
    before = shaped_bytes()
    with connected(to) as connection:
        # here, for the other side may come to look when all is there
        began = time.perf_counter()
        connection.sendall(bytes(BYTES))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1), "not all has arrived"
    return {"shaped": shaped_bytes() - before, "seconds": time.perf_counter() - began}


def receive(listener):
    connection, _ = listener.accept()
    with connection:
        count = 0
        while piece := connection.recv(1 << 20):
            count += len(piece)
        connection.sendall(b".")
        return {"bytes": count}


found = {"environment": {name: os.environ[name] for name in NAMES}}
with socket.create_server(place(RANK)) as listener:
    for source, target in TRANSFERS:
        if source == RANK:
            found[f"{source} to {target}"] = send(target)
        if target == RANK:
            found[f"{source} to {target}"] = receive(listener)
(FOLDER / f"{RANK}.json").write_text(json.dumps(found))
