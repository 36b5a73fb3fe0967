"""DataCollatorForFlexSeq: flat rows with shifted labels, padding cut off, and examples it
refuses."""

import copy
import pickle

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening

from hf_flexseq import DataCollatorForFlexSeq
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.collator import PaddedCollator

THREE = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
TWO = {"input_ids": [8, 9], "labels": [8, 9]}
NOTHING = {"input_ids": [], "labels": []}


def test_flattens_and_shifts_inside_each_sequence():
    batch = DataCollatorForFlexSeq()([THREE, TWO])
    assert batch.pop("lengths") == [3, 2]
    assert batch.pop("first_labels") == [-100, 8]
    assert {name: column.tolist() for name, column in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[6, 7, -100, 9, -100]],
        "shift_labels": [[6, 7, -100, 9, -100]],
        "position_ids": [[0, 1, 2, 0, 1]],
    }


def pad(example, left, right):
    tokens = len(example["input_ids"])
    padded = {name: [0] * left + list(value) + [0] * right for name, value in example.items()}
    return padded | {"attention_mask": [0] * left + [1] * tokens + [0] * right}


def padding_collator(left):
    """A collator that pads to five tokens on one side."""

    def collate(examples):
        rows = []
        for example in examples:
            room = 5 - len(example["input_ids"])
            rows.append(pad(example, room if left else 0, 0 if left else room))
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    return collate


def as_arrays(example):
    return {name: np.array(value, np.int32) for name, value in example.items()}


@pytest.mark.parametrize(
    "other, examples",
    [
        (None, [pad(THREE, 0, 4), pad(TWO, 0, 0)]),
        (None, [pad(THREE, 2, 0), pad(TWO, 1, 1)]),
        (padding_collator(left=True), [THREE, TWO]),
        (padding_collator(left=False), [THREE, TWO]),
        (DataCollatorWithFlattening(return_flash_attn_kwargs=True), [THREE, TWO]),
        (DataCollatorWithFlattening(return_seq_idx=True), [THREE, TWO]),
        (None, [as_arrays(THREE), as_arrays(TWO)]),
        (None, [THREE | {"text": "abc", "other": None}, TWO | {"text": "", "other": None}]),
    ],
)
def test_all_forms_of_the_same_examples_give_the_same_row(other, examples):
    wanted = DataCollatorForFlexSeq()([THREE, TWO])
    found = DataCollatorForFlexSeq(other)(examples)
    assert found.pop("lengths") == wanted.pop("lengths")
    # some forms have no label for the first token, where nothing predicts it
    first_labels = wanted.pop("first_labels")
    assert found.pop("first_labels", first_labels) == first_labels
    for count in ("padding_targets", "other_rows"):  # some have labels of padding
        found.pop(count, None)
    assert found.keys() == wanted.keys()
    for name, column in wanted.items():
        assert torch.equal(found[name], column)
        assert found[name].dtype == torch.int64


@pytest.mark.parametrize(
    "values",
    [[1, 2], [-1, 2**62], [1, 0.5], [0.1, 2], [True, False], [1, True], [1, torch.tensor(2)]],
)
def test_lists_become_what_torch_makes_of_them(values):
    example = {"input_ids": [3, 4], "labels": [3, 4], "column": values}
    (found,) = DataCollatorForFlexSeq()([example])["column"]
    wanted = torch.as_tensor(values)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_keeps_positions_and_other_columns_of_one_value_per_token():
    others = {"position_ids": [4, 5, 9], "weights": [0.5, 1.0, 0.0]}
    batch = DataCollatorForFlexSeq()([THREE | others])
    assert {name: batch[name].tolist() for name in others} == {n: [v] for n, v in others.items()}


