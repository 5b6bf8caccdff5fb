"""The end of a model with hyper-connections: its residual streams are weighed and added up.

Each token's HC streams, seen as one vector v of HC * HIDDEN_SIZE features, have the weights pre =
sigmoid(hc_fn v / sqrt(mean(v^2) + EPS) * hc_scale + hc_base) + EPS. Computed in float32 and rounded once, at the end.
"""

import torch

HC = 4
HIDDEN_SIZE = 4096
HC_HIDDEN_SIZE = 16384
NUM_SCALES = 1
EPS = 1e-6


def run(x: torch.Tensor, hc_fn: torch.Tensor, hc_scale: torch.Tensor, hc_base: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, hc, hidden_size], hc_fn [hc, hc_hidden_size] -> output [num_tokens, hidden_size]."""
    assert x.shape[1:] == (HC, HIDDEN_SIZE)
    assert hc_fn.shape == (HC, HC_HIDDEN_SIZE)
    assert hc_scale.shape[0] == NUM_SCALES
    assert hc_base.shape[0] == HC
    streams = x.float()
    flat = streams.flatten(1)
    mixes = flat @ hc_fn.T * torch.rsqrt(flat.square().mean(dim=1, keepdim=True) + EPS)
    pre = torch.sigmoid(mixes * hc_scale + hc_base) + EPS
    return (pre.unsqueeze(2) * streams).sum(dim=1).to(torch.bfloat16)
