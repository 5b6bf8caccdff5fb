"""Functions that gated delta nets share: their gates, the norm of queries and keys, and one step of the recurrence."""

import torch


def gates(A_log: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of the decay, -exp(A_log) softplus(x), and beta = sigmoid(b), in float32."""
    return -torch.exp(A_log) * torch.nn.functional.softplus(x), torch.sigmoid(b.float())


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., d] over the root of their sum of squares plus 1e-6, in float32."""
    x = x.float()
    return x / torch.sqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def per_value_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, key heads, d] -> float32 [rows, heads, d]: consecutive value heads share a key head."""
    return x.float().repeat_interleave(heads // x.shape[1], dim=1)


def delta_step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row: state [rows, heads, d_v, d_k], q and k [rows, heads, d_k], v [rows, heads, d_v], gates
    [rows, heads].

    The state decays; what it holds under the key is replaced by v, to the share beta; the query reads the result.
    """
    state = state * torch.exp(log_decay)[..., None, None]
    change = beta[..., None] * (v - torch.einsum("nhvk,nhk->nhv", state, k))
    state = state + change[..., None] * k[..., None, :]
    return torch.einsum("nhvk,nhk->nhv", state, q), state
