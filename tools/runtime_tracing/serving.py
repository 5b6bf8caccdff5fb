"""SGLang's own steps of serving a batch, in every release: a ModelRunner, and prefill, decode and cached prefill."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def bench() -> Any:
    """The module whose functions prepare a batch and run a step."""
    try:
        return importlib.import_module("sglang.benchmark.one_batch")
    except ImportError:
        return importlib.import_module("sglang.bench_one_batch")


def graph_runners() -> list[Any]:
    """The classes whose `capture` captures CUDA graphs: of decoding, and since 0.5.17 of prefill."""
    importlib.import_module("sglang.srt.model_executor.model_runner")  # the modules import each other
    if importlib.util.find_spec("sglang.srt.model_executor.cuda_graph_runner") is not None:
        return [importlib.import_module("sglang.srt.model_executor.cuda_graph_runner").CudaGraphRunner]
    module = "sglang.srt.model_executor.runner.{}_cuda_graph_runner"
    found = [
        getattr(importlib.import_module(module.format(kind)), f"{kind.title()}CudaGraphRunner", None)
        for kind in ("decode", "prefill")
        if importlib.util.find_spec(module.format(kind)) is not None
    ]
    return [one for one in found if one is not None]


def server_arguments(path: str, shared: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """SGLang's ``ServerArgs``, checked and completed by SGLang.

    Args:
        shared: of every run; those that a release does not know are left out.
        given: of this run.

    Raises:
        ValueError: the release does not know one that is given.
    """
    from sglang.srt.server_args import ServerArgs

    known = set(inspect.signature(ServerArgs).parameters)
    # With DP attention, each rank has a share of the requests.
    ranks = given.get("dp_size", 1) if given.get("enable_dp_attention") else 1
    shared = {**shared, **_context(path, shared), "max_running_requests": shared["max_running_requests"] * ranks}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"this release of SGLang has no server argument {', '.join(unknown)}")
    settings = {name: value for name, value in shared.items() if name in known}
    server = ServerArgs(**{"model_path": path, **settings, **given})
    if hasattr(server, "resolve_once"):
        server.resolve_once()
        bench()._set_envs_and_config(server)
    return server


def _context(path: str, shared: Mapping[str, Any]) -> dict[str, int]:
    """The context of a run, which is no longer than the model's: SGLang refuses a longer one."""
    config = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    longest = next(
        (
            one["max_position_embeddings"]
            for one in (config, config.get("text_config", {}))
            if "max_position_embeddings" in one
        ),
        None,
    )
    return {"context_length": min(shared["context_length"], longest)} if longest and "context_length" in shared else {}


def model_runner(server: Any, rank: int = 0, port: int | None = None) -> Any:
    """The ModelRunner of a rank.

    Args:
        port: where the ranks meet; None if there is one.
    """
    ports = prepare(server, rank, port)
    runner, _ = bench().load_model(server, ports, rank, rank)
    runner = getattr(runner, "torch_runner", runner)
    if any(getattr(module, "w_kc", 0) is None for module in runner.model.modules()):
        runner.model.load_weights(())  # splits a weight of latent attention, which some models skip with dummy weights
    if getattr(server, "pp_size", 1) > 1:
        _first_stage(runner)
    return runner


def _first_stage(runner: Any) -> None:
    """Makes the first stage of a pipeline sample nothing: the last one sends the tokens, as in SGLang's scheduler."""
    import torch

    real = runner.forward

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = real(batch, *args, **kwargs)
        out.logits_output.next_token_logits = None
        return out

    runner.forward = forward
    runner.sample = lambda output, batch: torch.ones(batch.batch_size, dtype=torch.int64, device="cuda")


def prepare(server: Any, rank: int, port: int | None) -> Any:
    """Makes the arguments those of this process, as a scheduler does; returns the ports."""
    from sglang.srt.server_args import PortArgs

    ports = PortArgs.init_new(server)
    ports.nccl_port = port or ports.nccl_port
    steps = bench()
    steps.get_tokenizer = lambda *args, **kwargs: None
    if hasattr(steps, "_init_process_global_configs"):  # since 0.5.17, arguments are read from a context of the process
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

        world = spawn_world_rank(server, tp_rank=rank, pp_rank=0)
        publish(server, role="scheduler", ranks=SpawnRanks(world_rank=world, gpu_id=rank))
        steps._init_process_global_configs()
    else:
        for name in ("initialize_moe_config", "initialize_fp8_gemm_config", "initialize_fp4_gemm_config"):
            getattr(steps, name, lambda given: None)(server)
    return ports


