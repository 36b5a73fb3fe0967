"""The default planner, `auto`: a search over groups, their degrees and their sequences.

The search for one optimizer step:

    problem    a block is a range of ranks that a group may have; `planner/problem.py` lists the
               sequences longest first, with nanoseconds and tokens on each shape of block
    targets    guess how long each micro-batch should take: many guesses, the candidates
    place      the long sequences of all candidates go on blocks, where the step grows least
    fill       the candidates whose long sequences take the least get their short sequences, one
               rank each
    repair     the fullest rank gives a sequence away, or swaps one, until nothing helps
    one degree one degree for everything is taken where that is faster by more than 1 %

`effort.py` has the numbers that say how much of each; `auto.py` puts the stages together.

A worked example: twelve sequences of 22,800 tokens on four ranks with memory for 3,500 tokens
each, at the costs of the preset flexsp-gpt-7b-a100. All milliseconds were printed by the code, and
tests/planner/test_parts.py checks them.

1. problem. Four ranks hold 14,000 tokens, so two micro-batches are needed; each costs a constant
   of 629 ms. The sequences and their milliseconds on one and on four ranks:

       tokens   9000  3000  2500  2000  1500  1200  1000   800   600   500   400   300
       1 rank      -   598   492   388   287   228   189   150   112    93    74    56
       4 ranks   561   164   135   107    79    63    52    41    31    26    21    15

   The longest needs all four ranks. Sharing is not free: on four ranks 3,000 tokens take
   4 x 164 = 656 ms of device time, on one rank 598 ms. At each sequence's cheapest degree all take
   1,228 ms of every rank. With the two constants that is 2,487 ms: no plan can be faster.
2. targets. 257 candidates. 243 of them try every combination of shapes for the six longest; their
   targets are 760 and 591 ms, the first longer because its chunk has the sequence of 9,000 tokens.
   The others ask for no shapes; their first targets are 578 to 792 ms.
3. place. All sequences count as long here. The best candidates take 2,509 ms (targets 594 + 671)
   and 2,511 ms (622 + 655).
4. fill and repair. No sequence is short, and no repair helps. The fullest ranks have 598 and
   652 ms:

       micro-batch 0   ranks 0-3: 9000   ranks 0-1: 800   ranks 2-3: 600 300
       micro-batch 1   rank 0: 3000   rank 1: 2500 500   rank 2: 2000 1000   rank 3: 1500 1200 400

5. one degree. Of the degrees that divide four ranks only four holds the longest sequence: 2,553
   ms. The plan of 2,509 ms stays, 0.9 % above the bound that no plan can undercut.
"""
