"""The attention of one rank in a micro-batch, compiled to flat lists of instructions.

A plan says which ranks work together on which sequences. Here it becomes, for one rank, a
*program*: a list of plain instructions (take these rows, post this exchange, wait for it, attend,
merge, ...) over numbered tensors. Every decision is made when the program is compiled: ring steps,
heads by rank, the order of zones. `attention/replay.py` obeys, layer after layer, and decides
nothing.

    instructions.py    Value, Rows, Instruction, Program, and its text form
    builder.py         Builder: emits instructions
    tables.py          Tables: the integers that instructions refer to
    exchange.py        messages between ranks
    row_exchange.py    rows that go to other ranks, and their gradients that come back
    weave.py           the order in which the zones of a rank go on
    calls.py ring.py ulysses.py hybrid.py
                       the attention of a zone, by strategy
    ring_exchanges.py  inputs that ring steps fetch, and results that they send back
    halo.py            the attention of a zone whose queries read a window or a chunk
    segments.py        the exchanges of recurrent layers
    compile.py         all zones of a micro-batch: forward, backward, backward of a replayed layer
    passes.py          passes that a planner may add, over finished programs
    tags.py            the one table of message tags

The modules of the strategies read like the attention that they describe: they are functions that
run once, on values without contents, and leave instructions behind.

Nothing here needs torch: programs are integers, and are tested without processes.
"""
