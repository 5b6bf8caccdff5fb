"""The end of a layer with manifold-constrained hyper-connections: a new mix of the residual streams and its output.

output[j] = post_layer_mix[j] x + sum over i of comb_res_mix[i, j] residual[i], for each of HC streams j. Computed in
float32 and rounded once, at the end.
"""

import torch

HC = 4
HIDDEN_SIZE = 4096


def run(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """x [num_tokens, hidden_size], residual [num_tokens, hc, hidden_size] -> output, as residual."""
    assert x.shape[1] == HIDDEN_SIZE
    assert residual.shape[1:] == (HC, HIDDEN_SIZE)
    assert post_layer_mix.shape[1] == HC
    assert comb_res_mix.shape[1:] == (HC, HC)
    output = post_layer_mix.unsqueeze(2) * x.unsqueeze(1)
    for old in range(HC):
        output = output + comb_res_mix[:, old].unsqueeze(2) * residual[:, old].unsqueeze(1)
    return output.to(torch.bfloat16)
