"""The planning process: answers, errors, death, and many outstanding requests."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.cost.sharding import FsdpFigures
from hf_flexseq.pipeline.planning import PipelineOptions
from hf_flexseq.pipeline.planning.job import StagesJob
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.facts import NO_FACTS, StepFacts
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.process import client
from hf_flexseq.planner.process.client import InlinePlanner, PlannerWorker
from hf_flexseq.planner.process.jobs import GroupsJob, job_from_record
from hf_flexseq.planner.process.worker import serve
from tests.pipelines import even_cost
from tests.plans import planned

NODE = Topology(nodes=1, ranks_per_node=4)
FLEXSP = replace(PRESETS["flexsp-gpt-7b-a100"], sharded_state_bytes=0.0)
FSDP = FsdpFigures(free_bytes=1e11, parameter_bytes=1e9, gradient_bytes=1e9, trip_s=0.2)


def groups_job(**options: Any) -> GroupsJob:
    return GroupsJob(topology=NODE, cost=FLEXSP, options=PlanOptions(**options))


def stages_job(replicas: int = 1, **options: Any) -> StagesJob:
    return StagesJob(cost=even_cost(2), options=PipelineOptions(**options), replicas=replicas)


@pytest.fixture
def worker() -> Iterator[PlannerWorker]:
    with closing(PlannerWorker(groups_job(max_tokens_per_rank=10_000))) as worker:
        yield worker


# ---- answers


@pytest.mark.processes
def test_answers_are_make_plan_s_in_any_order_of_asking(worker):
    batches = {step: [step * 1000 + 1, 17, 30_000] for step in range(3)}
    for step, lengths in batches.items():
        worker.submit(step, lengths)
    with pytest.raises(ValueError, match="submitted before"):
        worker.submit(0, [1])
    for step in (2, 0, 1):
        here = planned(batches[step], NODE, FLEXSP, max_tokens_per_rank=10_000)
        there = worker.result(step)
        assert there.digest() == here.digest()
        assert there.planning_s > 0
    for step in (0, 3):
        with pytest.raises(ValueError, match="was not submitted"):
            worker.result(step)


@pytest.mark.processes
def test_another_job_counts_for_what_is_submitted_after_it(worker):
    lengths, slower = [9_000, 30_000, 17], replace(FLEXSP, attention_s=9 * FLEXSP.attention_s)
    wanted = []
    for cost in (FLEXSP, slower):
        job = GroupsJob(topology=NODE, cost=cost, options=PlanOptions(max_tokens_per_rank=10_000))
        wanted.append(job.plan(lengths).objective_s)
    assert wanted[0] < wanted[1]
    for planner in (worker, InlinePlanner(groups_job(max_tokens_per_rank=10_000))):
        planner.submit(0, lengths)
        planner.use(job)
        planner.submit(1, lengths)
        assert [planner.result(step).objective_s for step in range(2)] == wanted


@pytest.mark.processes
def test_errors_come_back_as_they_were_and_do_not_end_it(worker):
    for step, length in enumerate((50_000, 0, 1)):
        worker.submit(step, [length])
    with pytest.raises(PlanInfeasible, match="sequence 0 has 50000 tokens"):
        worker.result(0)
    with pytest.raises(ValueError, match="sequence 0 has length 0"):
        worker.result(1)
    assert worker.result(2).lengths == (1,)


@pytest.mark.processes
def test_many_outstanding_requests_do_not_block_and_a_killed_worker_is_reported(worker):
    """Far more than two pipes hold, submitted before the first answer is fetched."""
    began = time.monotonic()
    for step in range(40):
        worker.submit(step, [step % 7 + 1] * 4096)
    assert time.monotonic() - began < 1.0
    assert len(worker.result(0).lengths) == 4096
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="ended with code -9"):
        worker.result(39)


@pytest.mark.processes
def test_what_sees_both_ways_travels_with_the_lengths(worker):
    lengths, later_pairs = [30_001, 17, 900], {0: 10**8, 2: 5}
    worker.submit(0, lengths, StepFacts(later_pairs=later_pairs))
    worker.submit(1, lengths)
    plans = [worker.result(step) for step in range(2)]
    options = PlanOptions(max_tokens_per_rank=10_000)
    seen = make_plan(lengths, NODE, FLEXSP, options, later_pairs=later_pairs)
    assert plans[0].digest() == seen.digest()
    assert plans[0].objective_s > plans[1].objective_s


def test_pipelines_refuse_what_sees_both_ways():
    job = stages_job()
    assert job.plan([40, 9], StepFacts(later_pairs={0: 0})).lengths == (40, 9)
    with pytest.raises(ValueError, match="pipeline_parallel_size=1"):
        job.plan([40, 9], StepFacts(later_pairs={0: 1}))


@pytest.mark.processes
def test_the_first_step_of_a_quick_job_does_not_wait_for_the_process(monkeypatch):
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(PlannerWorker, "_send", lambda worker, message: sent.append(message))
    with closing(PlannerWorker(stages_job(max_tokens=30, schedule="1f1b"))) as worker:
        for step in (3, 4):
            worker.submit(step, [40])
        assert worker.wait(3, 600) is None
        with pytest.raises(PlanInfeasible):
            worker.result(3)
        assert worker.wait(4, 0) is not None
        with pytest.raises(ValueError, match="step 3 was not submitted, or its result was"):
            worker.result(3)
    assert [message["id"] for message in sent[1:]] == [4]


def test_serve_speaks_only_json_lines():
    job = groups_job(max_tokens_per_rank=10, sync="free").to_record()
    of_steps = [{"id": 5, "lengths": [3, 4]}, {"id": 6, "lengths": [100]}]
    requests = [{"job": job}, *({**one, "facts": NO_FACTS.to_record()} for one in of_steps)]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), answers)
    first, second = (json.loads(line) for line in answers.getvalue().splitlines())
    assert (first["id"], first["plan"]["lengths"]) == (5, [3, 4])
    assert (second["id"], second["error"]["kind"]) == (6, "PlanInfeasible")


@pytest.mark.parametrize(
    "job",
    [groups_job(sync="free"), replace(groups_job(), fsdp=FSDP), stages_job(replicas=2)],
)
def test_a_job_comes_back_from_its_record(job):
    assert job_from_record(json.loads(json.dumps(job.to_record()))) == job


# ---- its end


@pytest.mark.processes
def test_a_worker_that_fails_shows_its_last_words(monkeypatch):
    message = r"ended with code 1\n[\s\S]*unknown keys \['colour'\]"
    job = stages_job(schedule="infinipipe")
    record = job.to_record()
    record["options"]["colour"] = "blue"
    monkeypatch.setattr(StagesJob, "to_record", lambda job: record)
    with closing(PlannerWorker(job)) as worker:
        worker.submit(0, [1])
        with pytest.raises(RuntimeError, match=message):
            worker.result(0)


@pytest.mark.processes
def test_a_line_that_was_cut_short_ends_the_planner_at_once(monkeypatch, tmp_path):
    cut = tmp_path / "cut.py"
    cut.write_text('import time\nprint(\'{"id": 0, "pl\', flush=True)\nprint()\ntime.sleep(600)')
    monkeypatch.setattr(client, "START", cut)
    with closing(PlannerWorker(groups_job())) as worker:
        worker.submit(0, [1])
        with pytest.raises(RuntimeError, match="the planning process ended with code -9"):
            worker.result(0)


@pytest.mark.processes
def test_a_stopped_worker_is_waited_for_as_long_as_asked_and_closed_twice(worker):
    os.kill(worker._process.pid, signal.SIGSTOP)
    worker.submit(0, [1])
    assert re.match(rf"the planning process \({worker._process.pid} on ", worker.wait(0, 0.1))
    os.kill(worker._process.pid, signal.SIGCONT)
    assert worker.wait(0, 30) is None
    assert worker.result(0).lengths == (1,)
    worker.submit(1, [1] * 100)
    worker.close()
    worker.close()
    assert worker._process.returncode is not None
    with pytest.raises(RuntimeError, match="was closed"):
        worker.result(1)


LEAVES_IT_OPEN = """
import os, signal, sys, time
from hf_flexseq.planner.process.client import PlannerWorker
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.process.jobs import GroupsJob
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.base.topology import Topology
topology = Topology(nodes=1, ranks_per_node=64)
cost = PRESETS["flexsp-gpt-7b-a100"]
worker = PlannerWorker(GroupsJob(topology=topology, cost=cost, options=PlanOptions()))
worker.submit(0, [1] * 100)
print(worker._process.pid, flush=True)
"""
FORKS_AND_IS_KILLED = """
if os.fork() == 0:  # as a dataloader's worker: it holds the planning process's stdin
    time.sleep(60)
