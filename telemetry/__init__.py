"""What the engine says of itself: metrics, spans, token records, business events."""
