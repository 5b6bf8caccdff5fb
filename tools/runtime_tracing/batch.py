"""The steps of serving a batch of prompts, as SGLang's scheduler makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tools.kernel_tracing.configuration.listed import Configuration


class Batch:
    """The prompts of a configuration, and the steps of serving them."""

    def __init__(self, runner: Any, configuration: Configuration) -> None:
        from sglang import bench_one_batch

        self.runner, self.steps, self.configuration = runner, bench_one_batch, configuration
        self.batch: Any = None
        self.tokens: Any = None

    def _requests(self, cached: Sequence[Any] = ()) -> list[Any]:
        """The requests; `cached` holds, for each, the places of the first tokens in the cache."""
        import torch
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        generator = torch.Generator().manual_seed(0)
        found = []
        for index, length in enumerate(self.configuration.prompts):
            sampling = SamplingParams(temperature=0.7, top_p=0.95, top_k=40, max_new_tokens=64)
            sampling.normalize(None)
            ids = torch.randint(2, 30000, (length,), generator=generator).tolist()
            request = Req(rid=str(index), origin_input_text="", origin_input_ids=ids, sampling_params=sampling)
            request.fill_ids = request.origin_input_ids
            request.logprob_start_len = -1
            if cached:
                request.prefix_indices = cached[index]
            request.set_extend_input_len(len(request.fill_ids) - len(request.prefix_indices))
            found.append(request)
        return found

    def prefill(self) -> None:
        """One step with all prompts, from an empty cache."""
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        requests = self._requests()
        self.tokens, _, self.batch = self.steps.extend(requests, self.runner)

    def phases(self) -> list[tuple[str, Callable[[], None], Callable[[], None]]]:
        """Name, preparation and step of each phase, in an order in which each finds the cache that it needs."""
        known = {
            "prefill": (self.wait, self.prefill),
            "decode": (self.wait, self.decode),
            "extend": (self.prefill, self.extend),
        }
        return [(name, *steps) for name, steps in known.items() if name in self.configuration.phases]

    def extend(self) -> None:
        """One step with all prompts, of which the first half is in the cache already."""
        import torch

        page = self.runner.page_size
        table = self.runner.req_to_token_pool.req_to_token
        halves = [length // 2 // page * page for length in self.configuration.prompts]
        rows = [request.req_pool_idx for request in self.batch.reqs]
        cached = [table[row, :half].clone().to(torch.int64) for row, half in zip(rows, halves, strict=True)]
        self.steps.extend(self._requests(cached), self.runner)

    def decode(self) -> None:
        """One step that adds a token to each prompt."""
        self.tokens, _ = self.steps.decode(self.tokens, self.batch, self.runner)

    def warm_up(self) -> None:
        """Compiles and tunes what is compiled and tuned at first use."""
        import torch

        self.prefill()
        self.wait()
        with torch.profiler.profile():  # the first one takes seconds to start
            self.prefill()
            self.wait()

    def wait(self) -> None:
        """Until the GPU is idle."""
        import torch

        torch.cuda.synchronize()
