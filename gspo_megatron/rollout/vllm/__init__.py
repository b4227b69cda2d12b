"""Rollouts by vLLM servers: the rollout service (an asyncio process beside rank 0), and its clients
on the ranks.

    rank 0 --request--> service --prompts--> servers    service_client | service, scheduler, client
    service --finished, scored groups--> the store   episodes, ../store
    every rank <--its own share-- the store          ../store
    ranks --weights, check--> service --> servers    weight_sync, weight_stream | weights, fleet

The service does not import torch. `weight_sync` and `weight_stream` import torch, because they run
on the ranks.
"""
