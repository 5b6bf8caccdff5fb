from .mamba_ssu_decode import run as run

BF16_STATE = False
