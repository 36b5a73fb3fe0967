"""Documents in the forms of other tools, written in those of `corpus.py`:

instruction, input, output      alpaca: a prompt in the words of stanford_alpaca, and its
                                completion; `input` may be missing or empty
conversations                   sharegpt: turns with `from` and `value`, as messages; a column
                                `system` is the first message
"""

from datasets import Dataset

from arguments import CorpusArguments

CONVERSATION = "conversations"
ALPACA = {"instruction", "output"}

# Who speaks in a turn of sharegpt, in the words of chat templates.
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}

# The prompts of https://github.com/tatsu-lab/stanford_alpaca, on which many models were trained.
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)


def in_own_form(documents: Dataset, args: CorpusArguments) -> Dataset:
    """Return alpaca's and sharegpt's rows as prompts and completions, or as messages; others, and
    rows that have a form of `args` already, as they are. Raises ValueError for unknown roles."""
    names = set(documents.column_names)
    own = set(args.forms.values())
    if any(set(columns) <= names for columns in own):
        return documents
    if ("messages",) in own and CONVERSATION in names:
        return documents.map(_messages, remove_columns=documents.column_names)
    if ("prompt", "completion") in own and names >= ALPACA:
        unread = sorted(names & {"history", "system"})
        if unread:
            raise ValueError(
                f"{args.dataset} has alpaca's columns and {' and '.join(unread)}, which alpaca's "
                "prompt has no place for: write the rows as messages"
            )
        return documents.map(_completion, remove_columns=documents.column_names)
    return documents


def _messages(row: dict) -> dict:
    """Return a conversation of sharegpt as messages; None stays, and is refused with its row."""
    if row[CONVERSATION] is None:
        return {"messages": None}
    turns = [{"from": "system", "value": row["system"]}] if row.get("system") else []
    messages = []
    for turn in [*turns, *row[CONVERSATION]]:
        role = turn.get("role") or _ROLES.get(turn.get("from"))
        if role is None:
            raise ValueError(
                f"a turn of {CONVERSATION} is from {turn.get('from')!r}, not from one of "
                f"{', '.join(_ROLES)}: write the rows as messages"
            )
        content = turn.get("content") if "content" in turn else turn.get("value")
        messages.append({"role": role, "content": content})
    return {"messages": messages}


def _completion(row: dict) -> dict:
    """Return a row of alpaca as prompt and completion; what is None stays, as above."""
    prompt = None
    if row["instruction"] is not None:
        form = _WITH_INPUT if row.get("input") else _WITHOUT_INPUT
        prompt = form.format(instruction=row["instruction"], input=row.get("input"))
    return {"prompt": prompt, "completion": row["output"]}
