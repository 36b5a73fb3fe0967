"""Errors that others' users reported, planted into a step on ranks one after the other: the
comparison of `flexseq prove` finds each. Errors inside of attention are planted in
`test_probe.py`, errors of losses and labels in `test_prove.py`."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3MoeForCausalLM, Qwen3VLForConditionalGeneration

from hf_flexseq.base.topology import Topology
from hf_flexseq.hf.engine import whole_model
from hf_flexseq.hf.model import experts, layer_memory, router
from hf_flexseq.hf.model.probe import lively_copy
from hf_flexseq.hf.model.small import small_model
from hf_flexseq.memory import tiles
from hf_flexseq.prove import command, trained
from hf_flexseq.steps import features, images
from hf_flexseq.steps.feature_form import FeatureForm
from tests.ranks import run_ranks

VISION, EXPERTS = Qwen3VLForConditionalGeneration, Qwen3MoeForCausalLM
IMAGES, ONE_IMAGE = "zigzag, images", "auto, one image"
MEMORY, ROUTER = "auto, least memory", "auto, router loss"
TWO = Topology(nodes=1, ranks_per_node=2)


# ---- errors: functions that patch, on every rank


def of_next_image(patch, rank):
    """A token has the features of the next token that stands for a part of an image."""
    number = features.image_rows

    def wrong(*given):
        rows = number(*given)
        is_part = rows != images.NO_ROW
        rows[is_part] = rows[is_part].roll(1)
        return rows

    patch.setattr(features, "image_rows", wrong)


def restarted_positions(patch, rank):
    """Positions in time, height and width begin anew inside of a sequence."""
    add = whole_model.with_image_columns

    def wrong(*given):
        row = add(*given)
        restarted = {images.GRID_POSITIONS: row.columns[images.GRID_POSITIONS] % 16}
        return replace(row, columns=row.columns | restarted)

    patch.setattr(whole_model, "with_image_columns", wrong)


def layers_without_features(patch, rank):
    """Layers get none of the features that belong to them."""
    give = FeatureForm.features

    def wrong(form, rows):
        first = rows.shape[1] - sum(form.widths[1:])
        return give(form, torch.cat([rows[:, :first], 0 * rows[:, first:]], dim=1))

    patch.setattr(FeatureForm, "features", wrong)


def mean_of_means(patch, rank):
    """The router loss is a mean of the means of micro-batches."""
    share = router.RouterLoss.share

    def mean(counts, probabilities, top_k):
        rows, own = counts.sum() / top_k, float(probabilities.detach().sum()) / MOE_LAYERS
        weights = counts.shape[0] * counts / rows / MOE_LAYERS / max(own, 1)
        return (weights.to(probabilities.dtype) * probabilities).sum() / 4

    def wrong(self):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(router, "router_loss", mean)
            return share(self)

    patch.setattr(router.RouterLoss, "share", wrong)


def last_tile_dropped(patch, rank):
    """The last tile of an MLP is not computed."""
    cut = tiles._pieces

    def wrong(x, count):
        pieces = list(cut(x, count))
        return [*pieces[:-1], 0 * pieces[-1]] if len(pieces) > 1 else pieces

    patch.setattr(tiles, "_pieces", wrong)


def choices_ignored(patch, rank):
    """Layers do as they are set for the run, whatever the plan says."""
    patch.setattr(layer_memory.LayerMemory, "_begin", lambda self, decoder, args, kwargs: None)


def experts_divided_twice(patch, rank):
    """Gradients of experts that are spread over ranks are divided by their number twice."""
    patch.setattr(experts, "_is_divided_twice", lambda mesh, dtype: False)


def reduced_on_one_rank(patch, rank):
    """One rank alone has the right gradients, and the other the double of them."""
    before_step = trained._NotedStep.on_pre_optimizer_step

    def wrong(*given, model, **others):
        for parameter in model.parameters() if rank == 1 else ():
            parameter.grad *= 2
        before_step(*given, model=model, **others)

    patch.setattr(trained._NotedStep, "on_pre_optimizer_step", wrong)


def left_whole(patch, rank):
    """transformers does not shard the model."""
    load = EXPERTS.from_pretrained.__func__

    def wrong(kind, folder, *, distributed_config, **options):
        return load(kind, folder, **options)

    patch.setattr(EXPERTS, "from_pretrained", classmethod(wrong))


def left_everywhere(patch, rank):
    """transformers shards the model, and spreads no experts."""
    make = trained.DistributedConfig
    patch.setattr(trained, "DistributedConfig", lambda fsdp_size, ep_size=1: make(fsdp_size=2))


MOE_LAYERS = 4
SHARDED, SPREAD = "auto, FSDP2", "auto, experts over ranks"
ERRORS = {
    of_next_image: (VISION, ONE_IMAGE),
    restarted_positions: (VISION, IMAGES),
    layers_without_features: (VISION, IMAGES),
    last_tile_dropped: (VISION, MEMORY),
    choices_ignored: (VISION, MEMORY),
    mean_of_means: (EXPERTS, ROUTER),
    experts_divided_twice: (EXPERTS, SPREAD),
    reduced_on_one_rank: (VISION, ONE_IMAGE),
    left_whole: (EXPERTS, SHARDED),
    left_everywhere: (EXPERTS, SPREAD),
}
NOT_RUN = {
    choices_ignored: "nothing has gone to the host, which every layer should use",
    left_whole: "transformers has left parameters whole on every rank",
    left_everywhere: "transformers has left all experts on every rank",
}
TRIED = (of_next_image, last_tile_dropped, reduced_on_one_rank)  # in every run


# ---- on ranks


def compared(rank, world_size, kind, planted):
    """What is said of each step: of that without an error, then of the others. planted: pairs of
    an error, None for none, and the title of a step."""
    model = lively_copy(small_model(kind, {}), torch.float64)
    subjects = dict(command._subjects(model, TWO, [], bf16=False))
    cases = command._cases(model, TWO, subjects, [])
    found = []
    for error, title in planted:
        case = cases[title]
        with pytest.MonkeyPatch.context() as patch:
            if error is not None:
                error(patch, rank)
            subject = subjects[case.subject]
            found.append(command._compared(subject, case, TWO, bf16=False))
    return found


def assert_found(kind, errors):
    titles = dict.fromkeys(ERRORS[error][1] for error in errors)
    planted = [*((None, title) for title in titles), *((one, ERRORS[one][1]) for one in errors)]
    for found in run_ranks(compared, 2, kind, planted, seconds=200):
        for (error, title), step in zip(planted, found, strict=True):
            if error in NOT_RUN:
                assert step == {"not_run": NOT_RUN[error]}
                continue
            assert step.get("has_trained"), (error, title, step)
            assert step["holds"] == (error is None), (error, title, step["difference"])


@pytest.mark.processes
def test_errors_of_images_and_memory_are_found():
    assert_found(VISION, TRIED)


def test_a_model_that_transformers_leaves_whole_is_not_trained_as_a_sharded_one(
    monkeypatch, tmp_path
):
    left_whole(monkeypatch, rank=0)
    with pytest.raises(NotImplementedError, match=NOT_RUN[left_whole]):
        trained._sharded(small_model(EXPERTS, {}), {"fsdp_size": 2}, str(tmp_path))


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("kind", [VISION, EXPERTS])
def test_every_planted_error_is_found(kind):
    assert_found(kind, [error for error, (of_kind, _) in ERRORS.items() if of_kind is kind])
