"""`calibrate`: measure a model's cost model on this machine, alone or under torchrun."""

import os
from argparse import Namespace
from typing import Any


def calibrate(options: Namespace) -> None:
    """Measure, write the cost model, and say how well it holds."""
    try:
        from hf_flexseq.hf.calibration import command as measuring
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "measuring needs torch and transformers: pip install torch transformers accelerate "
            f"({error})"
        ) from error

    record = measuring.calibrate(
        options.model,
        dtype=options.dtype,
        output=options.json,
        checkpointing=options.checkpointing,
        zero_stage=options.zero_stage,
        expert_ranks=options.expert_ranks,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        print(_summary(record))


def _summary(record: dict[str, Any]) -> str:
    """Describe what was measured, the constants, and their errors, in a few lines."""
    cost = record["cost_model"]
    errors = record["hold_out"]
    nodes, ranks_per_node = record["topology"]
    speeds = ", ".join(f"{degree}: {speed / 1e9:.3g}" for degree, speed in cost["bandwidths"])
    linear_us = 1e6 * cost["linear_s"]
    micro_batch_ms = 1e3 * cost["micro_batch_s"]
    lines = (
        f"{record['model']} in {record['dtype']} on {nodes} x {ranks_per_node} "
        f"{record['device']}, torch {record['torch']}",
        f"{_attention(cost)}the rest {linear_us:.4g} us per token, {micro_batch_ms:.4g} ms per "
        "micro-batch",
        *_kinds(cost),
        *_experts(cost),
        *_tower(record),
        f"GB/s by degree: {speeds}",
        _host(record),
        *_host_memory(cost),
        f"on {len(errors['errors'])} micro-batches held out of the fit: off by "
        f"{100 * errors['median']:.1f} % at the median",
    )
    return "\n".join(lines)


def _attention(cost: dict[str, Any]) -> str:
    """Describe full attention as the beginning of a line; "" without such layers."""
    attention_ps = 1e12 * cost["attention_s"]
    if not cost["kinds"] and not cost["recurrent"]:
        return f"attention {attention_ps:.4g} ps per squared token, "
    if not attention_ps:
        return ""
    return f"full attention {attention_ps:.4g} ps per squared token, "


def _kinds(cost: dict[str, Any]) -> list[str]:
    """Describe each kind of layers with a window, a chunk or a recurrence in a line."""
    lines = []
    for kind in cost["kinds"]:
        lines.append(
            f"{100 * kind['share']:.3g} % of the layers with {reach_of(kind)}: "
            f"{1e12 * kind['attention_s']:.4g} ps per two pairs"
        )
    for kind in cost["recurrent"]:
        lines.append(
            f"{100 * kind['share']:.3g} % of the layers {kind['kind'].replace('_', ' ')}: "
            f"{1e6 * kind['token_s']:.4g} us per token, {1e6 * kind['again_s']:.4g} us more where "
            f"ranks share a sequence, {kind['summary_bytes'] / 2**20:.4g} MiB a summary"
        )
    return lines


def _experts(cost: dict[str, Any]) -> list[str]:
    """Describe experts that lie on several ranks, in a line."""
    experts = cost.get("experts")
    if experts is None:
        return []
    return [
        f"experts over {experts['ranks']} ranks: {1e6 * experts['token_s']:.4g} us per token, "
        f"exchanged at {experts['rate'] / 1e9:.3g} GB/s; the busiest rank has "
        f"{experts['imbalance']:.3g} times the mean, assumed: weights are not read"
    ]


def _tower(record: dict[str, Any]) -> list[str]:
    """Describe the vision tower, in a line."""
    tower = record["cost_model"].get("tower")
    if tower is None:
        return []
    is_trained = bool(tower["patch_bytes"])
    errors = record["hold_out"].get("tower")
    origin = "at the speed of text, since it was not timed"
    if errors:
        shares = ", ".join(f"{100 * error:.1f} %" for error in errors)
        origin = f"off by {shares} on images held out of the fit"
    constants = "".join(
        f"{1e3 * tower.get(name, 0.0):.4g} ms per {what}, "
        for name, what in (("image_s", "image"), ("call_s", "call"))
    )
    return [
        f"vision tower, {'trained' if is_trained else 'frozen'}: "
        f"{1e6 * tower['patch_s']:.4g} us per patch, {1e12 * tower['pair_s']:.4g} ps per pair, "
        f"{constants}{tower['patch_bytes'] / 2**10:.4g} KiB per patch, "
        f"{tower['patches_per_token']:.3g} patches per token; {origin}"
    ]


def _host(record: dict[str, Any]) -> str:
    """Describe what the host takes to launch and post attention, in a line."""
    nodes, ranks_per_node = record["topology"]
    if nodes * ranks_per_node == 1:
        return "launches and posts of groups: estimated, since one rank has no group"
    cost = record["cost_model"]
    launch_us, post_us, message_us = (
        1e6 * cost[name] for name in ("launch_s", "post_s", "message_s")
    )
    return (
        f"the host, all layers: {launch_us:.3g} us per launch, {post_us:.3g} us per post, "
        f"{message_us:.3g} us per message"
    )


def _host_memory(cost: dict[str, Any]) -> list[str]:
    """Describe a rank's way to the memory of its host, and what layers keep, in a line."""
    activations = cost.get("activations")
    if activations is None:
        return []
    out, back = (activations[name] / 1e9 for name in ("out_rate", "back_rate"))
    return [
        f"to the memory of the host {out:.3g} GB/s, from it {back:.3g} GB/s; "
        f"{cost['token_bytes'] / 2**10:.4g} KiB per token on the device"
    ]
