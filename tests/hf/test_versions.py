"""Versions of the libraries: those that are tested are those that the configuration allows and the
nightly jobs install, others are named once, and what an older one lacks is refused by name."""

import logging
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
from trl import SFTTrainer

from hf_flexseq.base import versions
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.loss_kinds import reads_logits_of_all_tokens
from hf_flexseq.hf.model.shared_prefixes import GIVES_SUMS
from hf_flexseq.hf.trainer.checks import check_trainer
from tests.differential.case import sft_trainer
from tests.hf.test_checks import make_trainer
from tests.hf.tiny import SIZES, refused
from tests.hf.trainers import trainer_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def older(monkeypatch):
    """Makes packages look older than they are: the checks must go by the version alone."""

    def older(**found):
        real = versions.installed
        monkeypatch.setattr(versions, "installed", lambda one: found.get(one) or real(one))

    yield older
    versions.warn_untested.cache_clear()


def llama(**config):
    return LlamaForCausalLM(LlamaConfig(**SIZES, **config))


def test_tested_versions_are_those_that_are_installed_for_the_tests():
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", text_of("scripts/constraints.txt"), re.M))
    configuration = tomllib.loads(text_of("pyproject.toml"))["project"]
    wanted = [*configuration["dependencies"]]
    for extra in configuration["optional-dependencies"].values():
        wanted += extra
    lowest = dict(re.findall(r"^(\w+)>=(.+)$", "\n".join(wanted), re.M))
    for package, (oldest, newest) in versions.TESTED.items():
        assert newest == pinned[package]
        assert oldest.startswith(lowest[package]), package


def test_nightly_jobs_install_the_oldest_and_the_newest():
    workflow = text_of(".github/workflows/tests.yml")
    jobs = [dict(re.findall(r"(\w+)==(\S+)", line)) for line in workflow.splitlines()]
    jobs = [job for job in jobs if {"transformers", "trl", "accelerate"} <= job.keys()]
    for package in ("transformers", "trl", "accelerate"):
        oldest, newest = versions.TESTED[package]
        found = [job[package] for job in jobs if "*" not in job[package]]
        assert {oldest, newest} <= set(found), package


def text_of(path):
    return (ROOT / path).read_text(encoding="utf-8")


# ---- the warning


def test_versions_outside_of_the_tested_ones_are_named_in_one_warning(older, caplog):
    older(transformers="5.99.0", trl="1.2.0", accelerate="1.14.1", peft="0.21.99")
    versions.warn_untested.cache_clear()
    with caplog.at_level(logging.WARNING):
        versions.warn_untested()
        versions.warn_untested()
    (record,) = caplog.records
    named = {package: "{} to {}".format(*versions.TESTED[package]) for package in versions.TESTED}
    assert f"transformers 5.99.0 (tested: {named['transformers']})" in record.message
    assert f"trl 1.2.0 (tested: {named['trl']})" in record.message
    assert "peft" not in record.message  # a patch changes no interface
    assert "accelerate" not in record.message


@pytest.mark.parametrize("is_of_trl", [False, True])
def test_trl_is_named_for_its_own_trainers_alone(older, caplog, tmp_path, is_of_trl):
    """ms-swift needs TRL below 1.0, of which its trainer of next-token loss uses nothing."""
    older(trl="1.99.0")
    versions.warn_untested.cache_clear()
    with caplog.at_level(logging.WARNING, "hf_flexseq"):
        if is_of_trl:
            sft_trainer(SFTTrainer, tmp_path, 2, flexseq={})
        else:
            trainer_of(Trainer, tmp_path, flexseq={})
    assert ("trl 1.99.0 (tested: 1.9.0 to" in caplog.text) == is_of_trl


# ---- what older versions lack


def test_losses_that_read_logits_are_refused(older, tmp_path):
    older(trl="1.9.0")
    kinds = {name: type(name, (), {})() for name in ("DPOTrainer", "RewardTrainer", "SFTTrainer")}
    assert reads_logits_of_all_tokens(kinds["DPOTrainer"]) is not None
    assert reads_logits_of_all_tokens(kinds["RewardTrainer"]) is None
    assert reads_logits_of_all_tokens(kinds["SFTTrainer"]) is None
    trainer = make_trainer(tmp_path)
    trainer.__class__ = type("DPOTrainer", (type(trainer),), {})
    with refused("DPOTrainer .it needs trl 1.15, and 1.9.0 is installed.: its loss reads logits"):
        check_trainer(trainer, trainer.flexseq.args)


@pytest.mark.parametrize("options", [{"loss_type": "dft"}, {"use_liger_kernel": True}])
def test_an_older_sft_trainer_reads_logits_or_sums(older, options, monkeypatch, tmp_path):
    """Sums of TRL's head count a token once that several rows share."""
    trainer = make_trainer(tmp_path, cost_model="estimate")
    stock = type(trainer)
    members = {"__module__": "trl", "compute_loss": stock.compute_loss}
    trainer.__class__ = type("SFTTrainer", (stock,), members)
    said = "use_liger_kernel=True" if "use_liger_kernel" in options else "loss_type='dft'"
    monkeypatch.setattr(trainer.args, "loss_type", "nll", raising=False)
    for name, value in options.items():
        monkeypatch.setattr(trainer.args, name, value)
    older(trl="1.15.0")
    assert reads_logits_of_all_tokens(trainer) is None
    older(trl="1.14.2")
    found = reads_logits_of_all_tokens(trainer)
    assert found == f"{said} of SFTTrainer (it needs trl 1.15, and 1.14.2 is installed)"
    trainer.args.loss_type = "chunked_nll"
    assert reads_logits_of_all_tokens(trainer) is None
    with trainer._attached():
        assert trainer.flexseq.reason_of_loss() == GIVES_SUMS


def test_losses_of_older_trainers_that_do_not_say_how_they_are_divided_are_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    stock = type(trainer)
    members = {"__module__": "trl.experimental.cpo", "compute_loss": stock.compute_loss}
    trainer.__class__ = type("CPOTrainer", (stock,), members)
    with refused("the loss of CPOTrainer: it is not divided by the tokens of the step"):
        check_trainer(trainer, trainer.flexseq.args)


def test_offloading_is_refused(older, tmp_path):
    options = {"use_reentrant": False, "offload": True}
    older(transformers="5.16.1")
    with refused("offload in .*_kwargs .it needs transformers 5.17, and 5.16.1 is"):
        make_trainer(tmp_path, gradient_checkpointing_kwargs=options)
    older(transformers="5.17.0")
    make_trainer(tmp_path, gradient_checkpointing_kwargs=options)


@pytest.mark.parametrize("size", ["fsdp_size", "ep_size"])
def test_models_that_are_sharded_at_load_are_refused(older, size):
    model = llama()
    older(transformers="5.22.2")
    model.config.distributed_config = SimpleNamespace(**{size: 1})
    check_model(model)
    model.config.distributed_config = SimpleNamespace(**{size: 2})
    with refused(f"{size}=2 of DistributedConfig: it needs transformers 5.23, and 5.22.2 is"):
        check_model(model)
