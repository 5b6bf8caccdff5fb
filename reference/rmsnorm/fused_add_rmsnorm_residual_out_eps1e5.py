from .fused_add_rmsnorm_residual_out import run as run

EPS = 1e-5
