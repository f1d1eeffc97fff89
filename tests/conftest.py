import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
# Two workers on two cores: more threads only get in each other's way.
torch.set_num_threads(1)
