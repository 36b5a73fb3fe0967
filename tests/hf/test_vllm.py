"""GRPO that samples with vLLM's stand-in: the stock trainer's weights and figures on two ranks."""

import json
import math
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import datasets
import pytest
import torch
from transformers import LlamaForCausalLM
from trl.generation import vllm_generation

from tests.budget import others_nightly
from tests.hf.objectives import BOUNDS, METRICS_BOUND, Case, difference, run_case, save_inputs
from tests.hf.plain import logged
from tests.ranks import run_ranks

# Two generation batches, the first one of two steps. Some samples are too long for one rank, and
# some ratios of whole samples are above the bound, which leaves these samples out.
SETTINGS = {
    "use_vllm": True,
    "num_iterations": 2,
    "max_completion_length": 16,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 1.0001,
}
CASES = {
    "server": ({"vllm_mode": "server"}, None),
    "server, adapter": ({"vllm_mode": "server", "beta": 0.0}, "retrained"),
    "colocate": ({"vllm_mode": "colocate"}, None),
    "by token": (
        {"vllm_mode": "colocate", "vllm_importance_sampling_mode": "token_truncate"},
        None,
    ),
}


def compare(rank, world_size, folder, name):
    """How far ours is from stock, what each asked of vLLM on this rank, and our log."""
    datasets.disable_progress_bars()
    settings, adapter = CASES[name]
    given = {"settings": SETTINGS | settings, "adapter": adapter}
    options = {"max_tokens_per_rank": 20, "plan_trace": str(folder / "trace.jsonl")}
    case = Case(kind="grpo", steps=3, flexseq=options, **given)
    with in_place_of_vllm(folder / "model", rank) as samplers:
        stock, ours = (run_case(case, is_ours, folder) for is_ours in (False, True))
    calls = [dict(sampler.calls) for sampler in samplers]
    return difference(stock, ours), calls, ours.log


@pytest.mark.processes
@pytest.mark.parametrize("name", others_nightly(list(CASES), tried=["server"]))
def test_two_ranks_train_on_what_vllm_samples_as_the_stock_trainer_does(name, tmp_path):
    save_inputs(tmp_path)
    by_rank = run_ranks(compare, 2, tmp_path, name, seconds=120)
    for rank, (apart, calls, log) in enumerate(by_rank):
        print(f"{name}, rank {rank}: {apart.weights:.1e} of the update, {apart.metrics:.1e}")
        assert apart.weights < BOUNDS["grpo"]
        assert apart.metrics < METRICS_BOUND, apart.metric
        assert not apart.missing
        talks = rank == 0 or "server" not in name  # a server hears the main process alone
        assert [call["loads"] for call in calls] == ([2, 2] if talks else [])
        assert [call["generations"] for call in calls] == ([2, 2] if talks else [])
        lowest = min(logged(log, "sampling/importance_sampling_ratio/min"))
        assert (lowest == 0.0) == (name != "by token")
    plans = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    micro_batches = [one for plan in plans for one in plan["micro_batches"]]
    assert any(len(group["ranks"]) == 2 for one in micro_batches for group in one["groups"])


END = 1  # the token that ends a completion


class Sampler:
    """A model, its random numbers, and how often it was asked for what."""

    def __init__(self, path, seed):
        self.model = LlamaForCausalLM.from_pretrained(path)
        self._random = torch.Generator().manual_seed(seed)
        self.calls = Counter()

    def load(self, weights):
        """Take all weights, (name, tensor) of each."""
        self.calls["loads"] += 1
        self.model.load_state_dict(dict(weights))

    @torch.no_grad()
    def sample(self, prompt, most):
        """A completion of at most so many tokens, and the log-probability of each."""
        ids, logprobs = list(prompt), []
        while len(logprobs) < most and (not logprobs or ids[-1] != END):
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
            scores = torch.log_softmax(logits.bfloat16().float(), dim=-1)  # [vocab]
            token = int(torch.multinomial(scores.exp(), 1, generator=self._random))
            ids.append(token)
            logprobs.append(float(scores[token]))
        return ids[len(prompt) :], logprobs


def client_of(sampler):
    """A class of clients, whose server samples with `sampler`."""

    class Client:
        """TRL's VLLMClient, as far as its trainers call it."""

        def __init__(self, base_url, group_port, connection_timeout):
            sampler.calls["clients"] += 1

        def init_communicator(self, device):
            assert device.type == "cpu"

        def get_server_info(self):
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def update_named_params(self, metadata, weights):
            weights = [(name, tensor.clone()) for name, tensor in weights]
            sent = [(n, str(w.dtype).removeprefix("torch."), list(w.shape)) for n, w in weights]
            assert sent == metadata
            sampler.load(weights)

        def reset_prefix_cache(self):
            sampler.calls["resets"] += 1

        def generate(self, prompts, features, n, max_tokens, logprobs, **options):
            assert features is None
            assert logprobs == 0  # of the sampled token alone
            sampler.calls["generations"] += 1
            rows = [sampler.sample(prompt, max_tokens) for prompt in prompts for _ in range(n)]
            return {
                "prompt_ids": prompts,
                "completion_ids": [tokens for tokens, _ in rows],
                "logprobs": [[[one] for one in found] for _, found in rows],
                "logprob_token_ids": [[[token] for token in tokens] for tokens, _ in rows],
            }

    return Client


def engine_of(sampler):
    """A class of engines in the trainer's own process, which sample with `sampler`."""

    class Engine:
        """vLLM's LLM, as far as TRL calls it."""

        def __init__(self, **options):
            assert options["distributed_executor_backend"] == "external_launcher"
            sampler.calls["engines"] += 1
            runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
            worker = SimpleNamespace(model_runner=runner)
            self.llm_engine = SimpleNamespace(
                model_executor=SimpleNamespace(driver_worker=worker),
                model_config=SimpleNamespace(max_model_len=math.inf),
            )
            self._sent = {}

        def _load(self, weights):
            self._sent |= {name: tensor.clone() for name, tensor in weights}

        def reset_prefix_cache(self):
            sampler.load(self._sent.items())
            self._sent = {}

        def generate(self, prompts, sampling_params, use_tqdm):
            sampler.calls["generations"] += 1
            results = []
            for prompt in prompts:
                ids = prompt["prompt_token_ids"]
                tokens, logprobs = sampler.sample(ids, sampling_params.max_tokens)
                found = [
                    {token: SimpleNamespace(rank=1, logprob=logprob)}
                    for token, logprob in zip(tokens, logprobs, strict=True)
                ]
                output = SimpleNamespace(token_ids=tokens, logprobs=found)
                results.append(SimpleNamespace(prompt_token_ids=ids, outputs=[output]))
            return results

    return Engine


@contextmanager
def in_place_of_vllm(path, rank):
    """Give each of TRL's trainers that is made inside the block a sampler; yields a list of them.

    path: of the model that a sampler begins with. rank: of this process.
    """
    made = []

    def new_sampler():
        made.append(Sampler(path, seed=rank))
        return made[-1]

    def client(**options):
        return client_of(new_sampler())(**options)

    def engine(**options):
        return engine_of(new_sampler())(**options)

    with ExitStack() as stack:
        for name, value in {
            "is_vllm_available": lambda: True,
            "VLLMClient": client,
            "LLM": engine,
            "SamplingParams": lambda **options: SimpleNamespace(**options),
        }.items():
            stack.enter_context(mock.patch.object(vllm_generation, name, value, create=True))
        yield made
