"""Rollouts by vLLM servers: one asyncio process beside rank 0, and what it shares with the ranks.

    rank 0 --draw--> service --prompts--> servers        handle.py | service.py | pool.py, client.py
    service --finished, scored groups--> the bank        episodes.py, ../store.py
    every rank <--its own share-- the bank               ../store.py
    rank 0 --folder, probe--> service --> servers        handle.py | pool.py

No module of this folder imports torch.
"""
