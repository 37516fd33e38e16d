"""What ranks have loaded when they start."""

import logging
import warnings

import torch
import torch.distributed.fsdp

torch.set_num_threads(1)
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
