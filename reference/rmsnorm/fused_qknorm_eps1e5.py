from .fused_qknorm import run as run

EPS = 1e-5
