"""The timeout of a Trainer's arguments."""

from datetime import timedelta

import pytest

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.hf import executors
from tests.hf.tiny import documents, tiny_llama


def make_trainer(folder, **options):
    args = FlexSeqConfig(
        output_dir=str(folder), use_cpu=True, report_to="none", cost_model="estimate", **options
    )
    return FlexSeqTrainer(model=tiny_llama(), args=args, train_dataset=documents([3, 4]))


def test_a_trainer_gives_its_timeout_and_its_device_to_the_transport(tmp_path, monkeypatch):
    asked, connect = [], executors.connect

    def asking(device, *, timeout):
        asked.append((device.type, timeout))
        return connect(device, timeout=timeout)

    monkeypatch.setattr(executors, "connect", asking)
    make_trainer(tmp_path, ddp_timeout=7200)
    assert asked == [("cpu", timedelta(seconds=7200))]


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_timeout_of_nothing_is_refused(tmp_path, seconds):
    with pytest.raises(ValueError, match=rf"ddp_timeout={seconds}: .*more than 0") as raised:
        make_trainer(tmp_path, ddp_timeout=seconds)
    assert "\n" not in str(raised.value)
