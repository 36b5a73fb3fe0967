"""Decide whether steps are drawn ahead of training.

With a lookahead samples are drawn some steps before they are trained on. Data that read how far
training has come would read an older state than under the plain Trainer. Nobody can see in a
user's code whether it reads an object of the trainer, a global, a file, or the clock. So without a
`lookahead` in the options steps are drawn ahead only if a library's code makes all samples, and no
code of the user's runs between steps that could change them: callbacks and the trainer's class.

Random numbers of torch are such a state, too: dropout, the loader of an evaluation and random data
draw from one generator. Data that use them are drawn in place, whatever the options say.

Rejected: to follow references from the data to the trainer. That misses globals, files and clocks.
"""

import inspect
import logging
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer

from hf_flexseq.config import LOOKAHEAD
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine.dataset_checks import draws_random_numbers
from hf_flexseq.hf.engine.loaders import LoaderProxy
from hf_flexseq.steps.console import beside_bars
from hf_flexseq.steps.users_code import is_known, is_librarys, package

logger = logging.getLogger(__name__)

# Attributes in which datasets, collators and samplers of libraries keep others.
_INNER = (
    *("dataset", "datasets", "data_collator", "_collator", "example_collator"),
    *("sampler", "batch_sampler"),
)
# Attributes in which the datasets library keeps what makes rows as they are read.
_MAKING = ("_format_kwargs", "_ex_iterable")


def draws_in_place(trainer: Trainer, dataloader: Any, communicator: Communicator) -> bool:
    """Decide if training steps are drawn when they run, on all ranks alike; log why. Collective
    over the world."""
    found = draws_random_numbers(trainer, dataloader)
    if found is not None:
        found = f"{found} draws from torch's random numbers, as dropout and evaluations do"
    elif trainer.flexseq.args.lookahead is None:
        found = own_code_of_data(dataloader) or _own_code_between_steps(trainer)
    return any_draws_in_place(found, communicator)


def any_draws_in_place(found: str | None, communicator: Communicator) -> bool:
    """Tell if a rank has `found` a reason to draw its steps when they run; log the first one.
    Collective over the world."""
    findings = communicator.cpu_group.gather_values(found)
    reason = next((one for one in findings if one is not None), None)
    if reason is not None and communicator.rank == 0:
        with beside_bars():
            logger.warning("steps are drawn when they run, since %s", reason)
    return reason is not None


def own_code_of_data(dataloader: Any) -> str | None:
    """Return that code of the user's makes the samples of a dataloader, in words, or None."""
    while isinstance(dataloader, LoaderProxy):
        dataloader = dataloader.dataloader
    parts = {"the dataloader": dataloader}
    if isinstance(dataloader, DataLoader):
        parts = {
            "the dataset": dataloader.dataset,
            "the data_collator": dataloader.collate_fn,
            "the sampler": dataloader.sampler,
            "the batch sampler": dataloader.batch_sampler,
            "worker_init_fn": dataloader.worker_init_fn,
        }
    for name, part in parts.items():
        for code in _code_of(part):
            if isinstance(code, types.GeneratorType) or not is_librarys(code):
                own = getattr(code, "__qualname__", type(code).__qualname__)
                return _may_follow(f"{own} of yours is in {name}")
    return None


def _own_code_between_steps(trainer: Trainer) -> str | None:
    """Return that code of the user's may run between two steps of a trainer, or None."""
    for callback in trainer.callback_handler.callbacks:
        if not is_known(type(callback)):
            return _may_follow(f"the callback {type(callback).__name__} is yours")
    for cls in type(trainer).__mro__:
        # A class that puts FlexSeqMixin in front of another one has no code.
        if not is_librarys(cls) and any(map(inspect.isroutine, vars(cls).values())):
            return _may_follow(f"the trainer's class {cls.__name__} is yours")
    return None


def _may_follow(why: str) -> str:
    return (
        f"the data may depend on how far training has come ({why}): set lookahead={LOOKAHEAD} if "
        "they do not, and planning is hidden behind training"
    )


def _code_of(part: Any) -> Iterator[Any]:
    """Yield an object that takes part in making samples, and all such objects and functions that
    objects of libraries keep."""
    yield part
    inside = vars(part) if hasattr(part, "__dict__") and is_librarys(part) else {}
    for name in _INNER:
        value = inside.get(name)
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                yield from _code_of(one)
    yield from _functions_in([inside.get(name) for name in _MAKING], seen=set())


def _functions_in(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the functions in objects of the datasets library, in order."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if callable(value) and not isinstance(value, type):
        yield value
        return
    parts = value
    if not isinstance(value, dict | list | tuple):
        parts = vars(value) if package(value) == "datasets" else ()
    for part in list(parts.values() if isinstance(parts, Mapping) else parts):
        yield from _functions_in(part, seen)
