"""One thread per test process: several run side by side, and spinning threads would slow them all.

The tests that are about threads set their own number.
"""

import torch

torch.set_num_threads(1)
