"""scripts/emulated_cluster.py: links between nodes are slow, links inside are not, and nothing is
left behind."""

import importlib.util
import subprocess
import sys

import pytest

from tests.programs import ROOT

SCRIPT = ROOT / "scripts/emulated_cluster.py"
MBIT, BURST, BYTES = 133, 256 * 1024, 2_000_000


def load():
    spec = importlib.util.spec_from_file_location("emulated_cluster", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


emulated_cluster = load()


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
