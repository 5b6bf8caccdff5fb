"""SGLang with speculative decoding: a prefill of both models, and rounds in which one drafts and one verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tools.runtime_tracing import serving


def algorithm(server: Any) -> Any:
    """The algorithm of a server's arguments; None if it does not speculate."""
    name = getattr(serving.view(server), "speculative_algorithm", None)
    if name is None:
        return None
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string(name)


class Speculation(serving.Batch):
    """A batch of prompts on a server that speculates.

    Attributes:
        target, draft: SGLang's workers. The draft worker runs both models.
    """

    def __init__(self, server: Any, prompts: Sequence[int], rank: int = 0, port: int | None = None) -> None:
        ports = serving.prepare(server, rank, port)
        self.algorithm = algorithm(server)
        self.target, self.draft = self._workers(server, rank, ports)
        super().__init__(self.target.model_runner, prompts)

    def _workers(self, server: Any, rank: int, ports: Any) -> tuple[Any, Any]:
        """As the scheduler makes them: both are loaded before memory is shared out among them."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.managers.tp_worker import TpModelWorker

        start = serving.bench().bootstrap
        start.init_parallel_runtime(server_args=server, device="cuda", dist_port=ports.nccl_port)
        start.init_layer_runtime(model_config=ModelConfig.from_server_args(server))
        given = {"server_args": server, "gpu_id": rank, "nccl_port": ports.nccl_port}
        target = TpModelWorker(**given)
        draft = self.algorithm.create_worker(server)(**given, target_worker=target)
        target.alloc_memory_pool(draft_parallel_layout=draft.draft_parallel_layout)
        pool, allocator = target.get_memory_pool()
        config = target.model_runner.memory_pool_config
        draft.alloc_memory_pool(memory_pool_config=config, req_to_token_pool=pool, token_to_kv_pool_allocator=allocator)
        for worker in (target, draft):
            worker.init_attention_backends()
        for worker in (target, draft):
            worker.init_cuda_graphs()
        return target, draft

    def phases(self, names: Sequence[str]) -> list[tuple[str, Callable[[], None], Callable[[], None]]]:
        """As for any batch. One step drafts and verifies: `verifying` tells them apart."""
        known = {"prefill": (self.wait, self.prefill), "draft": (self.prefill, self.decode)}
        return [(name, *steps) for name, steps in known.items() if name in names]

    def verifying(self, within: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wraps the function in which the target model verifies."""
        kind: Any = type(self.draft)
        kind.verify = within(kind.verify)

    def prefill(self) -> None:
        """One step of both models with all prompts, from an empty cache."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        self.clear()
        allocator = self.runner.token_to_kv_pool_allocator
        page, device = self.runner.page_size, self.runner.device
        tree = self.steps.TreeCacheNamespace(page_size=page, device=device, token_to_kv_pool_allocator=allocator)
        pool, config = self.runner.req_to_token_pool, self.runner.model_config
        self.batch = ScheduleBatch.init_new(self._requests(), pool, allocator, tree, config, False, self.algorithm)
        self.batch.prepare_for_extend()
        self.batch.input_ids = self.batch.prefill_input_ids_cpu.to(device, non_blocking=True)
        self.batch.prefill_input_ids_cpu = None
        self._step()

    def decode(self) -> None:
        """One round: the draft model proposes tokens for each prompt, and the target model verifies them."""
        self.batch.prepare_for_decode()
        self._step()

    def _step(self) -> None:
        """Runs the batch, and undoes what the worker changed in it but for the draft, as the scheduler does."""
        import dataclasses

        before = {field.name: getattr(self.batch, field.name) for field in dataclasses.fields(self.batch)}
        self.batch.sampling_info = self.batch.sampling_info.copy_for_forward()
        result = self.draft.forward_batch_generation(self.batch)
        for name, value in before.items():
            setattr(self.batch, name, value)
        self.batch.spec_info, self.batch.input_ids = result.next_draft_input, None