def test_takes_a_packed_example_apart_where_its_positions_begin_again():
    packed = {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [1, 2, 3, 4, 5, 6]}
    packed |= {"position_ids": [0, 1, 2, 0, 1, 0], "weights": [0.5, 1.0, 0.0, 0.1, 0.2, 0.3]}
    apart = []
    for start, stop in ((0, 3), (3, 5), (5, 6)):
        apart.append({name: value[start:stop] for name, value in packed.items()})
    batch, wanted = (DataCollatorForFlexSeq()(given) for given in ([packed], apart))
    assert batch["lengths"] == wanted["lengths"] == [3, 2, 1]
    assert batch["first_labels"] == wanted["first_labels"] == [1, 4, 6]
    # the plain Trainer has targets of the two first tokens that another sequence is in front of
    assert batch.pop("padding_targets") == 2
    for name in batch.keys() - {"lengths", "first_labels"}:
        assert batch[name].tolist() == wanted[name].tolist(), name
    pixels = torch.ones(1, 2)
    with_images = packed | {"position_ids": list(range(6)), "pixel_values": pixels}
    batch = DataCollatorForFlexSeq()([packed, with_images])
    assert batch["lengths"] == [3, 2, 1, 6]
    assert batch["images"] == [{}, {}, {}, {"pixel_values": pixels}]


def test_a_padded_batch_keeps_the_sequences_of_packed_examples():
    packed = {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [1, 2, 3, 4, 5, 6]}
    numbered = packed | {"cu_seq_lens_q": [0, 3, 5, 6]}
    batch = PaddedCollator(DataCollatorForFlexSeq())([numbered, THREE])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 0, 0]]
    assert batch["labels"][0].tolist() == [-100, 2, 3, -100, 5, -100]
    call = ModelCall.read({**batch, "cu_seq_lens_q": None}, of_tokens=True)
    assert call.lengths == [3, 2, 1, 3]
    assert call.in_row(call.targets)[:6].tolist() == [2, 3, -100, 5, -100, -100]
    fixed = torch.tensor([[3, 4, 5, 0, 2, 4], [7, 8, 9, 0, 0, 0]])
    call = ModelCall.read({**batch, "position_ids": fixed}, of_tokens=True)
    assert call.lengths == [3, 3, 3]
    assert call.positions_in_row().tolist() == [3, 4, 5, 0, 2, 4, 7, 8, 9]
    for wrong in (torch.tensor([[0, 1, 2, 1, 2, 3], [0, 1, 2, 0, 0, 0]]), torch.zeros(3, 2, 6)):
        with pytest.raises(ValueError, match="neither rise nor begin at 0 again"):
            ModelCall.read({**batch, "position_ids": wrong}, of_tokens=True)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q and without position_ids"):
        ModelCall.read({**packed, "cu_seq_lens_q": [0, 3, 6]}, of_tokens=True)


def test_a_padded_batch_has_the_images_of_all_examples():
    pixels = torch.arange(6.0).reshape(3, 2)
    examples = [THREE | {"pixel_values": pixels[:1]}, THREE, THREE | {"pixel_values": pixels[1:]}]
    collator = PaddedCollator(DataCollatorForFlexSeq())
    batch = collator(examples)
    assert torch.equal(batch["pixel_values"], pixels)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (3, 3)
    with pytest.raises(ValueError, match=r"pixel_values .* are of different shapes, \(2,\) and"):
        collator([*examples, THREE | {"pixel_values": torch.ones(1, 5)}])


