"""Which experts tokens go to: recorded, replayed, compared."""
