"""Types that all other folders use: checked values and records, layers, lengths, the topology
of a job, and the registry of names. It imports no other folder."""
