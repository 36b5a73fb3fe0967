"""What hf_flexseq takes for granted about torch, transformers, accelerate and TRL beyond their
documented interfaces.

One test, or one row of a table, for each such assumption: the signature that is relied on, and the
place where the library itself calls it. When an upstream release changes one of them, the test
that fails names the module of hf_flexseq that depends on it, before a user finds out.
"""
