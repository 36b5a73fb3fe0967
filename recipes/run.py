"""What every recipe does around its training: data, checkpoints, progress, saving, the end."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import datasets
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from arguments import CorpusArguments, ModelArguments
from bpe import cached_bpe
from characters import character_tokenizer
from corpus import document_columns, load_documents
from dequantize import use_checkpoint
from hf_flexseq import FlexSeqConfig
from launch import check_world
from mistakes import errors_in_a_line, refusals_in_a_line
from model import load_tokenizer
from progress import PlanProgress
from rows import check_template


def prepare(
    model_args: ModelArguments,
    data_args: CorpusArguments,
    training_args: FlexSeqConfig,
    *,
    made: Mapping[str, Callable[[], Dataset]],
    texts_of: Callable[[Dataset], Iterable[str] | None],
    to_rows: Callable[[Dataset, PreTrainedTokenizerBase, Any], tuple[Dataset, str]],
) -> tuple[PreTrainedTokenizerBase, Dataset, Dataset | None]:
    """Return (tokenizer, rows to train on, held-out rows or None).

    The first process of a node works, the others read its cache. Ends the program with one line
    for data that cannot be used.

    made: what returns those corpora that are made and not loaded.
    texts_of: returns what a tokenizer is trained on; None where documents are no text.
    to_rows: returns what the trainer gets, and one line about it.
    """
    if training_args.process_index:
        datasets.disable_progress_bars()
    with errors_in_a_line(), training_args.main_process_first():
        documents, held_out_documents = load_documents(data_args, made)
        dequantized = use_checkpoint(model_args)
        tokenizer = choose_tokenizer(model_args, data_args, lambda: texts_of(documents))
        columns = document_columns(documents, data_args)
        check_template(documents, columns, tokenizer, data_args)
        train, report = to_rows(documents, tokenizer, data_args)
        held_out, held_out_report = None, "nothing"
        if len(held_out_documents):
            held_out, held_out_report = to_rows(held_out_documents, tokenizer, data_args)
    if training_args.process_index == 0:
        lines = [dequantized, f"train on: {report}", f"held out: {held_out_report}"]
        print("\n".join(filter(None, lines)))
    return tokenizer, train, held_out


def choose_tokenizer(
    model_args: ModelArguments,
    data_args: CorpusArguments,
    find_texts: Callable[[], Iterable[str] | None],
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was named, or one trained on the texts of the corpus.

    find_texts: returns them; None where the corpus has conversations. Called where they are
        needed.
    """
    named = load_tokenizer(model_args)
    if named is not None:
        return named
    texts = find_texts()
    if texts is None:
        raise ValueError(
            f"a tokenizer is trained on text only: name a tokenizer_name_or_path for "
            f"{data_args.dataset}"
        )
    if model_args.new_tokenizer == "characters":
        return character_tokenizer(texts)
    return cached_bpe(texts, model_args.tokenizer_vocab_size, data_args.tokenizer_cache)


def start(args: FlexSeqConfig) -> str | None:
    """Make sure that the processes have found each other, and that there is a checkpoint if one
    was asked for, and name the plan trace; return the checkpoint to resume. Ends the program with
    one line otherwise."""
    with errors_in_a_line():
        check_world(args)
        checkpoint = checkpoint_to_resume(args)
    start_trace(args, anew=checkpoint is None)
    return checkpoint


def checkpoint_to_resume(args: FlexSeqConfig) -> str | None:
    """Return the checkpoint that was asked for, by default the last one of this output_dir."""
    asked = args.resume_from_checkpoint
    if str(asked).lower() == "false":
        return None
    if asked is not None and str(asked).lower() != "true":
        return asked
    last = None
    if Path(args.output_dir).is_dir():
        last = get_last_checkpoint(args.output_dir)
    if asked is not None and last is None:
        raise ValueError(
            f"resume_from_checkpoint={asked}, but there is no checkpoint in {args.output_dir}"
        )
    return last


def start_trace(args: FlexSeqConfig, anew: bool) -> None:
    """Name the plan trace; a run that starts anew does not continue the file of an earlier one."""
    args.plan_trace = args.plan_trace or f"{args.output_dir}/plan_trace.jsonl"
    if anew and args.process_index == 0:
        Path(args.plan_trace).unlink(missing_ok=True)


def train(
    trainer: Trainer,
    checkpoint: str | None,
    summary: Callable[[Trainer], list[str]],
    auto_class: str = "AutoModelForCausalLM",
) -> None:
    """Train, evaluate, save, and leave together; the first process prints the summary. Ends the
    program with one line for what hf_flexseq refuses, such as a sequence that fits nowhere.

    checkpoint: where training resumes, None at its start. summary: lines about what was learned.
    auto_class: what loads the model again.
    """
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(PlanProgress(getattr(trainer, "flexseq", None)))
    with refusals_in_a_line():
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.eval_dataset is not None:
            trainer.evaluate()
    save(trainer)
    if trainer.is_world_process_zero():
        print("\n".join(last_lines(trainer, summary, auto_class)))
    end(trainer)


def save(trainer: Trainer) -> None:
    """Save the whole model in one place, however it was sharded, and what was logged."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
    trainer.save_state()


def first_and_last(trainer: Trainer, name: str) -> tuple[float, float] | None:
    """Return the first and the last value that was logged under a name; None without any."""
    values = [log[name] for log in trainer.state.log_history if name in log]
    return (values[0], values[-1]) if values else None


def mean_of_ends(trainer: Trainer, name: str, count: int) -> tuple[float, float] | None:
    """Return the means of the first and of the last `count` values logged under a name.

    None where fewer than twice as many were logged: the two would not tell apart.
    """
    values = [log[name] for log in trainer.state.log_history if name in log]
    if len(values) < 2 * count:
        return None
    return mean(values[:count]), mean(values[-count:])


def last_lines(
    trainer: Trainer,
    summary: Callable[[Trainer], list[str]],
    auto_class: str = "AutoModelForCausalLM",
) -> list[str]:
    """Return the last lines of a run: what was learned, and where its plans and its model are."""
    args = trainer.args
    lines = summary(trainer)
    if args.plan_trace:
        lines.append(f"plan trace:    {args.plan_trace}")
    loading = f'{auto_class}.from_pretrained("{args.output_dir}")'
    lines.append(f"checkpoint:    {args.output_dir}  ({loading})")
    return lines


def end(trainer: Trainer) -> None:
    """Leave together: a process that ends while another still talks to it may abort.

    In between gloo's own thread drops the tensors of its last transfers, for which it needs the
    interpreter. Were the group destroyed meanwhile, which holds the interpreter and waits for that
    thread, the process would hang.
    """
    trainer.accelerator.wait_for_everyone()
    time.sleep(0.5)
    trainer.accelerator.end_training()
