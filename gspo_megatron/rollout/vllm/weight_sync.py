"""Sends new weights from the ranks to the servers.

All ranks export the policy's weights: into a folder in Hugging Face format, or as a stream from
rank 0 to the servers' workers. Then they compute the responses that a server with these weights
must give to fixed prompts. Finally they wait until the service has compared the servers' responses
with these responses.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from gspo_megatron.addresses import is_loopback, own_address_for_servers, rollout_nodes, route_to
from gspo_megatron.config import Config
from gspo_megatron.errors import DataError, RolloutError, ServersEndError
from gspo_megatron.families import family_of
from gspo_megatron.hf.export import export_adapter, export_hf, stream_hf, stream_specs
from gspo_megatron.models.build import Policy
from gspo_megatron.platform.collectives import on_main
from gspo_megatron.platform.stop import StopSignals
from gspo_megatron.process.heartbeat import heartbeat
from gspo_megatron.rollout.engine import Requests, RolloutEngine, Sampling
from gspo_megatron.rollout.vllm.service_client import ServiceClient
from gspo_megatron.rollout.vllm.weight_check import WeightCheck, check_prompts, tolerances
from gspo_megatron.rollout.vllm.weight_stream import WeightStream
from gspo_megatron.rollout.vllm.weights_folder import MEMORY, is_private

_SPARE = "spare"  # name of a folder of old weights that the next version overwrites
_END = "the run and its servers were told to end"


@dataclass(eq=False)
class WeightSync:
    """Sends each version of the policy's weights to the servers.

    Each rank has a WeightSync, and all ranks call its methods together.
    """

    config: Config
    policy: Policy
    engine: RolloutEngine  # generates with the policy, and ignores end-of-sequence tokens
    device: torch.device
    hf_config: Any  # config.json of the model that the weights come from
    service: ServiceClient | None  # None except on rank 0
    folder: Path  # parent of the versions' folders
    stop: StopSignals
    version: int = 0  # the newest weights version
    streams: bool = False  # whether rank 0 streams weights to the servers, without a folder
    _stream: WeightStream | None = None  # only on rank 0

    @property
    def takes_adapters(self) -> bool:
        return self.config.rollout.vllm.takes_adapters

    def send_weights(self, version: int) -> dict[str, float]:
        """Send the policy's current weights to all servers. Returns metrics.

        Raises RolloutError on all ranks if no server passes the check of its weights within
        rollout.vllm.weight_update_timeout_seconds.
        """
        start = time.perf_counter()
        self.version = version
        weights: dict[str, Any] = {"version": version}
        weights |= {"folder": None, "check": None, "stream": None}
        if self.streams:
            num_bytes = self._send_stream(weights)
        else:
            weights["folder"], num_bytes = self._write_folder()
            on_main(lambda: self._on_main().take_weights(weights))
        # Computed while the servers load the weights.
        check = asdict(self._weight_check())
        on_main(lambda: self._on_main().add_to_weights(check=check))
        arrived = self.wait_for(self._weights_status)
        on_main(self._remove_older_folders)
        self.streams = self._wants_streams() and arrived["can_stream"]
        return {
            "sync/seconds": time.perf_counter() - start,
            "sync/bytes": float(num_bytes),
            "sync/version": float(version),
        }

    def go_on(self, config: Config, policy: Policy, engine: RolloutEngine) -> dict[str, float]:
        """Continue in the run's next phase, with that phase's configuration, policy and engine. The
        servers already have the policy's weights, from the end of the previous phase. Returns
        metrics.

        Raises RolloutError on all ranks if no server is left.
        """
        start = time.perf_counter()
        self.config, self.policy, self.engine = config, policy, engine
        self.wait_for(self._weights_status)
        return {
            "sync/seconds": time.perf_counter() - start,
            "sync/bytes": 0.0,
            "sync/version": float(self.version),
        }

    def wait_for(self, status: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Call `status` on rank 0 until the result says `done`, and return this result on all
        ranks.

        `status` itself waits for some seconds. If a server restarts in this time, the ranks write
        a folder with the newest weights for it. Raises ServersEndError if the run was told to stop,
        the servers were told to end, and they fail or two results are the same.
        """
        before: dict[str, Any] | None = None

        def look() -> tuple[dict[str, Any], bool]:
            nonlocal before
            service = self._on_main()
            try:
                found = status()
            except RolloutError as error:  # e.g. servers that were told to end while they started
                if self.stop.is_requested and service.told_to_end:
                    raise ServersEndError(_END) from error
                raise
            ends = self.stop.is_requested and service.told_to_end
            if ends and not found["done"] and found == before:
                raise ServersEndError(_END)
            before = found
            return found, service.needs_folder

        while True:
            found, needs_folder = on_main(look)
            if needs_folder:
                self._offer_folder()
            if found["done"]:
                return found

    def _on_main(self) -> ServiceClient:
        assert self.service is not None, "only rank 0 talks to the service"
        return self.service

    def _weights_status(self) -> dict[str, Any]:
        """Return the status of the new weights, on rank 0. The service gives the servers
        rollout.vllm.weight_update_timeout_seconds to take the weights."""
        heartbeat()
        return self._on_main().weights_status()

    def _wants_streams(self) -> bool:
        """Whether weights are streamed to servers that can take a stream."""
        transport = self.config.rollout.vllm.weight_transport
        is_chosen = transport == "nccl" or (transport == "auto" and self.device.type == "cuda")
        return is_chosen and not self.takes_adapters

    # Weights in a folder

    def _version_folder(self) -> Path:
        return self.folder / f"version_{self.version:08d}"

    def _write_folder(self) -> tuple[str, int]:
        """Write the newest weights into a folder. Returns the folder and its size in bytes. Raises
        DataError on all ranks, for example if there is no room."""
        folder, private = self._version_folder(), is_private(self.config)
        if self.takes_adapters:
            section, base = self.config.model.lora, str(self.config.model.hf_path)
            count = export_adapter(
                self.policy,
                folder,
                section,
                base,
                hf_config=self.hf_config,
                durable=False,
                private=private,
            )
            return str(folder.resolve()), count
        family = None if self.hf_config is None else family_of(self.hf_config)
        size = sum(spec.nbytes for spec in stream_specs(self.policy, family=family).values())
        on_main(lambda: self._check_room(size))
        export_hf(
            self.policy,
            folder,
            hf_config=self.hf_config,
            tokenizer=self.config.data.tokenizer,
            # After a crash nothing reads this folder, because the next start writes a new one.
            durable=False,
            reuse=folder.with_name(_SPARE),
            private=private,
        )
        count = on_main(lambda: sum(f.stat().st_size for f in folder.glob("*.safetensors")))
        return str(folder), count

    def _check_room(self, size: int) -> None:
        """Raise DataError if there is no room for new weights of `size` bytes, on rank 0. The first
        folder stays while the second is written, so both must fit, unless there is no second one
        or it is streamed."""
        if self._version_folder().with_name(_SPARE).is_dir():
            return  # it is overwritten
        is_last = self._wants_streams() or self.version >= self.config.training.steps
        versions = 1 if is_last or any(self.folder.iterdir()) else 2
        free = shutil.disk_usage(self.folder).free
        if free < versions * size:
            of = "two versions of the weights" if versions == 2 else "the weights"
            raise DataError(
                f"{self.folder}: {of} for the servers take {versions * size:,} bytes, and {free:,} "
                "are free; free some, or set rollout.vllm.weights_dir to a folder with more room"
            )

    def _offer_folder(self) -> None:
        """Write the newest weights into a folder for a server that restarts."""
        folder, _ = self._write_folder()
        on_main(lambda: self._on_main().add_to_weights(folder=folder))

    def _remove_older_folders(self) -> None:
        """Remove folders of weights that no server needs any more, on rank 0.

        If the folders are in memory, the newest of the unneeded folders is kept for the next
        version, because overwriting it is faster than getting new memory from the system.
        """
        newest = self._version_folder()
        older = sorted(folder for folder in newest.parent.iterdir() if folder != newest)
        spare = None
        if self.takes_adapters:  # vLLM may read adapters again for responses in progress
            older = older[: -self.config.rollout.staleness or None]
        elif older and newest.exists() and newest.is_relative_to(MEMORY):
            spare = older.pop()
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)
        if spare is not None:
            spare.rename(newest.with_name(_SPARE))

    # A stream from rank 0

    def _send_stream(self, weights: dict[str, Any]) -> int:
        """Stream the newest weights to all servers that can take a stream. Returns the size in
        bytes."""
        family = None if self.hf_config is None else family_of(self.hf_config)
        specs = stream_specs(self.policy, family=family)
        tensors = stream_hf(self.policy, family=family)
        layout: dict[str, Any] = {}  # WeightStream.plan; filled on rank 0
        receivers: dict[str, int] = {}  # key of a server -> number of its workers; on rank 0

        def begin() -> None:
            if self._stream is None:
                self._stream = _open_stream(self.config, self.device)
            layout.update(self._stream.plan(specs))
            receivers.update(self._on_main().take_weights({**weights, "stream": layout}))

        on_main(begin)
        if self._stream is not None:
            self._stream.send(layout, receivers, tensors, self._waiting_servers)
        for _ in tensors:  # the other ranks take part in gathering each tensor
            pass
        return sum(spec.nbytes for spec in specs.values())

    def _waiting_servers(self) -> list[str]:
        """Return the keys of the servers that wait for weights. Called on rank 0 during a stream.

        If the service is gone, the list is empty. All ranks then get the error together at the next
        call of the service.
        """
        try:
            return self._on_main().receivers()
        except RolloutError:
            return []

    # The check

    def _weight_check(self) -> WeightCheck:
        """Compute the responses that a server with the current weights must give to the prompts of
        the check."""
        longest = self.config.resolved_model().max_sequence_length
        all_prompts: list[list[int]] = []
        tokens: list[list[int]] = []
        logprobs: list[list[float]] = []
        for prompts, count in check_prompts(self.policy.vocab_size, longest):
            requests = Requests(prompts, range(len(prompts)))
            batch = self.engine.generate(requests, Sampling(count, temperature=0.0), seed=0)
            all_prompts += prompts
            tokens += batch.tokens.view(len(prompts), -1)[:, -count:].tolist()
            logprobs += batch.rollout_logprobs.view(-1, count).tolist()
        largest, mean = tolerances(
            self.config.training.precision,
            vocab_size=self.policy.vocab_size,
            latent=self.config.resolved_model().has_latent_attention,
            on_cpu=self.device.type == "cpu",
        )
        return WeightCheck(all_prompts, tokens, logprobs, largest, mean)


def _open_stream(config: Config, device: torch.device) -> WeightStream:
    """Listen at the address where the servers find this machine. The address is loopback if all
    servers run on this machine.

    Raises RolloutError if this process cannot listen there. Raises UserError if the address on the
    route to other machines is unknown.
    """
    hosts = [urlsplit(url).hostname or "" for url in config.rollout.vllm.urls]
    ways = [way for way in map(route_to, hosts) if way is not None and not is_loopback(way)]
    address = next(iter(ways), "127.0.0.1")
    if rollout_nodes():
        address = own_address_for_servers()
    try:
        return WeightStream(address, device, config.rollout.vllm.weight_update_timeout_seconds)
    except OSError as error:
        raise RolloutError(
            f"{address}: cannot listen for servers there: {error.strerror or error}; allowed: "
            "MASTER_ADDR is a name of rank 0's machine, or rollout.vllm.weight_transport: disk"
        ) from error
