"""What is measured: shapes, and inputs of them in pages of random order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redknot.kernels.attend import Reach
from redknot.kernels.paging import PagedKV

from .peers import Prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One layer of a model and how long its prompts are; by default that of the issue's table."""

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    num_query_heads: int = 64
    num_kv_heads: int = 8  # the first sees everything, the others a window
    dim: int = 128
    sink: int = 4
    page_size: int = 128
    lengths: tuple[int, ...] = (8192, 32768, 131072)
    windows: tuple[int, ...] = (256, 4096)
    other_pages: tuple[tuple[int, int], ...] = ((32768, 64), (32768, 16))  # tokens, page size
    gathered: tuple[int, ...] = (32768, 131072)
    article: tuple[int, ...] = (8192, 16384, 32768)
    mask_tokens: int = 32768  # no explicit mask beyond
    graph_tokens: int = 8192  # below or at: also as CUDA graphs
    probes: tuple[int, ...] = (32768, 131072)
    probe_rows: int = 64
    small_page: int = 64  # of score, decode and append
    decodes: tuple[tuple[int, int], ...] = ((8, 32768), (32, 8192), (4, 131072))
    appends: tuple[tuple[int, int], ...] = ((8, 32768), (512, 4096))  # streams, rows
    ffn: tuple[int, int, int] = (32768, 5120, 25600)  # rows, hidden, inner
    ceiling: tuple[int, int] = (2**31, 8192)  # bytes of a copy, rows of a square matrix

    @property
    def tiny(self) -> bool:
        """A dry run of the plumbing."""
        return self.device.type == "cpu"

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return self.dim**-0.5

    @property
    def config(self) -> str:
        """In words, for the table."""
        return (
            f"{self.num_query_heads} query and {self.num_kv_heads} KV heads of {self.dim},"
            f" {str(self.dtype).removeprefix('torch.')}, KV head 0 global and the others local,"
            f" sink {self.sink}, pages in random order"
        )

    def windows_by_head(self, window: int) -> list[int | None]:
        """One global KV head, the others with ``window``."""
        return [None, *[window] * (self.num_kv_heads - 1)]

    def reaches(self, window: int) -> tuple[Reach, ...]:
        """The same with sinks."""
        return (Reach(), *[Reach(window, self.sink)] * (self.num_kv_heads - 1))

    def random(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def prefill(self, tokens: int, window: int) -> Prefill:
        """All rows of one prompt."""
        q = self.random(tokens, self.num_query_heads, self.dim).transpose(0, 1)
        k, v = (self.random(self.num_kv_heads, tokens, self.dim) for _ in range(2))
        return Prefill(q, k, v, self.windows_by_head(window), self.sink, self.scale)

    def in_pages(self, k: Tensor, v: Tensor, page_size: int) -> PagedKV:
        """A copy of [stream, token, dim] in pages of random order."""
        num_streams, num_tokens, dim = k.shape
        if num_tokens % page_size:
            raise ValueError(f"{num_tokens} tokens do not fill pages of {page_size}")
        order = torch.randperm(num_streams * num_tokens // page_size, device=k.device)
        key, value = (x.reshape(-1, page_size, dim)[order] for x in (k, v))
        table = order.argsort().view(num_streams, -1).to(torch.int32)
        return PagedKV(key, value, table, self.num_kv_heads)


def tiny() -> Setting:
    """Everything once, small enough for Triton's interpreter."""
    return Setting(
        device=torch.device("cpu"), dtype=torch.float32, num_query_heads=4, num_kv_heads=2, dim=32,
        page_size=32, lengths=(256,), windows=(64,), other_pages=((256, 16),), gathered=(256,),
        article=(128, 256), mask_tokens=256, graph_tokens=256, probes=(256,), probe_rows=8,
        small_page=32, decodes=((2, 256),), appends=((4, 64),), ffn=(64, 32, 64),
        ceiling=(2**20, 128),
    )  # fmt: skip
