"""The section rollout.vllm, and the ranks of adapters that servers take."""

from __future__ import annotations

from typing import Any, Literal

from gspo_megatron.config.section import (
    MOST_SECONDS,
    NotNegative,
    Positive,
    Section,
    Text,
    harmless,
)

# The values that vLLM allows for its option max_lora_rank, the largest rank of adapters.
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class VllmSection(Section):
    """The vLLM servers of rollout.engine: vllm."""

    servers: NotNegative = harmless(
        0,
        "number of servers that the run starts, beside rank 0 or on the rollout nodes of a job "
        "(each node has the same number); 0: none, because the servers of urls are running already",
    )
    urls: list[Text] = harmless(
        [], "addresses of running servers, as http://host:port; GSPO_SERVER_TOKEN has their token"
    )
    tensor_parallel_size: Positive = harmless(1, "GPUs of each server that the run starts")
    python: Text | None = harmless(
        None, "Python interpreter of the environment that has vLLM; null: the training interpreter"
    )
    options: dict[str, Any] = harmless(
        {}, "further vLLM options of the servers that the run starts, as {max_num_seqs: 128}"
    )
    weight_transport: Literal["auto", "nccl", "disk"] = harmless(
        "auto",
        "how new weights get to the servers: nccl: rank 0 sends them to the workers (by gloo on "
        "CPUs); disk: through a folder; auto: nccl on GPUs if all servers can, else disk",
    )
    lora: Literal["merged", "adapter"] = harmless(
        "merged",
        "new weights of a run with model.lora: merged: whole models, with the adapters added; "
        "adapter: the adapters alone, which vLLM applies to the base in model.hf_path",
    )
    weights_dir: Text | None = harmless(
        None,
        "folder through which new weights get to the servers; all machines of the run must see it; "
        "null: /dev/shm for servers beside rank 0, else the run folder",
    )
    restarts: NotNegative = harmless(
        3,
        "largest number of restarts of each server, and of the rollout service; of a server of "
        "urls: largest number of attempts to use it again between two updates of its weights",
    )
    weight_update_timeout_seconds: Positive = harmless(
        600,
        "time limit for the start of a server, and for loading new weights; then the server is "
        "restarted",
        le=MOST_SECONDS,
    )
    stall_timeout_seconds: Positive = harmless(
        120, "time limit without an answer or a new token; then the server is restarted"
    )

    @property
    def takes_adapters(self) -> bool:
        """Whether new weights come as adapters, not as a whole model."""
        return self.lora == "adapter"


def served_rank(rank: int) -> int:
    """Return the smallest max_lora_rank of vLLM that is enough for adapters of this rank."""
    return next(size for size in SERVED_RANKS if size >= rank)
