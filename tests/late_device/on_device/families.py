"""Families of models on the device: four ranks on two nodes, under random plans, plain and
checkpointed. Loss and gradients are those of one process on a CPU, in float64 and with the same
kernel; nothing is found, and the package makes the host wait nowhere in a step."""

import traceback
from functools import partial

import pytest
import torch

from hf_flexseq.attention import SequenceContext
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.model.positions import needed_columns
from hf_flexseq.kernels import choose
from hf_flexseq.kernels.fused_operations import TorchFused
from hf_flexseq.plan.layout import PlanLayout
from hf_flexseq.steps.exchange import RowExchange
from hf_flexseq.steps.inputs import indices_to_run, inputs_of
from hf_flexseq.steps.token_columns import with_token_columns
from tests.hf import hybrids
from tests.hf.by_hand import TWO_NODES, attach, drawn_row, target_count
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.test_reach import FAMILIES, LENGTHS, keep_float64, make_model, plans_across
from tests.hf.tiny import documents, reference_gradients, relative_errors
from tests.kernels.reference import Reference
from tests.late_device.lanes import LateHub

CUDA = torch.device("cuda")

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def stays_in_float64(monkeypatch):
    keep_float64(monkeypatch)
    monkeypatch.setattr(choose, "_fused_for_cuda", TorchFused)


def inputs_on_device(model, plan, examples, communicator):
    """Inputs of the model for every micro-batch that this rank runs."""
    rank, world_size = communicator.rank, communicator.world_size
    sources = [index * world_size // len(examples) for index in range(len(examples))]
    row = drawn_row(examples, sources, communicator)
    layout = PlanLayout(plan, rank)
    row = with_token_columns(row, needed_columns(model))
    columns = RowExchange(communicator)(row, layout, sources)

    def make_context(shard):
        return SequenceContext(shard, communicator, Reference(), CUDA)

    for index in indices_to_run(layout.shards, lockstep=False):
        yield inputs_of(layout.shards[index], columns[index], CUDA, make_context)


def run_family(make, lengths, plans, *, mode):
    """Hold loss and gradients of every plan against one process. make: returns the model. mode:
    of hosts that wait, from the first micro-batch to the last."""
    examples = documents(lengths)
    targets = target_count(examples)
    wanted_loss, wanted = reference_gradients(make(), examples, attention="eager")

    twins = [make().to(CUDA) for _ in range(TWO_NODES.world_size)]

    torch.cuda.set_sync_debug_mode(mode)

    def run(transport):
        communicator = Communicator(TWO_NODES, transport=transport)
        model = twins[transport.rank]
        recurrent = attach(model)
        results = []
        for index, plan in enumerate(plans):
            if index % 2 and model.supports_gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            total = torch.zeros((), dtype=torch.float64, device=CUDA)
            for inputs in inputs_on_device(model, plan, examples, communicator):
                loss = model(**inputs, use_cache=False, num_items_in_batch=targets).loss
                loss.backward()
                total += loss.detach()
            communicator.all_reduce(total)
            gradients = {}
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                communicator.all_reduce(parameter.grad)
                gradients[name] = parameter.grad
            model.zero_grad()
            results.append((total, gradients))
        recurrent.close()
        return results

    of_ranks = LateHub(TWO_NODES.world_size).run(run)
    torch.cuda.set_sync_debug_mode("default")
    for total, gradients in (result for results in of_ranks for result in results):
        on_host = {name: gradient.cpu() for name, gradient in gradients.items()}
        assert max(relative_errors(on_host, wanted).values()) < 1e-10
        assert float(total) == pytest.approx(wanted_loss, rel=1e-10)


def check_family(make, lengths, plans):
    """Run a family, in which the host may not wait; a model that waits by itself, as those whose
    experts are looked for one after the other, is run again with leave to do so."""
    try:
        run_family(make, lengths, plans, mode="error")
    except RuntimeError as error:
        if "host wait" not in str(error) or in_package(error):
            raise
        torch.cuda.set_sync_debug_mode("default")
        run_family(make, lengths, plans, mode="default")


def in_package(error):
    """Whether the package's own code has raised an error, and not a model that it calls."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    innermost = next(name for name in reversed(files) if "/tests/" not in name)
    return "/hf_flexseq/" in innermost


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact_and_nothing_is_found(family):
    check_family(partial(make_model, family), LENGTHS, plans_across(LENGTHS, family))


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_is_exact_and_nothing_is_found(family):
    lengths = hybrids.LENGTHS
    check_family(partial(make_hybrid, family), lengths, plans_across(lengths, family))