worker.result(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def start(program: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.processes
def test_it_ends_with_the_interpreter():
    shown, _ = start(LEAVES_IT_OPEN).communicate(timeout=30)
    with pytest.raises(ProcessLookupError):
        os.kill(int(shown), 0)


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks /proc which processes run")
def test_it_ends_when_its_parent_is_killed_though_a_forked_child_holds_its_pipe():
    parent = start(LEAVES_IT_OPEN + FORKS_AND_IS_KILLED)
    try:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        assert parent.wait(timeout=30) == -signal.SIGKILL
        killed = time.monotonic()
        while is_running(pid) and time.monotonic() < killed + 2:
            time.sleep(0.05)
        assert not is_running(pid)
        os.killpg(parent.pid, 0)  # the forked child is still there
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.close()


# ---- its imports


@pytest.mark.processes
@pytest.mark.parametrize("path", ["", "{here}/sub/..:"])
def test_nothing_is_imported_from_the_current_folder(path, tmp_path, monkeypatch):
    for name in ("json", "queue", "numpy", "sitecustomize", "hf_flexseq"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(77)\n")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", path.format(here=tmp_path))
    with closing(PlannerWorker(groups_job())) as worker:
        worker.submit(0, [1])
        assert worker.result(0).lengths == (1,)
