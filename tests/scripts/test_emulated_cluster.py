"""scripts/emulated_cluster.py: links between nodes are slow, links inside are not, and nothing is
left behind."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/emulated_cluster.py"
TRANSFER = Path(__file__).with_name("transfer.py")
SIZE = ("--nodes", 2)
MBIT, BURST, BYTES = 133, 256 * 1024, 2_000_000
IDEAL_S = (BYTES - BURST) * 8 / (MBIT * 1e6)  # the first bytes of a burst pass at once


def load():
    spec = importlib.util.spec_from_file_location("emulated_cluster", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


emulated_cluster = load()


def can_be_emulated():
    if emulated_cluster.why_not() is not None:
        return False
    cluster = emulated_cluster.Cluster(nodes=1, ranks_per_node=1, inter="1mbit")
    try:
        with emulated_cluster.network(cluster):
            return True
    except RuntimeError:
        return False


@pytest.fixture(scope="module")
def cluster():
    """A function that runs a command on a cluster; afterwards its namespaces must be gone."""
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    possible = can_be_emulated()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if not possible:
        pytest.skip("no network namespaces here")
    return run


def start(*words):
    command = [sys.executable, str(SCRIPT), "--inter", f"{MBIT}mbit", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def run(*words):
    """Exit status and messages; its namespaces are gone."""
    process = start(*words)
    messages = process.communicate()[1]
    assert namespaces(process.pid) == []
    return process.returncode, messages


def namespaces(pid):
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(f"flexseq-{pid}-")]


@pytest.mark.nightly
@pytest.mark.processes
def test_links_between_nodes_are_shaped_and_no_others(cluster, tmp_path):
    words = [*SIZE, "--", sys.executable, TRANSFER, tmp_path, BYTES]
    status, messages = cluster("--ranks-per-node", 2, *words)
    assert status == 0, messages
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank, found in enumerate(ranks):
        assert (found["RANK"], found["LOCAL_RANK"]) == (str(rank), str(rank % 2))
        assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (found["OMP_NUM_THREADS"], found["GLOO_SOCKET_IFNAME"]) == ("1", "nic")
    assert ranks[0]["0 to 1"]["shaped"] < BYTES / 10
    for source, target in ((0, 2), (2, 0), (3, 1)):
        transfer = f"{source} to {target}"
        assert ranks[source][transfer]["shaped"] >= BYTES
        assert ranks[target][transfer]["bytes"] == BYTES
        assert ranks[source][transfer]["seconds"] >= 0.95 * IDEAL_S


@pytest.mark.nightly
@pytest.mark.processes
def test_a_rank_that_fails_ends_all(cluster):
    script = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    status, _ = cluster("--ranks-per-node", 1, *SIZE, "--", sys.executable, "-c", script)
    assert status == 1  # of torchrun


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_left_of_one_that_is_interrupted(cluster, tmp_path, number, status):
    command = ("sh", "-c", f"echo >> {tmp_path}/up; sleep 600")
    process = start("--ranks-per-node", 1, *SIZE, "--", *command)
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(namespaces(process.pid)) == 3
    process.send_signal(number)
    assert process.wait(timeout=60) == status
    assert namespaces(process.pid) == []


def test_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["emulated_cluster.py", "--", "true"])
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert emulated_cluster.main() == 2
    assert "it needs root" in capsys.readouterr().err
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert emulated_cluster.main() == 2
    assert "it needs ip and tc of iproute2" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--nodes", "0"], ["--inter", "fast"], ["--nodes", "200"]])
def test_nonsense_is_refused(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["emulated_cluster.py", *words, "--", "true"])
    with pytest.raises(SystemExit):
        emulated_cluster.main()
