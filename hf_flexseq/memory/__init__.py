"""What a rank keeps of a micro-batch between forward and backward, where, and in which pieces."""
