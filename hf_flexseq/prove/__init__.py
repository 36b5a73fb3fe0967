"""`flexseq prove`: show on the user's own machine that a model trains as on one process.

subject.py       the model that is named, made small, with its router loss and without
documents.py     its training data: texts, and texts with images in the form that it takes
drawn_images.py  images in that form
pinned.py        experts that are chosen by the token alone, in 16 bits
trained.py       one step of FlexSeqTrainer on all ranks, and the same step without hf_flexseq
command.py       all of it, as one record
"""
