"""Settings for all tests."""

import torch

# Tiny tensors gain nothing from threads, and the test processes would fight for the cores.
torch.set_num_threads(1)
