"""Questions about Python, with the topics of its own `help` as answers: a real text that every
Python has, 76 answers of 60 to 15,000 tokens, most of them short.

The pairs of preference tuning have the topic's text as the chosen answer, and as the rejected one
what small models like to say of anything.
"""

from collections.abc import Iterator

from datasets import Dataset

from corpus import stdlib

TOPICS = "python-topics"
EVASION = (
    "Python's documentation is a comprehensive guide that covers a wide range of topics, "
    "including syntax, data types, and usage. Please read it to learn more."
)

Message = dict[str, str]


def load_topics() -> Dataset:
    """Return the topics as conversations of a question and an answer."""
    return Dataset.from_generator(conversations, gen_kwargs=stdlib(__file__))


def load_topic_pairs() -> Dataset:
    """Return the topics as pairs of an answer and an evasion."""
    return Dataset.from_generator(pairs, gen_kwargs=stdlib(__file__))


def conversations(root: str, version: str) -> Iterator[dict[str, list[Message]]]:
    """Yield a row for each topic. root, version: unused, for the cache of `datasets`."""
    for question, answer in questions():
        yield {"messages": [_said("user", question), _said("assistant", answer)]}


def pairs(root: str, version: str) -> Iterator[dict[str, list[Message]]]:
    """Yield a row for each topic. root, version: unused, for the cache of `datasets`."""
    for question, answer in questions():
        yield {
            "prompt": [_said("user", question)],
            "chosen": [_said("assistant", answer)],
            "rejected": [_said("assistant", EVASION)],
        }


def questions() -> list[tuple[str, str]]:
    """Return (question, answer) for each topic, in the order of their names. Some topics have two
    names and are one row."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            f"dataset={TOPICS}: this Python comes without its topics (pydoc_data): install the "
            "whole standard library, or name another dataset"
        ) from error
    answers = {}
    for name in sorted(topics):
        title, _, text = topics[name].split("\n", 2)  # a line of stars is between
        answers[f"What does Python's documentation say about {title}?"] = text.strip()
    return list(answers.items())


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}
