"""Several stages per rank, which take turns: the loss and gradients of one process, and no
hang."""

import copy
import random
import time
from unittest import mock

import numpy as np
import pytest
import torch

from hf_flexseq.pipeline.executor import _ChunkRun
from hf_flexseq.pipeline.reduction import reduce_gradients
from hf_flexseq.pipeline.sharding import whole
from tests.hf.test_trainer import float64_loss, logged, plain_run, update_error
from tests.hf.tiny import documents, noting_figures, relative_errors, tiny_llama
from tests.matching import Launches
from tests.pipeline.plans import random_pipeline_plan
from tests.pipeline.test_exactness import (
    CASES,
    LENGTHS,
    TARGETS,
    columns_of,
    loss_error,
    make_executor,
    model_and_gradients,
)
from tests.pipeline.test_fsdp_trainer import FSDP
from tests.pipeline.test_trainer import joined, make_trainer
from tests.ranks import join, run_ranks, run_threads

LAYERS = 6
SEQ1F1B = {"pipeline_schedule": "seq1f1b-i", "plans": "own"}


def errors_by_case(rank, world_size, degree, virtual):
    """For each kind of model and case: the largest error of this rank's gradients, and that of the
    loss."""
    ranks = world_size // degree
    examples = documents(LENGTHS)
    communicator = join()
    errors = {}
    for tied in (False, True):
        model, wanted_loss, wanted = model_and_gradients(LAYERS, tied)
        model = copy.deepcopy(model)
        executor = make_executor(model, ranks, degree, communicator, virtual)
        assert len(executor.stage.virtual) == virtual
        for case, options in CASES.items():
            rng = random.Random(f"{ranks} {virtual} {tied} {case}")
            plan = random_pipeline_plan(
                LENGTHS, ranks, rng, virtual=virtual, layers=LAYERS, **options
            )
            columns = columns_of(plan, examples)
            losses = [executor.train(plan, columns, TARGETS)]
            reduce_gradients(executor.stage, executor.neighbours)
            found = {name: p.grad.clone() for name, p in executor.stage.global_parameters()}
            model.zero_grad()
            losses.append(executor.evaluate(plan, columns, TARGETS))
            here = relative_errors(found, {name: wanted[name] for name in found}, floor_of=wanted)
            errors[tied, case] = (
                max(here.values()),
                max(loss_error(loss, wanted_loss, communicator) for loss in losses),
            )
    return errors


@pytest.mark.parametrize(
    ("start", "world_size", "degree", "virtual"),
    [
        pytest.param(run_threads, 2, 1, 2, marks=pytest.mark.slow),
        pytest.param(run_threads, 2, 1, 3, marks=pytest.mark.slow),
        pytest.param(run_threads, 3, 1, 2, marks=pytest.mark.slow),
        pytest.param(run_threads, 4, 2, 2, marks=pytest.mark.slow),
        pytest.param(run_ranks, 2, 1, 2, marks=[pytest.mark.processes, pytest.mark.nightly]),
    ],
)
def test_gradients_equal_one_process(start, world_size, degree, virtual):
    for errors in start(errors_by_case, world_size, degree, virtual, seconds=120):
        assert len(errors) == 2 * len(CASES)
        for case, (of_gradients, of_loss) in errors.items():
            assert of_gradients < 1e-10, case
            assert of_loss < 1e-12, case


# ---- sends that wait


def steps(rank, world_size, virtual, plans):
    """Steps of random plans. Gradients flow in a circle here: where a send waits for a receive
    that is posted only when it is needed, two ranks of four stages each hang."""
    model = tiny_llama(num_hidden_layers=8, hidden_size=16, intermediate_size=16)
    executor = make_executor(model, world_size, 1, join(), virtual)
    for seed in range(plans):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 30) for _ in range(rng.randint(3, 20))]
        plan = random_pipeline_plan(lengths, world_size, rng, virtual=virtual, split_weights=True)
        columns = columns_of(plan, documents(lengths))
        executor.train(plan, columns, TARGETS)
        executor.evaluate(plan, columns, TARGETS)
    return plans