@pytest.mark.parametrize(
    "example, message",
    [
        ({"input_ids": [1, 2]}, "example 1 has no labels"),
        ({"input_ids": [1, 2], "labels": None}, "example 1 has no labels"),
        ({"text": "abc", "labels": [1]}, "example 1 has no input_ids: tokenize it"),
        (NOTHING, "example 1 has no tokens: filter empty examples out"),
        (pad(NOTHING, 0, 3), "example 1 has no tokens"),
        (THREE | {"labels": [6, 7]}, r"column 'labels' of example 1 has shape \(2,\)"),
        (THREE | {"attention_mask": [0, 1, 3, 3]}, "name the limits of .* packed row cu_seqlens"),
        (THREE | {"weight": 3}, r"'weight' of example 1 has shape \(\), not one value for each"),
        ({n: [v] for n, v in THREE.items()}, r"'input_ids' of example 1 has shape \(1, 3\)"),
        (THREE | {"messages": [{"role": "user"}]}, "'messages' of example 1 cannot be a tensor"),
        (THREE | {"spans": [[1], [1, 2]]}, "'spans' of example 1 cannot be .*drop the column"),
        (THREE | {"position_ids": [0, 1, 1]}, "of example 1 neither rise nor begin at 0"),
        (
            THREE | {"position_ids": [0, 1, 0], "pixel_values": torch.ones(1, 2)},
            "example 1 begin again: it is packed, and it has pixel_values",
        ),
        (THREE | {"attention_mask": [1, 0, 1]}, "attention_mask of example 1 does more than to m"),
        (THREE | {"attention_mask": [1, 1, 2]}, "attention_mask of example 1 does more than to m"),
        (THREE | {"weights": [1, 1, 1]}, "example 1 has the columns .*'weights'.*, the first one"),
    ],
)
def test_refuses_examples_that_cannot_be_moved(example, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForFlexSeq()([TWO, example])


@pytest.mark.parametrize(
    "made, message",
    [
        (
            {"bias": torch.zeros(1, 3, 4)},
            r"'bias' .* shape \(1, 3, 4\) instead of",
        ),
        ({"names": ["abc"]}, "column 'names' .* shape None"),
        ({"input_ids": torch.zeros(2, 2)}, r"'input_ids' .* shape \(2, 2\) instead of \(1, 2\)"),
        ({"attention_mask": torch.ones(1, 1, 2, 2)}, "column 'attention_mask'"),
    ],
)
def test_refuses_what_another_collator_makes_by_name(made, message):
    def collate(examples):
        return {"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2]]), **made}

    with pytest.raises(ValueError, match=message):
        DataCollatorForFlexSeq(collate)([TWO])


def test_refuses_a_collator_that_makes_no_batch():
    message = "the collator made a list of example 0, not a batch of columns"
    with pytest.raises(ValueError, match=message) as raised:
        DataCollatorForFlexSeq(lambda examples: examples)([TWO])
    assert "\n" not in str(raised.value)


# ---- targets that are shifted already

FOUR, NEXT = [10, 11, 12, 13], [11, 12, 13, 14]
AHEAD = {"input_ids": FOUR, "labels": NEXT, "shift_labels": NEXT}  # as accelerate's examples
MASKED = {"input_ids": FOUR, "labels": FOUR, "shift_labels": [-100, 12, 13, -100]}


def one_row(examples):
    """A collator of one example, as most of users are."""
    return {name: torch.tensor([value]) for name, value in examples[0].items()}


@pytest.mark.parametrize("other", [None, one_row])
@pytest.mark.parametrize(
    ("example", "targets"),
    [
        (AHEAD, NEXT),
        (MASKED, [-100, 12, 13, -100]),
        (AHEAD | {"labels": [-100, 12, 13, 14]}, NEXT),  # the masks may differ, as under stock
        (pad(AHEAD, 2, 0), NEXT),
        (pad(AHEAD, 0, 2), NEXT),
        (AHEAD | {"position_ids": [0, 1, 0, 1]}, NEXT),
        (AHEAD | {"cu_seqlens": np.array([0, 1, 4], np.int32)}, NEXT),
        # labels that are not shifted, though some are the next token
        ({"input_ids": [7, 7, 7, 7], "labels": [7, 7, 7, 7]}, [7, 7, 7, -100]),
        ({"input_ids": [1, 2, 1, 2], "labels": [-100, 2, 1, 2]}, [2, 1, 2, -100]),
        ({"input_ids": FOUR, "labels": [11, 12, 5, -100]}, [12, 5, -100, -100]),
        ({"input_ids": FOUR, "labels": [11, 12, -100, 9]}, [12, -100, 9, -100]),
    ],
)
def test_targets_are_those_that_were_given_or_labels_shifted_once(example, targets, other):
    batch = DataCollatorForFlexSeq(other)([example])
    assert batch["labels"].tolist() == batch["shift_labels"].tolist() == [targets]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"input_ids": FOUR, "labels": NEXT}, "labels of example 0 are shifted already"),
        ({"input_ids": [7, *FOUR], "labels": [-100, *NEXT]}, "labels of example 0 are shifted al"),
        ({"input_ids": [7, 7, 8, 8, 9, 3], "labels": [7, 8, 8, 9, 3, 1]}, "are shifted already"),
        (pad({"input_ids": FOUR, "labels": NEXT}, 2, 0), "labels of example 0 are shifted alrea"),
        ({"input_ids": [*FOUR, 0, 0], "labels": [*NEXT, -100, -100]}, "are shifted already"),
        (MASKED | {"shift_labels": [12, 13, 14, 15]}, "shift_labels of example 0 contradict its"),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_labels_that_would_be_shifted_twice_are_refused(example, message, padded):
    collator = DataCollatorForFlexSeq()
    with pytest.raises(ValueError, match=message) as raised:
        (PaddedCollator(collator) if padded else collator)([example])
    assert "\n" not in str(raised.value)


