"""Settings that cannot work are refused when the run is configured, each with one line that says what to change."""

from accelerate import Accelerator

from hf_flexseq.config import FlexSeqArguments


def check_accelerator(accelerator: Accelerator, args: FlexSeqArguments) -> None:
    """Raise ValueError or NotImplementedError for an Accelerator that does not go with hf_flexseq."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    for name in ("cp_size", "sp_size", "tp_size"):
        size = getattr(parallelism, name, 1) or 1
        if size > 1:
            raise ValueError(
                f"{name}={size}: hf_flexseq chooses the sequence-parallel groups itself, over all ranks; "
                "leave parallelism_config out"
            )
    dataloader = accelerator.dataloader_config
    if dataloader.dispatch_batches:
        raise ValueError("dispatch_batches=True joins rows of different lengths; leave it at None")
    if dataloader.split_batches:
        raise ValueError("split_batches=True cuts rows that are not batches; leave it at False")
    if dataloader.use_stateful_dataloader and args.lookahead:
        raise ValueError("use_stateful_dataloader saves a state that lookahead has read past: set lookahead=0")


def check_trainer(trainer: object, args: FlexSeqArguments) -> None:
    """Raise ValueError or NotImplementedError for Trainer arguments that do not go with hf_flexseq."""
    training = trainer.args  # type: ignore[attr-defined]
    checkpointing_kwargs = (
        getattr(training, "activation_checkpointing_kwargs", None)
        or getattr(training, "gradient_checkpointing_kwargs", None)
        or {}
    )
    refused = {
        "n_gpu > 1 (DataParallel): start one process per GPU with accelerate launch": training.n_gpu > 1,
        "average_tokens_across_devices=False: tokens move between ranks, so only their common mean makes sense": (
            not training.average_tokens_across_devices
        ),
        "auto_find_batch_size: max_tokens_per_rank bounds the memory instead": training.auto_find_batch_size,
        "label_smoothing_factor: the Trainer's smoother would shift labels that are already shifted": (
            training.label_smoothing_factor != 0
        ),
        "compute_loss_func: it would see one rank's part of each sequence": (
            getattr(trainer, "compute_loss_func", None) is not None
        ),
        "compute_metrics: predictions stay spread over ranks; evaluate() gives the loss": (
            getattr(trainer, "compute_metrics", None) is not None
        ),
        "use_reentrant=True: use non-reentrant checkpointing, the default": checkpointing_kwargs.get("use_reentrant"),
        "torch_compile: every step has new shapes": training.torch_compile,
        "use_liger_kernel: it replaces the model's forward; hf_flexseq computes the loss in chunks by itself": (
            training.use_liger_kernel
        ),
        "packing=True: rows that are packed already would be taken for single sequences; set packing=False": (
            getattr(training, "packing", False) or getattr(training, "eval_packing", False)
        ),
        "neftune_noise_alpha: its noise depends on how sequences are packed": training.neftune_noise_alpha is not None,
    }
    for what, found in refused.items():
        if found:
            raise NotImplementedError(f"hf_flexseq does not support {what}")
