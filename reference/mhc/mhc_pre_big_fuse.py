"""The start of a layer with manifold-constrained hyper-connections, after the projection of the residual streams.

Each token's HC streams, seen as one vector of K features, were projected to MIX numbers, dot_mix, and its squares
added up to sqrsum. With y = dot_mix / sqrt(sqrsum / K + EPS), the first HC numbers give the weights of the streams in
the input of the layer, sigmoid(y mhc_scale[0] + base) + EPS; the next HC give post_mix = 2 sigmoid(y mhc_scale[1] +
base); and the last HC x HC give comb_mix, which is made almost doubly stochastic (Sinkhorn and Knopp): softmax of the
rows of y mhc_scale[2] + base, plus EPS, divided by the sums of columns, then in turn by the sums of rows and columns,
each plus EPS, SINKHORN_REPEAT times in all. Computed in float32; the input of the layer is rounded once.
"""

import torch

HC = 4
MIX = 24
NUM_SCALES = 3
HIDDEN_SIZE = 4096
SINKHORN_REPEAT = 20
EPS = 1e-6


def run(
    dot_mix: torch.Tensor,
    sqrsum: torch.Tensor,
    residual: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dot_mix [num_tokens, mix], sqrsum [num_tokens], residual [num_tokens, hc, hidden_size] -> three outputs.

    They are post_mix [num_tokens, hc], comb_mix [num_tokens, hc, hc] and layer_input [num_tokens, hidden_size].
    """
    assert dot_mix.shape[1] == mhc_base.shape[0] == MIX
    assert residual.shape[1:] == (HC, HIDDEN_SIZE)
    assert mhc_scale.shape[0] == NUM_SCALES
    y = dot_mix * torch.rsqrt(sqrsum / (HC * HIDDEN_SIZE) + EPS).unsqueeze(1)
    pre = torch.sigmoid(y[:, :HC] * mhc_scale[0] + mhc_base[:HC]) + EPS
    post = 2 * torch.sigmoid(y[:, HC : 2 * HC] * mhc_scale[1] + mhc_base[HC : 2 * HC])
    comb = torch.softmax((y[:, 2 * HC :] * mhc_scale[2] + mhc_base[2 * HC :]).view(len(y), HC, HC), dim=2) + EPS
    for step in range(SINKHORN_REPEAT):
        if step > 0:
            comb = comb / (comb.sum(dim=2, keepdim=True) + EPS)
        comb = comb / (comb.sum(dim=1, keepdim=True) + EPS)
    layer_input = (pre.unsqueeze(2) * residual).sum(dim=1)
    return post, comb, layer_input.to(torch.bfloat16)
