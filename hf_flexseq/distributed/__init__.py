"""The only place that creates process groups; it moves the bytes of attention, tokens and stages.

Collectives on these groups that need no more than one call are written where they are used.
"""
