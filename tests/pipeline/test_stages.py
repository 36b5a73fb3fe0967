"""A model cut in place: names, values, and what is refused."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.pipeline.checkpoint import StageMember, save_stage
from hf_flexseq.pipeline.stages import cut
from tests.hf.tiny import VOCAB
from tests.threads import ThreadHub

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": VOCAB}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def model_of(kind, **config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **config}))


def stages_of(model, count):
    return [cut(copy.deepcopy(model), index, count) for index in range(count)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "olmo", "olmo2", "gemma"])
def test_stages_one_after_the_other_are_the_model_and_each_parameter_is_on_one(kind):
    model = model_of(kind)
    ids = torch.randint(3, VOCAB, (1, 7))
    positions = torch.arange(7).unsqueeze(0)
    with torch.no_grad():
        wanted = model.get_decoder()(ids, use_cache=False).last_hidden_state
        for count in (2, 3):
            stages = stages_of(model, count)
            hidden = ids
            for stage in stages:
                hidden = stage.virtual[stage.index].hidden(hidden, position_ids=positions)
            assert torch.equal(hidden, wanted)

    names = [name for stage in stages for name, _ in stage.global_parameters()]
    tied = model.config.tie_word_embeddings
    assert sorted(set(names)) == sorted(dict(model.named_parameters()))
    assert len(names) == len(set(names)) + tied
    assert [stage.tied_parameter() is not None for stage in stages] == [tied, False, tied]


def test_a_large_vocabulary_takes_layers_from_the_last_stage():
    first, last = stages_of(model_of("llama", vocab_size=20000), 2)
    assert first.spans == ((0, 4), (4, 4))
    assert last.own_layers == {}


def test_a_stage_cannot_be_called_or_generate():
    ids = torch.tensor([[3, 4]])
    for stage in stages_of(model_of("llama"), 2):
        with pytest.raises(NotImplementedError, match="one stage of a pipeline"):
            stage.stack.model(ids)
        with pytest.raises(NotImplementedError, match="one stage of a pipeline"):
            stage.stack.model.generate(ids, max_new_tokens=1)


@pytest.mark.parametrize(
    ("in_the_way", "task"),
    [
        ("model-00002-of-00002.safetensors", "rank 0, clearing"),
        ("model-00002-of-00002.safetensors.partial", "rank 1, writing"),
        ("model.safetensors.index.json.partial", "rank 0, writing the index of"),
    ],
)
def test_no_rank_waits_for_another_one_that_cannot_write(tmp_path, in_the_way, task):
    """A folder is where a file should be written."""
    stages = stages_of(model_of("llama"), 2)
    (tmp_path / in_the_way).mkdir()

    def save(transport):
        communicator = Communicator(Topology(nodes=1, ranks_per_node=2), transport=transport)
        stage = stages[transport.rank]
        member = StageMember(stage=stage, communicator=communicator, index=0, is_sharded=False)
        with pytest.raises(RuntimeError) as caught:
            save_stage(member, str(tmp_path), dict)
        return str(caught.value)

    first, second = ThreadHub(2).run(save)
    assert first == second
    assert first.startswith(f"{task} {tmp_path}")
    assert not (tmp_path / "model.safetensors.index.json").exists()
