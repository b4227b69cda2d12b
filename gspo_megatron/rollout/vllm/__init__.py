"""Rollouts by vLLM servers: one asyncio process beside rank 0, and what it shares with the ranks.

    rank 0 --request--> service --prompts--> servers    service_client | service, scheduler, client
    service --finished, scored groups--> the bank    episodes, ../store
    every rank <--its own share-- the bank           ../store
    ranks --weights, check--> service --> servers    weight_sync, weight_stream | weights, fleet

The service imports no torch. `weight_sync` and `weight_stream` do: they run on the ranks.
"""
