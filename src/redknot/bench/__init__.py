"""How fast, beside the best dense? Time to first token, its parts, decoding and capacity."""
