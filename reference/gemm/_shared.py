"""Functions that the gemm references share."""

import torch


def qserve_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Packed 4-bit weights [n, k / 2] int8 in QServe's tile order -> their values 0..15, [n, k] int8.

    A tile has 32 rows and 32 columns. Let a, b and d be below 2, c below 8, e and f below 4. Row 16 a + 8 b + c and
    column 16 d + 4 e + f are in byte (c, e, d, b, f) of their tile: rows with a = 0 in its low half, those with a = 1
    in its high half. The tiles of 32 rows follow each other along k.
    """
    rows, columns = packed.shape
    tiles = packed.view(rows // 32, columns // 16, 8, 4, 2, 2, 4)
    halves = torch.stack([tiles & 15, (tiles >> 4) & 15], dim=7)
    return halves.permute(0, 7, 5, 2, 1, 4, 3, 6).reshape(rows, 2 * columns)


def nvfp4_values(packed: torch.Tensor) -> torch.Tensor:
    """Packed e2m1 numbers [rows, k / 2] int8, the first of each pair in the low half -> float32 [rows, k]."""
    halves = torch.stack([packed & 15, (packed >> 4) & 15], dim=2).int()
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = torch.tensor(magnitudes + [-magnitude for magnitude in magnitudes], device=packed.device)
    return numbers.index_select(0, halves.flatten()).view(packed.shape[0], 2 * packed.shape[1])


def unswizzled(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales in the layout of Blackwell's tensor core -> float32 [rows, columns].

    The stored matrix is padded to multiples of 128 rows and 4 columns, and consists of tiles of 128 x 4 one after the
    other, along a row of tiles first. Within a tile, row 32 i + j and column l are at (j, i, l) of [32, 4, 4].
    """
    tiles = scales.float().view(-1, scales.shape[1] // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(scales.shape)[:rows, :columns]
