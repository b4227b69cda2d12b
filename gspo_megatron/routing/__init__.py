"""Records, replays and compares routes: the experts that routers choose for tokens."""
