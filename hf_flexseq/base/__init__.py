"""What all other folders speak of: checked values and records, layers, lengths, the topology of a
job, and the registry of names. It imports no other folder."""