def view(server: Any) -> Any:
    """The settings that SGLang derived from the server arguments; since 0.5.15, the arguments do not hold them."""
    return getattr(bench(), "resolving_view", lambda given: given)(server)


class Batch:
    """A batch of prompts.

    Attributes:
        runner: the ModelRunner.
        prompts: the length of each prompt, in tokens.
    """

    def __init__(self, runner: Any, prompts: Sequence[int]) -> None:
        self.runner, self.prompts, self.steps = runner, tuple(prompts), bench()
        self.batch: Any = None
        self.tokens: Any = None

    def prefill(self) -> None:
        """One step with all prompts, from an empty cache."""
        self.clear()
        self.tokens, _, self.batch = self.steps.extend(self._requests(), self.runner)

    def warm_up(self) -> None:
        """Compiles and tunes on a GPU what is compiled and tuned at first use."""
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

    def phases(self, names: Sequence[str]) -> list[tuple[str, Callable[[], None], Callable[[], None]]]:
        """Name, preparation and step of each phase, in an order in which each finds the cache that it needs."""
        known = {
            "prefill": (self.wait, self.prefill),
            "decode": (self.wait, self.decode),
            "extend": (self.prefill, self.extend),
        }
        return [(name, *steps) for name, steps in known.items() if name in names]

    def clear(self) -> None:
        """Forgets all requests."""
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()

    def decode(self) -> None:
        """One step that adds a token to each prompt."""
        self.tokens, _ = self.steps.decode(self.tokens, self.batch, self.runner)

    def extend(self) -> None:
        """One step with all prompts; the first half of each is in the cache already.

        Raises:
            RuntimeError: SGLang computed another number of tokens than the second halves have.
        """
        import torch

        page = self.runner.page_size
        halves = [length // 2 // page * page for length in self.prompts]
        requests = self.batch.reqs
        if _has_prefix(requests[0]):
            table = self.runner.req_to_token_pool.req_to_token
            rows = [request.req_pool_idx for request in requests]
            requests = self._requests(
                [table[row, :half].clone().to(torch.int64) for row, half in zip(rows, halves, strict=True)]
            )
        else:  # the next chunk of a request, whose prefix is in its row
            for request, half in zip(requests, halves, strict=True):
                request.prefix_len = half
        _, _, batch = self.steps.extend(requests, self.runner)
        if batch.extend_num_tokens != sum(self.prompts) - sum(halves):
            raise RuntimeError(f"extend: {batch.extend_num_tokens} tokens, not those of the second halves")

    def _requests(self, cached: Sequence[Any] = ()) -> list[Any]:
        """The requests; `cached` holds, for each, the places of the first tokens in the cache."""
        import torch
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        older = _has_prefix(Req)
        generator = torch.Generator().manual_seed(0)
        found = []
        for index, length in enumerate(self.prompts):
            sampling = SamplingParams(temperature=0.7, top_p=0.95, top_k=40, max_new_tokens=64)
            sampling.normalize(None)
            ids = torch.randint(2, 30000, (length,), generator=generator).tolist()
            request: Any = Req(
                rid=str(index),
                origin_input_text="",
                origin_input_ids=ids if hasattr(Req, "set_extend_input_len") else array("q", ids),
                sampling_params=sampling,
            )
            request.logprob_start_len = -1
            if older:
                if cached:
                    request.prefix_indices = cached[index]
                request.fill_ids = request.full_untruncated_fill_ids = request.origin_input_ids
                prefix = len(request.prefix_indices)
                if hasattr(request, "set_extend_range"):  # since 0.5.15
                    request.set_extend_range(prefix, length)
                else:
                    request.set_extend_input_len(length - prefix)
            else:
                request.full_untruncated_fill_ids = request.origin_input_ids
                request.extend_end = length
            found.append(request)
        return found


def _has_prefix(request: Any) -> bool:
    """Whether a request holds the places of its cached tokens. Since 0.5.17, they are in its row of a table alone."""
    return hasattr(request, "set_extend_input_len") or hasattr(request, "set_extend_range")
