from .layernorm import run as run

EPS = 1e-5
