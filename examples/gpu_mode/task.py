"""What kinds of data there are, for the other files."""

import torch

input_t = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
output_t = torch.Tensor