def test_short_answers_are_judged_together():
    """One label says little: chance is excluded when several examples in a row agree."""
    shifted_already = []
    for answer in (20, 21, 22):
        shifted_already.append({"input_ids": [5, 6, answer], "labels": [-100, answer, -100]})
    other = {"input_ids": [5, 6, 7], "labels": [-100, 5, -100]}
    DataCollatorForFlexSeq()([*shifted_already[:2], other, *shifted_already[:2]])
    collator = DataCollatorForFlexSeq()
    collator(shifted_already[:2])
    with pytest.raises(ValueError, match="labels of example 0 are shifted already"):
        collator(shifted_already[2:])


def test_a_padded_batch_keeps_targets_beside_labels():
    short = {name: values[:2] for name, values in AHEAD.items()}
    batch = PaddedCollator(DataCollatorForFlexSeq())([AHEAD, short])
    wanted = [NEXT, [11, 12, -100, -100]]
    assert batch["labels"].tolist() == batch["shift_labels"].tolist() == wanted


# ---- columns that divide a row

SIX = {"input_ids": [*FOUR, 20, 21], "labels": [*FOUR, -100, 21]}
APART = [{n: v[:4] for n, v in SIX.items()}, {n: v[4:] for n, v in SIX.items()}]


@pytest.mark.parametrize(
    "columns",
    [
        {"cu_seq_lens_q": [0, 4, 6], "cu_seq_lens_k": [0, 4, 6], "max_length_q": 4},
        {"cu_seqlens": np.array([0, 4, 6, 6])},  # some packers fill it up to a fixed size
        {"seq_lengths": [4, 2]},
        {"seq_lengths": [4, 2], "seq_idx": [0, 0, 0, 0, 1, 1]},
        {"position_ids": [0, 1, 2, 3, 0, 1], "segment_ids": [1, 1, 1, 1, 2, 2]},
    ],
)
def test_a_row_is_taken_apart_where_its_columns_say(columns):
    batch, wanted = (DataCollatorForFlexSeq()(given) for given in ([SIX | columns], APART))
    assert batch.keys() == wanted.keys()
    assert batch["lengths"] == wanted["lengths"]
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(batch[name], wanted[name])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"cu_seqlens": [0, 4, 7]}, r"cu_seqlens of example 0 is \[0, 4, 7\], which does not div"),
        ({"cu_seqlens": [4, 6]}, r"cu_seqlens of example 0 is \[4, 6\], which does not divide"),
        ({"cu_seqlens": [0, 4, 2, 6]}, "which does not divide its 6 tokens"),
        ({"seq_lengths": [4, 1]}, "seq_lengths of example 0 .* which does not divide its 6 tok"),
        ({"seq_idx": [0, 0, 0, 0, 1, 1]}, "seq_idx of example 0 begins a sequence at token 4"),
        (
            {"cu_seq_lens_q": [0, 4, 6], "position_ids": [0, 1, 0, 1, 2, 3]},
            "position_ids of example 0 begins a sequence at token 2, where nothing else divides",
        ),
    ],
)
def test_columns_that_divide_a_row_otherwise_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForFlexSeq()([SIX | columns])


# ---- masks of targets

IDS, COMPLETION = [1, 2, 3, 4], [0, 0, 1, 1]
OF_COMPLETION = {"completion_mask": COMPLETION}
OF_ASSISTANT = {"assistant_masks": COMPLETION}


def labels_of_all(examples):
    """What collators for plain language modelling do."""
    ids = torch.tensor([example["input_ids"] for example in examples])
    return {"input_ids": ids, "labels": ids.clone()}