@pytest.mark.parametrize("launches", Launches)
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "virtual"), [(4, 2), (2, 4)])
def test_steps_never_hang_however_posts_are_carried_out(world_size, virtual, launches):
    found = run_threads(steps, world_size, virtual, 2, launches=launches, seed=0)
    assert found == [2] * world_size


def delayed_steps(rank, world_size, virtual, plans):
    """Ranks that fall behind at random."""
    pace, obey = random.Random(rank), _ChunkRun.obey

    def slow(step, action):
        if pace.random() < 0.3:
            time.sleep(pace.random() / 100)
        obey(step, action)

    with mock.patch.object(_ChunkRun, "obey", slow):
        return steps(rank, world_size, virtual, plans)


@pytest.mark.processes
@pytest.mark.parametrize(("world_size", "virtual"), [(4, 2), (2, 4)])
def test_ranks_that_fall_behind_never_hang(world_size, virtual):
    assert run_ranks(delayed_steps, world_size, virtual, 3, seconds=90) == [3] * world_size


# ---- under the Trainer


def model_of(seed=0):
    return tiny_llama(seed=seed, num_hidden_layers=4, tie_word_embeddings=True)


def weights_of(trainer):
    parameters = trainer.flexseq.executor.stage.global_parameters()
    return {name: whole(p.detach()).numpy() for name, p in parameters}


def virtual_run(rank, world_size, folder, options):
    trainer = make_trainer(model_of(), folder, 2, batch=4 // world_size, **SEQ1F1B, **options)
    steps = noting_figures(trainer)
    trainer.train()
    assert logged(steps, "stages") == [4] * len(logged(trainer.state.log_history, "loss"))
    return weights_of(trainer), trainer.state.log_history, trainer.evaluate()["eval_loss"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, {}), pytest.param(4, FSDP | {"lookahead": 2}, marks=pytest.mark.nightly)],
)
def test_ten_steps_equal_the_plain_trainer(tmp_path, world_size, options):
    before, wanted, history = plain_run(tmp_path, batch=8, loss=float64_loss, model=model_of())
    results = run_ranks(virtual_run, world_size, tmp_path, options, seconds=150)
    assert update_error(before, wanted, joined(results)) < 1e-8
    for _, log, evaluated in results:
        assert evaluated == results[0][2]
        assert logged(log, "loss") == pytest.approx(logged(history, "loss"), rel=1e-6)
        assert logged(log, "grad_norm") == pytest.approx(logged(history, "grad_norm"), rel=1e-8)


SAVES = {"optim": "adamw_torch", "max_steps": 5, "save_strategy": "steps", "save_steps": 3}


def saved_run(rank, world_size, folder):
    trainer = make_trainer(model_of(), folder, 2, batch=4 // world_size, **SEQ1F1B, **SAVES)
    trainer.train()
    return (weights_of(trainer),)


def resumed_run(rank, world_size, folder, virtual):
    """From other weights; with two stages per rank every rank loads its own alone."""
    checkpoint = f"{folder}/checkpoint-3"
    schedule = "seq1f1b-i" if virtual > 1 else "seq1f1b"
    options = {**SEQ1F1B, "pipeline_schedule": schedule, **SAVES}
    trainer = make_trainer(
        checkpoint if virtual > 1 else model_of(99), folder, 2, batch=4 // world_size, **options
    )
    assert len(trainer.flexseq.executor.stage.virtual) == virtual
    trainer.train(resume_from_checkpoint=checkpoint)
    return (weights_of(trainer),)


@pytest.mark.processes
def test_a_checkpoint_is_the_same_for_any_number_of_stages_per_rank(tmp_path):
    before = {name: p.detach() for name, p in model_of().named_parameters()}
    wanted = {
        n: torch.as_tensor(np.array(p))
        for n, p in joined(run_ranks(saved_run, 2, tmp_path)).items()
    }
    assert update_error(before, wanted, joined(run_ranks(resumed_run, 2, tmp_path, 1))) < 1e-8
    loaded = joined(run_ranks(resumed_run, 2, tmp_path, 2))
    assert update_error(before, wanted, loaded) < 1e-3  # transformers' own norms round to float32
