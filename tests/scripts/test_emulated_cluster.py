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

from tests.programs import ROOT

SCRIPT = ROOT / "scripts/emulated_cluster.py"
TRANSFER = Path(__file__).with_name("transfer.py")
MBIT, BURST, BYTES = 133, 256 * 1024, 2_000_000
IDEAL_S = (BYTES - BURST) * 8 / (MBIT * 1e6)  # the first bytes of a burst pass at once


def load():
    spec = importlib.util.spec_from_file_location("emulated_cluster", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


emulated_cluster = load()


@pytest.fixture(scope="module")
def possible():
    """Skips where no cluster can be emulated."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    cluster = emulated_cluster.Cluster(nodes=1, ranks_per_node=1, inter="1mbit")
    why = emulated_cluster.why_not()
    try:
        if why is None:
            with emulated_cluster.network(cluster):
                pass
    except RuntimeError as error:
        why = str(error)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if why is not None:
        pytest.skip(why)


def start(ranks, *command):
    words = [SCRIPT, "--inter", f"{MBIT}mbit", "--nodes", 2, "--ranks-per-node", ranks, "--"]
    words = [sys.executable, *words, *command]
    return subprocess.Popen([*map(str, words)], stderr=subprocess.PIPE, text=True)


def run(ranks, *command):
    """Exit status and messages; its namespaces are gone."""
    process = start(ranks, *command)
    messages = process.communicate()[1]
    assert namespaces(process.pid) == []
    return process.returncode, messages


def namespaces(pid):
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith(f"flexseq-{pid}-")]


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("possible")
def test_links_between_nodes_are_shaped_and_no_others(tmp_path):
    status, messages = run(2, sys.executable, TRANSFER, tmp_path, BYTES)
    assert status == 0, messages
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank, found in enumerate(ranks):
        assert found["environment"] == {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4"},
            **{"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "nic"},
        }
    assert ranks[0]["0 to 1"]["shaped"] < BYTES / 10
    for source, target in ((0, 2), (2, 0), (3, 1)):
        transfer = f"{source} to {target}"
        assert ranks[source][transfer]["shaped"] >= BYTES
        assert ranks[target][transfer]["bytes"] == BYTES
        assert ranks[source][transfer]["seconds"] >= 0.95 * IDEAL_S


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("possible")
def test_a_rank_that_fails_ends_all():
    script = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    assert run(1, sys.executable, "-c", script)[0] == 1  # of torchrun


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_left_of_one_that_is_interrupted(tmp_path, number, status):
    process = start(1, "sh", "-c", f"echo >> {tmp_path}/up; sleep 600")
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(namespaces(process.pid)) == 3
    process.send_signal(number)
    assert process.wait(timeout=60) == status
    assert namespaces(process.pid) == []


def test_it_says_what_is_missing_and_refuses_nonsense(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda tool: None)
    for user, said in ((1000, "it needs root"), (0, "it needs ip and tc of iproute2")):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        monkeypatch.setattr(sys, "argv", ["emulated_cluster.py", "--", "true"])
        assert emulated_cluster.main() == 2
        assert said in capsys.readouterr().err
    for words in (["--nodes", "0"], ["--inter", "fast"], ["--nodes", "200"]):
        monkeypatch.setattr(sys, "argv", ["emulated_cluster.py", *words, "--", "true"])
        with pytest.raises(SystemExit):
            emulated_cluster.main()
