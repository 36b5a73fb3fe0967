"""Trees of rows that share prefixes, and groups that have some of them beside plain sequences."""

from hf_flexseq.plan.units import Node, Unit


def tree(*nodes, ends=()):
    """(parent, tokens) of nodes, and the nodes that end a row: all leaves, and those of `ends`,
    one row for each time that a node is there."""
    made = tuple(Node(*node) for node in nodes)
    leaves = set(range(len(made))) - {node.parent for node in made}
    return made, tuple(sorted([*ends, *leaves - set(ends)]))


TREES = {
    "pair": tree((-1, 13), (0, 4), (0, 7)),
    "answers of one token": tree((-1, 9), *[(0, 1)] * 5),
    "equal rows": tree((-1, 11), ends=[0, 0]),
    "a row that ends inside": tree((-1, 6), (0, 5), ends=[0]),
    "three deep": tree((-1, 5), (0, 3), (1, 2), (2, 8), (2, 1), (1, 4), (0, 10), ends=[1]),
    "long answers": tree((-1, 2), (0, 19), (0, 23)),
}
PLAIN = (17, 1)


def units_of(trees):
    """Units, and the tokens of every sequence of their plan, of rows inside of a unit 0; plain
    sequences come last."""
    units = []
    lengths = []
    for nodes, ends in trees:
        rows = tuple((len(lengths) + i, node) for i, node in enumerate(ends))
        unit = Unit(nodes, rows)
        unit.check()
        units.append(unit)
        lengths += [unit.tokens] + [0] * (len(rows) - 1)
    return tuple(units), (*lengths, *PLAIN)