def labels_by(name, first=0, last=None, start=()):
    """A collator that takes a mask out of its example, may cut tokens off an end and put others at
    the start."""

    def collate(examples):
        (example,) = examples
        ids, mask = example["input_ids"][first:last], example.pop(name)[first:last]
        labels = [token if is_target else -100 for token, is_target in zip(ids, mask, strict=True)]
        return {
            "input_ids": torch.tensor([[*start, *ids]]),
            "labels": torch.tensor([[-100] * len(start) + labels]),
        }

    return collate


def labels_of_the_first(examples):
    """Cuts tokens off the end, and only then forgets the mask."""
    return labels_of_all([{"input_ids": example["input_ids"][:2]} for example in examples])


@pytest.mark.parametrize("masks", [OF_COMPLETION, OF_ASSISTANT])
@pytest.mark.parametrize(
    "other, message",
    [
        (labels_of_all, "example 0 has {name} but no labels, .* give `labels`"),
        (labels_of_the_first, "example 0 has {name} but no labels, .* give `labels`"),
        (DataCollatorWithFlattening(), "example 0 has {name} but no labels, .* give `labels`"),
        (None, "example 0 has no labels: it has {name}, so give .* -100 where"),
    ],
)
def test_refuses_masks_that_no_labels_follow(masks, other, message):
    (name,) = masks
    with pytest.raises(ValueError, match=message.format(name=name)) as raised:
        DataCollatorForFlexSeq(other)([{"input_ids": IDS, **masks}])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "collator, example, labels",
    [
        (labels_by("completion_mask"), OF_COMPLETION, [-100, 3, 4, -100]),
        (labels_by("assistant_masks", last=3), OF_ASSISTANT, [-100, 3, -100]),
        (labels_by("completion_mask", first=1), OF_COMPLETION, [3, 4, -100]),
        (labels_by("completion_mask", start=[9]), OF_COMPLETION, [-100, -100, 3, 4, -100]),
        # neither end has the tokens of the mask
        (labels_by("completion_mask", last=3, start=[9]), OF_COMPLETION, [-100, -100, 3, -100]),
        (
            labels_by("assistant_masks"),
            OF_ASSISTANT | {"completion_mask": [0, 1, 1, 1]},
            [-100, 3, 4, -100],
        ),
        (labels_of_all, {"completion_mask": [1, 1, 1, 1]}, [2, 3, 4, -100]),
        (labels_of_all, OF_COMPLETION | {"labels": IDS}, [2, 3, 4, -100]),
    ],
)
def test_takes_labels_that_follow_a_mask(collator, example, labels):
    batch = DataCollatorForFlexSeq(collator)([{"input_ids": IDS, **example}])
    assert batch["labels"].tolist() == [labels]


# ---- what another collator has


class WithTokenizer:
    def __init__(self):
        self.tokenizer = "a tokenizer"

    def __call__(self, examples):
        return {name: torch.tensor([value]) for name, value in examples[0].items()}


def test_has_what_the_other_collator_has_and_nothing_else():
    collator = DataCollatorForFlexSeq(WithTokenizer())
    assert collator.tokenizer == "a tokenizer"
    for without in (collator, DataCollatorForFlexSeq()):
        assert not hasattr(without, "feature_extractor")
    message = "DataCollatorForFlexSeq has no attribute 'tokenizer'"
    with pytest.raises(AttributeError, match=message):
        _ = DataCollatorForFlexSeq().tokenizer


def pickled(collator):
    return pickle.loads(pickle.dumps(collator))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("other", [None, WithTokenizer()])
def test_a_copy_collates_as_the_collator_does(copied, other):
    """Workers of a dataloader get a pickled one."""
    collator = DataCollatorForFlexSeq(other)
    twin = copied(collator)
    assert type(twin) is DataCollatorForFlexSeq
    assert hasattr(twin, "tokenizer") == (other is not None)
    found, wanted = twin([THREE]), collator([THREE])
    assert found.keys() == wanted.keys()
    assert torch.equal(found["labels"], wanted["labels"])


def test_positions_of_a_call_lie_where_its_ids_do():
    call = ModelCall.read({"input_ids": torch.tensor([[1, 2, 3]])}, of_tokens=True)
    assert call.positions_in_row().tolist() == [0, 1, 2]
    call.ids = call.ids.to("meta")  # in the place of another device
    assert call.positions_in_row().device.type == "meta"
