"""One thread for every test: ranks are forked, and a forked child of a multi-threaded parent can hang."""

import torch

torch.set_num_threads(1)
