"""One thread for PyTorch: the models are tiny, and threads that wait for each other cost 20x."""

import torch

torch.set_num_threads(1)
